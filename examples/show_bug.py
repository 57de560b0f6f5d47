"""`--show-bug`: the report that started this library, replayed with the ids of a real allocator.

A probe guarded the KV writes of a server with the bound `size + page_size`: the rows of one rank's buffer. Under decode
context parallelism the ids are those of all ranks together, and so three quarters of them were called stale. What tells
a stale id from a healthy one is the bound of the logical space, and it takes the pool to know it.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import jkv
from examples.mesh import DCP, make_mesh
from examples.striped import Pool

SIZE, PAGE_SIZE, DCP_SIZE = 8192, 64, 4
DOOR = "set_kv_buffer (MHA)"


def replay() -> bool:
    """Prints the story; True if everything came out as told."""
    pool = jkv.MHATokenToKVPool.create(
        size=SIZE,
        page_size=PAGE_SIZE,
        dtype=jnp.float32,
        head_num=1,
        head_dim=8,
        layer_num=1,
        mesh=make_mesh(DCP_SIZE, 1),
        dcp_axis=DCP,
    )
    slots = pool.slots
    physical = slots.rows
    allocator = jkv.PagedTokenToKVPoolAllocator(SIZE, PAGE_SIZE, dcp_size=DCP_SIZE)
    allocator.alloc(SIZE)  # earlier requests: a quarter of what the four ranks hold
    healthy = np.asarray(allocator.alloc_extend([0], [300], [-1]))
    print(f"pool: size {SIZE}, page {PAGE_SIZE}, dcp {DCP_SIZE}: {physical} rows a rank, slot ids [0, {slots.bound})")
    print(f"the allocator gives a request of 300 tokens the ids {healthy[0]} ... {healthy[-1]}:")
    print(f"  on ranks {_span(slots.owner(healthy))}, in rows {_span(slots.row(healthy))} of each: all of them exist")
    step = jkv.checked_jit(lambda pool, loc, rows: pool.set_kv_buffer(0, loc, rows, rows), donate_argnums=0)
    with jkv.enable_checks():
        print(f"\nunder the physical bound, {physical} = size {SIZE} + page_size {PAGE_SIZE}, it is reported:")
        wrong = _report("the probe", lambda: jkv.maybe_detect_oob(healthy, 0, physical, DOOR))
        print(f"\nunder the bound {slots.bound} = {slots.explain()} it is not:")
        right = _report("the probe", lambda: jkv.maybe_detect_oob(healthy, 0, slots.bound, DOOR))
        before = _rows(pool)
        pool = step(pool, healthy, _values(1, healthy.size))
        right = _report("the write", jkv.wait_for_checks) or right
        after = _rows(pool)
        exact = _written(before, after, slots, healthy)

        stale = slots.bound + 5  # as from the table of a request that a larger pool served
        more = np.asarray(allocator.alloc_decode([301], healthy[-1:]))
        print(f"\na truly stale id, {stale}, beside the healthy {more[0]}, is reported by the door itself:")
        before = after
        pool = step(pool, np.array([more[0], stale], np.int32), _values(2, 2))
        caught = _report("the write", jkv.wait_for_checks)
        nothing_else = _written(before, _rows(pool), slots, more)
    return (
        wrong is not None and right is None and exact and caught is not None and str(stale) in caught and nothing_else
    )


def _report(name: str, probe: Callable[[], None]) -> str | None:
    """What `probe()` reports, printed."""
    try:
        probe()
    except jkv.KVIndexError as error:
        print(f"  KVIndexError: {error}")
        return str(error)
    print(f"  {name}: nothing to report")
    return None


def _span(values: np.ndarray) -> str:
    return f"{values.min()} ... {values.max()}"


def _values(first: int, count: int) -> np.ndarray:
    return np.full((count, 1, 8), first, np.float32)


def _rows(pool: Pool) -> np.ndarray:
    """Every row of every rank, K beside V: [ranks * rows, 16], on the host."""
    return np.concatenate([np.array(buffer)[:, 0] for buffer in pool.get_kv_buffer(0)], axis=-1)


def _written(before: np.ndarray, after: np.ndarray, slots: jkv.SlotSpace, loc: np.ndarray) -> bool:
    """Prints which rows of the buffers changed; True if those are the rows of `loc` and no others."""
    changed = np.flatnonzero((before != after).any(axis=-1))
    expected = np.sort(slots.owner(loc) * slots.rows + slots.row(loc))
    same = np.array_equal(changed, expected)
    others = "every other row of every rank is as it was" if same else "NOT the rows that were addressed"
    print(f"  {changed.size} of {len(before)} rows changed, {loc.size} were addressed: {others}")
    return same
