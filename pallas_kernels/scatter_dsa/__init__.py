"""scatter_dsa: MLA rows packed for sparse attention, FP8 latents with scales and bfloat16 rope, into a paged cache."""

from typing import Any

import jax

from pallas_kernels import codecs, dispatch, index
from pallas_kernels.codecs import dsa


def scatter_dsa(
    kv_buffer,
    loc,
    nope,
    rope=None,
    *,
    kv_lora_rank: int,
    layer=None,
    dcp_size: int = 1,
    dcp_rank: Any = 0,
    interleave: int = 1,
    skip_slot: int | None = None,
    implementation: str | None = None,
    config: dispatch.KernelConfig | None = None,
) -> jax.Array:
    """Packs `[nope | rope]` of token i (`codecs.dsa`) and writes it to slot `loc[i]`.

    Args:
      kv_buffer: uint8 `[rows, 1, r + r / 32 + 2 * p]`, or with the layers in front with `layer`.
      loc: `[N]` signed integers, slot ids in `[0, rows * dcp_size)`; no two alike apart from dropped ones.
      nope: `[N, 1, r]` floats. rope: `[N, 1, p]` floats, or None when `nope` is the whole row `[N, 1, r + p]`.
      kv_lora_rank: r, a multiple of 128.
      layer: None, or an index that may be traced; out of range writes nothing.
      dcp_size, dcp_rank, interleave, skip_slot, implementation, config: as in `scatter_rows`.

    Returns:
      The new buffer.

    Raises:
      TypeError: `loc` is not of signed integers. ValueError: shapes or dtypes that do not fit.
    """
    where = "scatter_dsa"
    loc = index.as_slot_ids(loc, where)
    index.check_buffers((kv_buffer,), "uint8", layer, where)
    n, p = loc.shape[0], dsa.rope_dim(kv_buffer.shape[-1], kv_lora_rank, where)
    if rope is None:
        nope = codecs.as_rows(nope, [(n, 1, kv_lora_rank + p)], where, "nope")
    else:
        nope = codecs.as_rows(nope, [(n, 1, kv_lora_rank)], where, "nope")
        rope = codecs.as_rows(rope, [(n, 1, p)], where, "rope")
    slots = index.slot_options(
        where,
        index.rows_of(kv_buffer, layer),
        dcp_size=dcp_size,
        dcp_rank=dcp_rank,
        interleave=interleave,
        skip_slot=skip_slot,
    )
    options = {"kv_lora_rank": int(kv_lora_rank), "layer": layer} | slots
    return dispatch.run(where, implementation, kv_buffer, loc, nope, rope, **options, config=config)
