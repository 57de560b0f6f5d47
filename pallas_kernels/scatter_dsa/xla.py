"""scatter_dsa in XLA: a slice scatter for each part of the row, cheaper than concatenating it first."""

import itertools

from pallas_kernels import codecs, index
from pallas_kernels.codecs import dsa


def scatter_dsa(kv_buffer, loc, nope, rope, *, kv_lora_rank, layer, **slots):
    row = index.local_row(loc, index.rows_of(kv_buffer, layer), **slots)
    if rope is None:
        nope, rope = nope[..., :kv_lora_rank], nope[..., kv_lora_rank:]
    parts = dsa.encode(nope, rope, codecs.divide_for_fp8)
    ends = itertools.accumulate((part.shape[-1] for part in parts), initial=0)
    for (start, end), part in zip(itertools.pairwise(ends), parts, strict=True):
        kv_buffer = index.set_rows(kv_buffer, row, part, layer=layer, columns=slice(start, end))
    return kv_buffer
