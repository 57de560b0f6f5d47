"""scatter_rows: rows of any array into any array, by slot id."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels import dispatch, index


def scatter_rows(
    cache: ArrayLike,
    loc: Any,
    rows: ArrayLike,
    *,
    dcp_size: int = 1,
    dcp_rank: Any = 0,
    interleave: int = 1,
    skip_slot: int | None = None,
    implementation: str | None = None,
    config: dispatch.KernelConfig | None = None,
) -> jax.Array:
    """Writes `rows[i]` to slot `loc[i]` of this rank's `cache`; ids out of range or of another rank are dropped.

    For buffers that are not a pool's. Cost is O(rows) when the caller donates `cache`, except that XLA on CPU converts
    a whole bfloat16 (JAX below 0.12) or 8-bit float array: keep such caches as unsigned words there.

    Args:
      cache: `[rows, ...]`, any dtype: one rank's buffer.
      loc: `[N]` signed integers, slot ids in `[0, rows * dcp_size)`.
      rows: `[N, ...]`; cast to the cache's dtype by `astype`.
      dcp_size: ranks that share the slots. `dcp_rank`: this one (may be traced). `interleave`: ids in a row on a rank.
      skip_slot: an id that is never written (a padding slot), or None.
      implementation: a name in the dispatch table, or None for the choice by platform (`dispatch.run`).
      config: how a GPU kernel, where one runs, splits its work; its heuristic when None.

    Returns:
      The new cache, same shape and dtype.

    Raises:
      TypeError: `loc` is not of signed integers. ValueError: shapes that do not fit, or an unknown implementation.
    """
    cache, rows, loc = jnp.asarray(cache), jnp.asarray(rows), index.as_slot_ids(loc, "scatter_rows")
    if not cache.ndim or not cache.shape[0]:
        raise ValueError(f"scatter_rows: cache must have rows, got shape {cache.shape}")
    expected = (loc.shape[0], *cache.shape[1:])
    if rows.shape != expected:
        raise ValueError(f"scatter_rows: rows must have shape {expected}, got {rows.shape}")
    slots = index.slot_options(
        "scatter_rows", cache.shape[0], dcp_size=dcp_size, dcp_rank=dcp_rank, interleave=interleave, skip_slot=skip_slot
    )
    return dispatch.run("scatter_rows", implementation, cache, loc, rows, **slots, config=config)
