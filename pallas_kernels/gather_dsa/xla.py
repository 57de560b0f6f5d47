"""gather_dsa in XLA."""

from pallas_kernels import index
from pallas_kernels.codecs import dsa


def gather_dsa(kv_buffer, loc, *, kv_lora_rank, dtype, layer, **slots):
    row = index.local_row(loc, index.rows_of(kv_buffer, layer), **slots)
    return dsa.decode(index.take_rows(kv_buffer, row, layer=layer), kv_lora_rank, dtype)
