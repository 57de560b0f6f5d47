"""gather_dsa in XLA."""

from jax import lax

from pallas_kernels import index
from pallas_kernels.codecs import dsa


def gather_dsa(kv_buffer, loc, *, kv_lora_rank, dtype, layer, **slots):
    row = index.local_row(loc, index.rows_of(kv_buffer, layer), **slots)
    words = lax.optimization_barrier(index.take_rows(kv_buffer, row, layer=layer))  # as in gather_fp4
    return dsa.decode(words, kv_lora_rank, dtype)
