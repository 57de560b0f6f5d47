"""gather_fp4 in XLA."""

from jax import lax

from pallas_kernels import index
from pallas_kernels.codecs import fp4


def gather_fp4(buffers, scale_buffers, loc, *, dtype, layer, split, **slots):
    row = index.local_row(loc, index.rows_of(buffers[0], layer), **slots)
    words = [[index.take_rows(b, row, layer=layer) for b in some] for some in (buffers, scale_buffers)]
    words = lax.optimization_barrier(words)  # XLA on CPU would look up the row again for every element
    rows = tuple(fp4.decode(packed, scales, dtype) for packed, scales in zip(*words, strict=True))
    return rows if split is None else tuple((r[..., :split], r[..., split:]) for r in rows)
