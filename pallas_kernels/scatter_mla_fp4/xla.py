"""scatter_mla_fp4 in XLA."""

import jax.numpy as jnp

from pallas_kernels import index
from pallas_kernels.codecs import fp4


def scatter_mla_fp4(kv_buffer, kv_scale_buffer, loc, nope, rope, *, layer, **slots):
    row = index.local_row(loc, index.rows_of(kv_buffer, layer), **slots)
    parts = [fp4.encode(x) for x in (nope, rope) if x is not None]
    packed, scales = (jnp.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    return (
        index.set_rows(kv_buffer, row, packed, layer=layer),
        index.set_rows(kv_scale_buffer, row, fp4.flat(scales), layer=layer),
    )
