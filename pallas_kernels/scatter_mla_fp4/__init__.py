"""scatter_mla_fp4: MLA rows to FP4 codes and block scales, into the buffers of a paged cache."""

from typing import Any

import jax

from pallas_kernels import codecs, dispatch, index
from pallas_kernels.codecs import fp4


def scatter_mla_fp4(
    kv_buffer,
    kv_scale_buffer,
    loc,
    nope,
    rope=None,
    *,
    layer=None,
    dcp_size: int = 1,
    dcp_rank: Any = 0,
    interleave: int = 1,
    skip_slot: int | None = None,
    implementation: str | None = None,
    config: dispatch.KernelConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Quantises `[nope | rope]` of token i in blocks of 16 (`codecs.fp4`), codes and scales to slot `loc[i]`.

    Args:
      kv_buffer: uint8 `[rows, 1, (r + p) / 2]`, or `[layers, rows, 1, (r + p) / 2]` with `layer`.
      kv_scale_buffer: uint8 `[rows, (r + p) / 16]`, or with the layers in front.
      loc: `[N]` signed integers, slot ids in `[0, rows * dcp_size)`; no two alike apart from dropped ones.
      nope: `[N, 1, r]` floats, r a multiple of 16. rope: `[N, 1, p]` floats, or None when `nope` is the whole row.
      layer: None, or an index that may be traced; out of range writes nothing.
      dcp_size, dcp_rank, interleave, skip_slot, implementation, config: as in `scatter_rows`.

    Returns:
      The two new buffers.

    Raises:
      TypeError: `loc` is not of signed integers. ValueError: shapes or dtypes that do not fit.
    """
    where = "scatter_mla_fp4"
    loc = index.as_slot_ids(loc, where)
    index.check_buffers((kv_buffer,), "uint8", layer, where)
    fp4.check_scales(kv_buffer, kv_scale_buffer, where, "kv")
    n, width = loc.shape[0], 2 * kv_buffer.shape[-1]
    rope_width = 0 if rope is None else rope.shape[-1]
    if rope_width % fp4.BLOCK:
        raise ValueError(f"{where}: rope must be a multiple of {fp4.BLOCK} wide, got {rope.shape}")
    nope = codecs.as_rows(nope, [(n, 1, width - rope_width)], where, "nope")
    if rope is not None:
        rope = codecs.as_rows(rope, [(n, 1, rope_width)], where, "rope")
    rows = index.rows_of(kv_buffer, layer)
    slots = index.slot_options(
        where, rows, dcp_size=dcp_size, dcp_rank=dcp_rank, interleave=interleave, skip_slot=skip_slot
    )
    args = (kv_buffer, kv_scale_buffer, loc, nope, rope)
    return dispatch.run(where, implementation, *args, layer=layer, **slots, config=config)
