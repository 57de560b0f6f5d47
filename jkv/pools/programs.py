"""The compiled programs behind the doors.

Each is one jitted function of raw arrays: called eagerly it is one dispatch, traced it is inlined into the caller's
program, and an unrolled model traces it once for all its layers. What is static comes in as the pool's class, which
says how rows become words and back, and its layout.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels import gather_rows, index, move_rows

SKIP_SLOT = 0  # never written by any door; -1, the other padding id, is out of range already


@functools.partial(jax.jit, static_argnums=(0, 1))
def store(family, layout, buffers, layer, loc, rows, scales):
    """Writes rows of one layer."""

    def local(rank, buffers, layer, loc, rows, scales):
        options = layout.slot_options(rank) | {"layer": layer, "skip_slot": SKIP_SLOT}
        return family._write(layout, buffers, loc, rows, scales, **options)

    rows = lax.stop_gradient(rows)  # words have no derivative, and kernels no rule for one
    in_specs = (layout.specs, P(), P(), layout.row_spec, P())
    return layout.ranks.map(local, in_specs, layout.specs)(buffers, layer, loc, rows, scales)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("split", "dst_dtype"))
def fetch(family, layout, buffers, layer, loc, scales, *, split, dst_dtype):
    """One layer's rows by slot id, any rank's: keys and values, or where `split` nope and rope."""
    if not loc.size:  # XLA on CPU has no shard_map with an output of no elements
        some = fetch(family, layout, buffers, layer, jnp.zeros(1, loc.dtype), scales, split=split, dst_dtype=dst_dtype)
        return jax.tree.map(lambda rows: rows[:0], some)

    def local(rank, buffers, layer, loc, scales):
        options = layout.slot_options(rank) | {"layer": layer}
        return family._read(layout, buffers, loc, scales, split=split, dst_dtype=dst_dtype, **options)

    return layout.ranks.map(local, (layout.specs, P(), P(), P()), layout.row_spec)(buffers, layer, loc, scales)


def gather_words(layout, buffers, loc, *, split=None, **options):
    """In a rank: words of rows by slot id, summed over the ranks: any rank's, one array a buffer (`split`: a pair)."""
    rows = gather_rows(buffers, loc, split=split, **options)
    return index.sum_rows(rows, layout.ranks.dcp_axis) if layout.ranks.dcp_axis else rows


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def view(family, layout, paged, buffers, layer):
    """One layer's whole buffers, keys and values: `[rows, ...]` or `[pages, page_size, ...]`; zeros for no layer."""

    def local(rank, buffers, layer):
        del rank
        if layer is not None:
            inside = (layer >= 0) & (layer < layout.layer_num)
            at = jnp.where(inside, layer, 0)
            buffers = tuple(lax.dynamic_index_in_dim(b, at, keepdims=False) for b in buffers)
            buffers = tuple(jnp.where(inside, b, 0) for b in buffers)
        rows = family._decode(layout, buffers)
        return tuple(r.reshape(-1, layout.slots.page_size, *r.shape[1:]) for r in rows) if paged else rows

    spec = layout.layer_spec(layout.buffers[0])
    return layout.ranks.map(local, (layout.specs, P()), P(spec[0], None, *spec[1:]) if paged else spec)(buffers, layer)


def _flat(pool):
    """A pool's arrays and specs as flat tuples, and how to put arrays back."""
    arrays, tree = jax.tree.flatten(pool)
    specs = jax.tree.leaves(pool.partition_specs(), is_leaf=lambda x: isinstance(x, P))
    return tuple(arrays), tuple(specs), lambda new: jax.tree.unflatten(tree, new)


@jax.jit
def move(pool, tgt_loc, src_loc):
    """All layers' rows from `src_loc` to `tgt_loc`."""
    layout = pool.layout
    arrays, specs, rebuild = _flat(pool)

    def local(rank, arrays, tgt_loc, src_loc):
        options = layout.slot_options(rank) | {"stacked": layout.stacked, "axis_name": layout.ranks.dcp_axis}
        return move_rows(arrays, tgt_loc, src_loc, skip_slot=SKIP_SLOT, **options)

    return rebuild(layout.ranks.map(local, (specs, P(), P()), specs)(arrays, tgt_loc, src_loc))


@jax.jit
def fetch_all(pool, loc):
    """Words of every buffer and layer by slot id, `[layers, N, heads, width]`, whole on every device."""
    layout = pool.layout
    if not loc.size:  # as in `fetch`
        return tuple(words[:, :0] for words in fetch_all(pool, jnp.zeros(1, loc.dtype)))

    def local(rank, buffers, loc):
        row = index.local_row(loc, layout.slots.rows, **layout.slot_options(rank))
        every = slice(None)
        if layout.stacked:
            rows = tuple(index.take_rows(buffer, row, layer=every) for buffer in buffers)
        else:
            rows = tuple(jnp.stack([index.take_rows(b, row) for b in layers]) for layers in buffers)
        if layout.ranks.dcp_axis:
            rows = index.sum_rows(rows, layout.ranks.dcp_axis)
        if layout.ranks.tp_size > 1:
            tp = layout.ranks.tp_axis
            rows = tuple(
                lax.all_gather(r, tp, axis=2, tiled=True) if b.split_heads else r
                for r, b in zip(rows, layout.buffers, strict=True)
            )
        return rows

    return layout.ranks.map(local, (layout.array_specs, P()), P())(pool.arrays, loc)


@jax.jit
def store_all(pool, loc, words):
    """Writes words `[layers, N, heads, width]` of every buffer to the slots."""
    layout = pool.layout
    specs = layout.array_specs

    def local(rank, buffers, loc, words):
        row = index.local_row(loc, layout.slots.rows, skip_slot=SKIP_SLOT, **layout.slot_options(rank))
        if layout.stacked:
            return tuple(index.set_rows(b, row, w, layer=slice(None)) for b, w in zip(buffers, words, strict=True))
        return tuple(
            tuple(index.set_rows(b, row, w) for b, w in zip(layers, each, strict=True))
            for layers, each in zip(buffers, words, strict=True)
        )

    return layout.ranks.map(local, (specs, P(), P(None, *layout.row_spec)), specs)(pool.arrays, loc, words)
