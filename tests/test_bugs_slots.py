"""Kinds of bugs that serving stacks had with slot ids: what this library does where they wrote somewhere else.

The kind of each is in a comment: K01 stale and out-of-range ids, K02 the padding slot, K03 the index space under DCP,
K04 capacity under DCP, K11 duplicates, K12 integer widths.
"""

import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_pools import ids, layer_of, mha, mla, on, row_of, rows, same, words, write

import jkv

FAMILIES = {"MHA": mha, "MLA": mla}


def unprobed(function, *args, **kwargs):
    """What a production run does: the same call with checks off."""
    with jkv.enable_checks(False):
        return function(*args, **kwargs)


def all_slots(pool):
    return np.arange(1, pool.slots.bound, dtype=np.int32)


# K01: stale, negative or out-of-range slot ids.


def test_a_stale_id_is_reported_with_the_bound_and_the_last_slot_and_padding_pass():
    pool = mha(page_size=1)  # 9 rows
    write(pool, ids(8, 0))
    with pytest.raises(
        jkv.KVIndexError, match=re.escape("set_kv_buffer (MHA), layer 0: 1 of 2 slot ids outside [0, 9)")
    ) as e:
        write(pool, ids(3, 9))
    assert "min 3, max 9" in str(e.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("bad", [-1, -2, -9, -68, 68, 69, 136, 2**31 - 1, -(2**31)])
def test_a_bad_id_is_dropped_and_every_other_row_keeps_its_bits(family, stacked, bad):
    # K01: no wrap onto the last row, no clamp, no shift onto a neighbour
    pool = write(FAMILIES[family](64, 4, stacked=stacked), np.arange(4, 68, dtype=np.int32))
    after = unprobed(write, pool, ids(bad, 5), start=50)
    changed = {loc for loc in range(68) if not all(map(np.array_equal, row_of(after, loc), row_of(pool, loc)))}
    assert changed == {5}


def test_two_writes_beyond_the_pool_do_not_meet_in_its_last_row():
    # K01: a scheduler that believes in 28 rows where there are 12
    pool = mha(8, 4)
    for loc in (ids(12), ids(20)):
        assert same(pool, unprobed(write, pool, loc))
        with pytest.raises(jkv.KVIndexError, match=rf"1 of 1 slot ids outside \[0, 12\).*min {loc[0]}, max {loc[0]}"):
            write(pool, loc)


def test_padding_of_minus_1_leaves_the_last_live_row_alone():
    # K01: with a promise of sorted indices JAX loses the last one here
    pool = mha(8, 1, padding_slot=-1)
    loc = ids(-1, -1, 0, 1, 2, 3, -1, -1)
    after = write(pool, loc)
    k = rows(8, 2, 4)
    for n, slot in ((3, 1), (4, 2), (5, 3)):
        np.testing.assert_array_equal(row_of(after, slot)[0].view(np.float32), k[n])
    assert not any(row.any() for slot in (0, 4, 8) for row in row_of(after, slot))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad", [-1, -4, 9, 100, -(2**31), 2**31 - 1])
def test_a_bad_id_reads_zeros_not_a_neighbour_and_not_nan(family, bad):
    pool = write(FAMILIES[family](8, 1), np.arange(1, 9, dtype=np.int32))
    with pytest.raises(jkv.KVIndexError, match=rf"get_kv \({family}\), layer 0: 1 of 2 slot ids outside"):
        pool.get_kv(0, ids(bad, 8))
    for part in unprobed(pool.get_kv, 0, ids(bad, 8)):
        assert not np.asarray(part[0]).any()
        assert np.asarray(part[1]).all()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("dcp", [1, 4])
def test_a_token_of_minus_1_belongs_to_no_rank_at_any_page_size(page_size, dcp):
    # K01: floor division makes rank 3, row -1 of it, truncation rank 0, row 0
    pool = mha(8, page_size, **(on(dcp) if dcp > 1 else {}))
    assert same(pool, unprobed(write, pool, ids(-1)))
    for rank in range(dcp):
        assert pool.slots.localize(ids(-1), rank).tolist() == [-1]


def test_uncommitted_table_entries_write_nothing():
    # K01: three tokens are committed, the rest of the table is still 0
    pool = mha(8, 1)
    after = write(pool, ids(4, 5, 6, 0, 0))
    assert [loc for loc in range(9) if row_of(after, loc)[0].any()] == [4, 5, 6]


def test_both_ends_of_the_range_are_checked_by_every_door():
    for family, new in FAMILIES.items():
        pool, host = new(8, 1), new(8, 1).get_cpu_copy(ids(1, 2))
        doors = {
            f"get_kv ({family})": lambda loc, pool=pool: pool.get_kv(0, loc),
            f"set_kv_buffer ({family})": lambda loc, pool=pool: write(pool, loc),
            f"move_kv_cache ({family}) tgt_loc": lambda loc, pool=pool: pool.move_kv_cache(loc, ids(1, 2)),
            f"move_kv_cache ({family}) src_loc": lambda loc, pool=pool: pool.move_kv_cache(ids(1, 2), loc),
            f"get_cpu_copy ({family})": lambda loc, pool=pool: pool.get_cpu_copy(loc),
            f"load_cpu_copy ({family})": lambda loc, pool=pool, host=host: pool.load_cpu_copy(host, loc),
        }
        if family == "MLA":
            doors["set_mla_kv_buffer (MLA)"] = lambda loc, pool=pool: pool.set_mla_kv_buffer(
                0, loc, rows(2, 1, 6), rows(2, 1, 2)
            )
            doors["get_mla_kv_buffer (MLA)"] = lambda loc, pool=pool: pool.get_mla_kv_buffer(0, loc)
        for label, door in doors.items():
            for bad in (9, -2, -1):
                with pytest.raises(jkv.KVIndexError, match=re.escape(label) + rf".*: 1 of 2 .*min {min(bad, 3)}, max"):
                    door(ids(3, bad))
            door(ids(8, 0))


def test_the_oldest_supported_jax_is_pinned():
    # K01: the switch that keeps JAX from wrapping negative ids is not in older ones
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert "jax>=0.10.2" in project["dependencies"]


# K02: padded rows, and what lies in the padding slot.


@pytest.mark.parametrize(
    ("dtype", "padding_slot", "dcp"),
    [("float32", -1, 1), ("bfloat16", 0, 2), ("float16", 0, 1), ("float8_e4m3fn", -1, 2), ("float8_e5m2", 0, 1)],
)
def test_padded_rows_of_nan_leave_the_padding_slot_zero_through_every_writer(dtype, padding_slot, dcp):
    options = {"dtype": dtype, "padding_slot": padding_slot} | (on(dcp) if dcp > 1 else {})
    loc, nan = ids(padding_slot, 0), np.full((2, 2, 8), np.nan, np.float32)
    written = [
        mha(**options).set_kv_buffer(0, loc, nan[..., :4], nan[..., 4:]),
        mla(**options).set_kv_buffer(0, loc, nan[:, :1]),
        mla(**options).set_mla_kv_buffer(0, loc, nan[:, :1, :6], nan[:, :1, 6:]),
    ]
    for pool in written:
        assert not any(word.any() for word in words(pool))
        # and no way round: neither a move nor a restored copy reaches it
        dirty = write(pool, ids(5, 6))
        for after in (dirty.move_kv_cache(loc, ids(5, 6)), dirty.load_cpu_copy(dirty.get_cpu_copy(ids(5, 6)), loc)):
            assert not any(row.any() for row in row_of(after, 0))
        product = np.zeros(8, np.float32) @ np.asarray(pool.get_key_buffer(0)[0], np.float32).reshape(8, -1)
        assert np.isfinite(product).all()


def test_nan_in_a_live_row_is_reported_by_every_writer_and_written():
    k, nan = rows(2, 1, 8), np.array([[[1.0]], [[np.nan]]], np.float32)
    heads = np.repeat(rows(2, 1, 4), 2, axis=1)
    writers = {
        "set_kv_buffer (MHA), layer 0: 1 of 2 rows of cache_k": lambda: mha().set_kv_buffer(
            0, ids(0, 6), heads * nan, heads
        ),
        "set_kv_buffer (MHA), layer 0: 1 of 2 rows of cache_v": lambda: mha().set_kv_buffer(
            0, ids(0, 6), heads, heads * nan
        ),
        "set_kv_buffer (MLA), layer 0: 1 of 2 rows of cache_k": lambda: mla().set_kv_buffer(0, ids(0, 6), k * nan),
        "set_mla_kv_buffer (MLA), layer 0: 1 of 2 rows of cache_k_nope": lambda: mla().set_mla_kv_buffer(
            0, ids(0, 6), k[..., :6] * nan, k[..., 6:]
        ),
        "set_mla_kv_buffer (MLA), layer 0: 1 of 2 rows of cache_k_rope": lambda: mla().set_mla_kv_buffer(
            0, ids(0, 6), k[..., :6], k[..., 6:] * nan
        ),
    }
    for message, writer in writers.items():
        with pytest.raises(jkv.KVIndexError, match=re.escape(f"{message} hold NaN; first at slot id 6")):
            writer()
        with jkv.enable_checks(False):
            assert any(np.isnan(row.view(np.float32)).any() for row in row_of(writer(), 6))


def test_a_full_pool_survives_a_padded_row():
    # K02: the last row is a live one, not a sentinel for padding
    for padding_slot in (0, -1):
        pool = write(mha(8, 1, padding_slot=padding_slot), np.arange(1, 9, dtype=np.int32))
        assert same(pool, write(pool, ids(padding_slot)))


def test_slot_0_is_reserved_and_slot_1_is_live_whatever_the_padding_id():
    for padding_slot in (0, -1):
        after = write(mha(8, 1, padding_slot=padding_slot), ids(0, 1))
        assert not row_of(after, 0)[0].any()
        assert row_of(after, 1)[0].all()


def test_what_a_reused_page_holds_reaches_nobody():
    # K02: the page was another request's, and full of NaN
    pool = write(mha(8, 4), np.arange(4, 12, dtype=np.int32))
    with jkv.enable_checks(False):
        nan = np.full((4, 2, 4), np.nan, np.float32)
        pool = pool.set_kv_buffer(0, ids(8, 9, 10, 11), nan, nan)
    pool = write(pool, ids(8))
    k, v = pool.get_kv(0, ids(8, 9, 10, 11))
    q, mask = rows(1, 2, 4), np.array([[True, False, False, False]])
    out, lse = jkv.attend_rows(q, k, v, mask)
    clean, clean_lse = jkv.attend_rows(q, k[:1], v[:1], mask[:, :1])
    np.testing.assert_array_equal(out, clean)
    np.testing.assert_array_equal(lse, clean_lse)


# K03: one logical index space under DCP.


def test_logical_ids_land_on_their_owner_and_nowhere_else():
    # K03: size 8, page 4 on four ranks; 21 is above one rank's 12 rows
    pool = write(mha(**on(4)), ids(5, 21))
    k = np.asarray(pool.k_buffer[0]).reshape(4, 12, -1).any(axis=2)
    assert sorted(map(tuple, np.argwhere(k).tolist())) == [(1, 1), (1, 5)]


def test_every_handed_out_id_up_to_the_last_is_in_range_and_on_a_row_of_its_own():
    # K03: bounds of 12 (one rank) and 36 (one padding page) are the two classic wrong ones
    pool = mha(**on(4))
    assert pool.slots.bound == 48
    loc = np.arange(16, 48, dtype=np.int32)
    k, v = rows(32, 2, 4), rows(32, 2, 4, start=9)
    after = pool.set_kv_buffer(0, loc, k, v)
    for n, i in enumerate(loc):
        np.testing.assert_array_equal(row_of(after, int(i))[0].view(np.float32), k[n])
    assert int(pool.slots.owner(47)) == 3
    assert int(pool.slots.row(47)) == 11
    with pytest.raises(jkv.KVIndexError, match=r"\[0, 48\) = \(size 8 \+ page_size 4\) \* dcp_size 4; min 48, max 48"):
        write(pool, ids(48))


def test_the_worked_example_is_neither_bounded_by_a_rank_nor_by_one_padding_page():
    slots = jkv.SlotSpace(8192, 64, 4)
    assert (slots.rows, slots.bound) == (8256, 33024)
    last = ids(8255, 8256, 32831, 32832, 33023)  # valid all, beyond 8256 and beyond 8192 * 4 + 64
    owners, at = slots.owner(last), slots.row(last)
    for rank in range(4):
        np.testing.assert_array_equal(slots.localize(last, rank), np.where(owners == rank, at, -1))
    assert (int(owners[-1]), int(at[-1])) == (3, 8255)
    assert all(slots.localize(ids(33024), rank).tolist() == [-1] for rank in range(4))


def test_a_retracted_request_comes_back_to_the_owners_of_its_new_ids():
    # K03: offload [16..31], restore to [32..47]; rank r gives and takes rows of its own
    pool = write(mha(**on(4)), np.arange(16, 32, dtype=np.int32))
    host = pool.get_cpu_copy(np.arange(16, 32, dtype=np.int32))
    after = mha(**on(4)).load_cpu_copy(host, np.arange(32, 48, dtype=np.int32))
    for loc in range(16, 32):
        assert all(map(np.array_equal, row_of(after, loc + 16), row_of(pool, loc)))
        assert not row_of(after, loc)[0].any()


def test_another_axis_of_the_mesh_does_not_thin_out_the_slots():
    # K03: only the DCP axis divides tokens; over another one rows are whole, on every device
    grid = jax.make_mesh((2, 2), ("pcp", "dcp"), devices=jax.devices()[:4])
    pool = mha(mesh=grid, dcp_axis="dcp")
    assert pool.slots.dcp_size == 2
    after = write(pool, np.arange(8, 24, dtype=np.int32))
    for buffer in layer_of(after):
        shards = {shard.device: np.asarray(shard.data) for shard in buffer.addressable_shards}
        assert len(shards) == 4
        for dcp in (0, 1):
            first, second = (shards[device] for device in grid.devices[:, dcp])
            np.testing.assert_array_equal(first, second)
            assert first[4:].all()


def test_both_page_sizes_have_a_name():
    slots = jkv.SlotSpace(8, 4, 4)
    assert (slots.page_size, slots.alloc_page_size) == (4, 16)
    assert (
        jkv.PagedTokenToKVPoolAllocator(8, 4, 4).page_size,
        jkv.PagedTokenToKVPoolAllocator(8, 4, 4).alloc_page_size,
    ) == (4, 16)


# K04: capacity is that of all ranks together, counted once.


def test_capacity_is_counted_once_over_all_ranks():
    allocator = jkv.PagedTokenToKVPoolAllocator(8, 4, dcp_size=4)
    assert allocator.available_size() == 32 == jkv.SlotSpace(8, 4, 4).capacity
    assert allocator.alloc(48) is None
    assert allocator.available_size() == 32
    loc = allocator.alloc(32)
    assert loc.min() == 16
    assert loc.max() == 47
    assert allocator.alloc(16) is None
    write(mha(**on(4)), loc)  # every one of them is a slot of the pool


def test_admission_counts_pages_that_are_as_wide_as_the_group():
    # K04: three requests of one token need three pages of 16, and there are two
    allocator = jkv.PagedTokenToKVPoolAllocator(8, 4, dcp_size=4)
    assert allocator.alloc_extend([0, 0, 0], [1, 1, 1], [-1, -1, -1]) is None
    assert allocator.available_size() == 32
    assert allocator.alloc_extend([0, 0], [1, 1], [-1, -1]) is not None


def test_a_request_may_be_longer_than_one_ranks_share():
    # K04: 20 tokens on four ranks of 8; a bound of 8 refuses it, one of 128 (the factor twice) lets in what cannot fit
    admission = jkv.Admission(jkv.SlotSpace(8, 4, 4), context_len=1000)
    assert admission.max_request_len == 31
    assert admission.max_new_tokens(20) == 12
    allocator = jkv.PagedTokenToKVPoolAllocator(8, 4, dcp_size=4)
    assert admission.can_admit(20, allocator.available_size())
    assert allocator.alloc_extend([0], [20], [-1]) is not None
    with pytest.raises(ValueError, match=r"prompt_len 32 passes max_request_len 31"):
        admission.can_admit(32, 32)


# K11: duplicate ids.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dcp", [1, 4])
def test_duplicate_ids_are_reported_padding_apart_and_spare_all_other_rows(family, dcp):
    pool = write(FAMILIES[family](**(on(dcp) if dcp > 1 else {})), ids(9, 10, 11))
    with pytest.raises(
        jkv.KVIndexError, match=rf"set_kv_buffer \({family}\), layer 0: 1 of 3 slot ids are written twice.* 5"
    ):
        write(pool, ids(5, 6, 5))
    with pytest.raises(jkv.KVIndexError, match=rf"move_kv_cache \({family}\) tgt_loc: .*written twice.* 5"):
        pool.move_kv_cache(ids(5, 5), ids(9, 10))
    with pytest.raises(jkv.KVIndexError, match=rf"load_cpu_copy \({family}\): .*written twice.* 5"):
        pool.load_cpu_copy(pool.get_cpu_copy(ids(9, 10)), ids(5, 5))
    after = unprobed(write, pool, ids(5, 6, 5), start=30)
    for loc in set(range(pool.slots.bound)) - {5, 6}:
        assert all(map(np.array_equal, row_of(after, loc), row_of(pool, loc)))
    write(pool, ids(0, 5, 0, 0))  # padding repeats


def test_a_move_may_repeat_its_sources():
    # K16: three rows to seven pages each
    pool = write(mha(64, 4), ids(8, 9, 10))
    sources, targets = np.tile(ids(8, 9, 10), 7), np.arange(20, 41, dtype=np.int32)
    after = pool.move_kv_cache(targets, sources)
    for source, target in zip(sources, targets, strict=True):
        assert all(map(np.array_equal, row_of(after, int(target)), row_of(pool, int(source))))


# K12: widths of integers.


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_narrow_ids_reach_the_rows_past_their_own_range(dtype, array):
    # K12: four ranks of 300 rows; id 127 of int8 is row 31, and all arithmetic is wider than the ids
    pool = mha(296, 4, **on(4))
    top = min(int(np.iinfo(dtype).max), pool.slots.bound - 1)
    loc = np.array([5, top], dtype)
    after = write(pool, array(loc))
    assert row_of(after, top)[0].all()
    assert all(np.asarray(part).all() for part in after.get_kv(0, array(loc)))


def test_a_slot_space_past_int32_is_refused_and_the_last_that_fits_is_not():
    slots = jkv.SlotSpace(2**29 - 64, 64, 3)
    top = slots.bound - 1
    assert int(slots.owner(np.int32(top))) == 2
    assert int(slots.row(np.int32(top))) == slots.rows - 1
    assert jnp.asarray(slots.localize(jnp.array([top], jnp.int32), 2)).tolist() == [slots.rows - 1]
    with pytest.raises(ValueError, match=r"\(size 536870912 \+ page_size 64\) \* dcp_size 4 = 2147483904.*int32"):
        jkv.SlotSpace(2**29, 64, 4)


@pytest.mark.slow
def test_a_buffer_of_more_than_2_to_the_31_elements_is_addressed_by_rows():
    # K12: 2.3e9 one-byte elements; a flat int32 offset would be negative past row 65535
    pool = mha(70_000, 4, dtype=jnp.float8_e4m3fn, head_num=32, head_dim=1024, v_head_dim=1)
    after = jkv.checked_jit(write, donate_argnums=0)(pool, ids(70_003))
    k, _ = after.get_kv(0, ids(70_003))
    assert np.asarray(k.astype(jnp.float32)).all()
    assert not np.asarray(after.k_buffer[0][:4]).any()
    assert not np.asarray(after.k_buffer[0][70_000:70_003]).any()


@pytest.mark.parametrize("dtype", ["int8", "int16", "int64"])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_the_arithmetic_of_a_slot_space_is_wider_than_the_ids(dtype, array):
    slots = jkv.SlotSpace(296, 4, 4)
    for call in (
        slots.owner,
        slots.row,
        lambda loc: slots.slot(loc, 3),
        lambda loc: slots.localize(loc, 1),
        lambda loc: slots.localize_compact(loc, 1),
        lambda lens: slots.local_lens(lens, 1),
        lambda lens: slots.local_lens(lens, 1, lens),
    ):
        expected = call(np.array([5, 100, 127], np.int32))
        np.testing.assert_array_equal(call(array(np.array([5, 100, 127], dtype))), expected)
