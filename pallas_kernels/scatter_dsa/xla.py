"""scatter_dsa in XLA."""

from pallas_kernels import codecs, index
from pallas_kernels.codecs import dsa


def scatter_dsa(kv_buffer, loc, nope, rope, *, kv_lora_rank, layer, **slots):
    row = index.local_row(loc, index.rows_of(kv_buffer, layer), **slots)
    if rope is None:
        nope, rope = nope[..., :kv_lora_rank], nope[..., kv_lora_rank:]
    return index.set_rows(kv_buffer, row, dsa.encode(nope, rope, codecs.divide_for_fp8), layer=layer)
