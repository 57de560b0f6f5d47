"""scatter_kv_fp4: K and V of tokens to FP4 codes and block scales, into the buffers of a paged cache."""

from typing import Any

import jax

from pallas_kernels import codecs, dispatch, index
from pallas_kernels.codecs import fp4


def scatter_kv_fp4(
    k_buffer,
    v_buffer,
    k_scale_buffer,
    v_scale_buffer,
    loc,
    k,
    v,
    *,
    layer=None,
    dcp_size: int = 1,
    dcp_rank: Any = 0,
    interleave: int = 1,
    skip_slot: int | None = None,
    implementation: str | None = None,
    config: dispatch.KernelConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantises K and V of token i in blocks of 16 (`codecs.fp4`) and writes codes and scales to slot `loc[i]`.

    Args:
      k_buffer, v_buffer: uint8 `[rows, heads, dim / 2]`, or `[layers, rows, heads, dim / 2]` with `layer`.
      k_scale_buffer, v_scale_buffer: uint8 `[rows, heads * dim / 16]`, or with the layers in front.
      loc: `[N]` signed integers, slot ids in `[0, rows * dcp_size)`; no two alike apart from dropped ones.
      k, v: `[N, heads, dim]` floats; the dim of V may be another one.
      layer: None, or an index that may be traced; out of range writes nothing.
      dcp_size, dcp_rank, interleave, skip_slot, implementation, config: as in `scatter_rows`.

    Returns:
      The four new buffers, in the order of the arguments.

    Raises:
      TypeError: `loc` is not of signed integers. ValueError: shapes or dtypes that do not fit.
    """
    where = "scatter_kv_fp4"
    loc = index.as_slot_ids(loc, where)
    index.check_buffers((k_buffer, v_buffer), "uint8", layer, where)
    values = []
    for name, x, packed, scales in (("k", k, k_buffer, k_scale_buffer), ("v", v, v_buffer, v_scale_buffer)):
        fp4.check_scales(packed, scales, where, name)
        shape = (loc.shape[0], packed.shape[-2], 2 * packed.shape[-1])
        values.append(codecs.as_rows(x, [shape], where, name))
    rows = index.rows_of(k_buffer, layer)
    slots = index.slot_options(
        where, rows, dcp_size=dcp_size, dcp_rank=dcp_rank, interleave=interleave, skip_slot=skip_slot
    )
    buffers = (k_buffer, v_buffer, k_scale_buffer, v_scale_buffer)
    return dispatch.run(where, implementation, *buffers, loc, *values, layer=layer, **slots, config=config)
