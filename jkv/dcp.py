"""Reading under decode context parallelism: each rank attends to its own rows, and the results are merged."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jkv.slots import SlotSpace
from pallas_kernels import index


def attend_rows(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, mask: ArrayLike, *, scale: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries over rows, with the log-sum-exp that `merge_states` needs. Plain jnp, float32 inside.

    A masked row contributes exactly nothing, whatever its bytes (a reused page may hold NaN). Leading dimensions
    broadcast: `q [T, H, D]` with `k [S, K, D]` and `mask [T, S]` is a prefill, `q [B, T, H, D]` with
    `k [B, 1, S, K, D]` and `mask [B, T, S]` a batch. The causal mask over a DCP rank's rows is in `local_rows`.

    Args:
      q: `[..., H, D]` queries.
      k: `[..., S, K, D]` keys; H is a multiple of K, query head h uses key head `h // (H // K)`.
      v: `[..., S, K, E]` values.
      mask: `[..., S]` bool, True where the row is attended to.
      scale: factor of the scores; `D ** -0.5` when None.

    Returns:
      out `[..., H, E]` float32 and lse `[..., H]` float32, the natural log of the sum of exponentials of the scores.
      Where the mask is all False out is 0 and lse is -inf.

    Raises:
      ValueError: heads or widths that do not fit, or a mask that is not bool.
    """
    q, k, v, mask = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(mask)
    (heads, dim), (rows, kv_heads) = q.shape[-2:], k.shape[-3:-1]
    if k.shape[-1] != dim or v.shape[-3:-1] != (rows, kv_heads) or heads % kv_heads:
        raise ValueError(f"attend_rows: q {q.shape}, k {k.shape} and v {v.shape} do not fit together")
    if mask.dtype != bool or mask.shape[-1] != rows:
        raise ValueError(f"attend_rows: mask must be bool [..., {rows}], got {mask.dtype} {mask.shape}")
    f32 = jnp.float32
    q = q.astype(f32).reshape(*q.shape[:-2], kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("...kgd,...skd->...kgs", q, k.astype(f32), precision="highest")
    seen = mask[..., None, None, :]
    scores = jnp.where(seen, scores * (dim**-0.5 if scale is None else scale), -jnp.inf)
    top = scores.max(-1, initial=-jnp.inf)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top)[..., None])
    total = weights.sum(-1)
    # 0 * NaN is NaN: what is not finite is left out of the product, and put back for those who do see it.
    finite = jnp.isfinite(v)
    out = jnp.einsum("...kgs,...ske->...kge", weights, jnp.where(finite, v, 0).astype(f32), precision="highest")
    poison = jnp.einsum("...s,...ske->...ke", mask.astype(f32), (~finite).astype(f32)) > 0
    out = jnp.where(poison[..., None, :], jnp.nan, out / jnp.where(total == 0, 1, total)[..., None])
    lse = jnp.where(total == 0, -jnp.inf, jnp.where(jnp.isneginf(top), 0, top) + jnp.log(total))
    return out.reshape(*out.shape[:-3], heads, v.shape[-1]), lse.reshape(*lse.shape[:-2], heads)


def merge_states(out: jax.Array, lse: jax.Array, axis_name: str | tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Merges partial attention over a mesh axis, inside a shard_map: softmax over the union of the ranks' rows.

    With natural-log lse_r and out_r of rank r: `lse = log(sum exp(lse_r))`, `out = sum exp(lse_r - lse) * out_r`
    (online softmax, as in FlashAttention and FlashInfer's state merge).

    Args:
      out: `[..., E]` partial outputs; zeros (or anything) where this rank saw no row.
      lse: `[...]` their natural-log sums of exponentials; -inf where this rank saw no row.
      axis_name: the mesh axis, or a tuple of axes, of the DCP group.

    Returns:
      The merged out, in `out`'s dtype, and float32 lse, alike on every rank. Where no rank saw a row: 0 and -inf.

    Raises:
      ValueError: `lse` does not have `out`'s leading shape.
    """
    if lse.shape != out.shape[:-1]:
        raise ValueError(f"merge_states: lse must have shape {out.shape[:-1]} for out {out.shape}, got {lse.shape}")
    lse = lse.astype(jnp.float32)
    top = lax.pmax(lse, axis_name)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weight = jnp.exp(lse - top)
    total = lax.psum(weight, axis_name)
    part = jnp.where(weight[..., None] == 0, 0, out.astype(jnp.float32) * weight[..., None])
    merged = lax.psum(part, axis_name) / jnp.where(total == 0, 1, total)[..., None]
    return merged.astype(out.dtype), jnp.where(total == 0, -jnp.inf, top + jnp.log(total))


def local_rows(slots: SlotSpace, table: Any, lens: Any, rank: Any) -> tuple[Any, Any]:
    """The rows on `rank` of each request of a batch, in the order of their positions.

    `get_kv` takes them as `rows.reshape(-1)`. A query token at position p, `at [B, T]` for a batch, sees p and what is
    before it: `arange(rows.shape[1]) < slots.local_lens(at + 1, rank)[..., None]`, a mask `[B, T, n]`; -1 sees nothing.

    Args:
      table: `[B, L]` int slot ids by position (`ReqToTokenPool.req_to_token`); entries past `lens` may be anything.
      lens: `[B]` int tokens of each request.
      rank: this DCP rank; may be traced.

    Returns:
      rows `[B, n]`, n being what a rank can own of L positions at most, -1 past the end; and how many, `[B]` int32.
    """
    xp: Any = jnp if any(isinstance(x, jax.Array) for x in (table, lens, rank)) else np
    table, lens = _table(table, lens, xp, "local_rows")
    live = xp.arange(table.shape[1]) < lens[:, None]
    rows = slots.localize_compact(xp.where(live, table, -1), rank)
    width = max_local_len(slots, table.shape[1])
    return rows[:, :width], slots.local_lens(lens, rank).astype(np.int32)


def local_page_table(slots: SlotSpace, table: Any, lens: Any, rank: Any) -> tuple[Any, Any]:
    """The page table on `rank` of each request of a batch, for paged attention over `get_page_buffer`.

    A page of the allocator (`alloc_page_size` ids) is one page of `page_size` rows on every rank, of the same number,
    so that the table is the same on all ranks and only the lengths differ.

    Args:
      table, lens, rank: as in `local_rows`.

    Returns:
      pages `[B, ceil(L / alloc_page_size)]` int, 0 (the padding page) where a request has no page, and how many rows
      of them are live, `[B]` int32: row i of a request is row `i % page_size` of its page `i // page_size`.
    """
    xp: Any = jnp if any(isinstance(x, jax.Array) for x in (table, lens, rank)) else np
    table, lens = _table(table, lens, xp, "local_page_table")
    first = xp.arange(0, table.shape[1], slots.alloc_page_size)
    pages = xp.where(first < lens[:, None], table[:, first] // slots.alloc_page_size, 0)
    return pages, slots.local_lens(lens, rank).astype(np.int32)


def _table(table: Any, lens: Any, xp: Any, where: str) -> tuple[Any, Any]:
    """Validates a batch's table of slot ids and its lengths."""
    shape = np.shape(table)
    if len(shape) != 2 or np.shape(lens) != shape[:1]:
        raise ValueError(f"{where}: table must be [B, L] and lens [B], got {shape} and {np.shape(lens)}")
    ids = index.as_slot_ids(table.reshape(-1) if isinstance(table, jax.Array) else np.ravel(table), where, "table")
    if not isinstance(lens, jax.core.Tracer) and shape[0] and not 0 <= np.min(lens) <= np.max(lens) <= shape[1]:
        raise ValueError(f"{where}: lens must be in [0, {shape[1]}], the columns of table, got {np.asarray(lens)}")
    return xp.asarray(ids).reshape(shape), xp.asarray(lens)


def max_local_len(slots: SlotSpace, length: int) -> int:
    """The most positions of a sequence of `length` tokens that any rank stores: rank 0's."""
    return int(slots.local_lens(length, 0))
