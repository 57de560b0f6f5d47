"""The slot space against worked examples, figures of another system, and a loop in global coordinates."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv

CASES = json.loads((pathlib.Path(__file__).parent / "data" / "index_math.json").read_text())["dcp_layout"]


def space_of(case: dict) -> jkv.SlotSpace:
    page = 64
    return jkv.SlotSpace(8192, page, case["dcp_size"], case["interleave_size"])


def test_the_worked_example():
    space = jkv.SlotSpace(size=8192, page_size=64, dcp_size=4)
    assert (space.rows, space.bound, space.capacity, space.alloc_page_size) == (8256, 33024, 32768, 256)
    assert (space.owner(33023), space.row(33023)) == (3, 8255)
    assert space.slot(8255, 3) == 33023
    # The two classic wrong bounds each turn away ids that are fine.
    ids = np.arange(space.bound)
    assert np.mean(ids >= space.rows) == 0.75
    assert np.sum(ids >= space.size * 4 + space.page_size) == 192


def test_the_small_fixture():
    space = jkv.SlotSpace(8, 4, 4)
    assert (space.rows, space.bound, space.alloc_page_size, space.capacity) == (12, 48, 16, 32)
    assert (space.owner(47), space.row(47)) == (3, 11)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_lengths_and_rows_are_those_of_another_system(array):
    for case in CASES:
        space, rank = space_of(case), case["dcp_rank"]
        lens, start, ids = (array(case[key]) for key in ("lens", "start", "ids"))
        np.testing.assert_array_equal(space.local_lens(lens, rank), case["local_lens"])
        np.testing.assert_array_equal(space.local_lens(lens, rank, start), case["local_lens_from_start"])
        np.testing.assert_array_equal(space.localize(ids, rank), case["localized"])
        np.testing.assert_array_equal(space.localize_compact(ids, rank), case["topk_remapped"])
        assert isinstance(space.localize(ids, rank), type(ids))


@pytest.mark.parametrize(("dcp_size", "interleave"), [(1, 1), (2, 1), (4, 2), (3, 4), (8, 1)])
def test_every_id_has_one_rank_and_row_and_back(dcp_size, interleave):
    space = jkv.SlotSpace(8, 4, dcp_size, interleave)
    ids = np.arange(-3, space.bound + 3)
    found = np.stack([space.localize(ids, rank) for rank in range(dcp_size)])
    inside = (ids >= 0) & (ids < space.bound)
    np.testing.assert_array_equal((found >= 0).sum(0), inside)
    np.testing.assert_array_equal(space.slot(space.row(ids[inside]), space.owner(ids[inside])), ids[inside])
    assert all(sorted(rows[rows >= 0]) == list(range(space.rows)) for rows in found)


def test_local_lens_counts_positions():
    space = jkv.SlotSpace(16, 8, 3, 4)
    for rank in range(3):
        for start in range(30):
            for n in (0, 1, 5, 13, 40):
                mine = sum((p // 4) % 3 == rank for p in range(start, start + n))
                assert space.local_lens(n, rank, start) == mine
        assert space.local_lens(29, rank) == sum((p // 4) % 3 == rank for p in range(29))


def test_it_works_under_jit_with_a_traced_rank():
    space = jkv.SlotSpace(8, 4, 4)
    ids = jnp.arange(-2, 50)
    for rank in range(4):
        np.testing.assert_array_equal(jax.jit(space.localize)(ids, rank), space.localize(np.asarray(ids), rank))
        np.testing.assert_array_equal(jax.jit(space.local_lens)(ids + 2, rank), space.local_lens(np.arange(52), rank))
        np.testing.assert_array_equal(
            jax.jit(space.localize_compact)(ids, rank), space.localize_compact(np.asarray(ids), rank)
        )


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_narrow_integers_are_widened_and_others_refused(array):
    space = jkv.SlotSpace(296, 4, 4)
    narrow, wide = array([5, 100], np.int8), np.array([5, 100])
    np.testing.assert_array_equal(space.localize(narrow, 1), space.localize(wide, 1))
    np.testing.assert_array_equal(space.slot(narrow, array(3, np.int8)), [23, 403])
    np.testing.assert_array_equal(space.local_lens(narrow, 1, narrow), space.local_lens(wide, 1, wide))
    np.testing.assert_array_equal(space.row(narrow), wide // 4)
    for bad in (np.uint8, np.float32, bool):
        with pytest.raises(TypeError, match=r"SlotSpace: expected signed integers \(int32\), got"):
            space.owner(array([1], bad))


def test_it_is_a_hashable_value():
    assert hash(jkv.SlotSpace(8, 4)) == hash(jkv.SlotSpace(8, 4, 1, 1))
    assert jkv.SlotSpace(np.int64(8), 4) == jkv.SlotSpace(8, 4)
    with pytest.raises(AttributeError):
        jkv.SlotSpace(8, 4).size = 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 3), "size 8 must be a multiple of page_size 3"),
        ((0, 4), "size must be a positive integer, got 0"),
        ((8, -4), "page_size must be a positive integer, got -4"),
        ((8, 4, 0), "dcp_size must be a positive integer, got 0"),
        ((8, 4, True), "dcp_size must be a positive integer, got True"),
        ((8, 4.0), "page_size must be a positive integer, got 4.0"),
        ((8, 4, 2, 3), "interleave 3 must divide page_size 4"),
        ((2**31 - 64, 64), r"\(size 2147483584 \+ page_size 64\) \* dcp_size 1 = 2147483648 do not fit int32"),
        ((2**28, 64, 8), "do not fit int32"),
    ],
)
def test_what_it_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        jkv.SlotSpace(*arguments)


def test_wide_ids_are_fine_with_x64():
    with jax.enable_x64(True):
        assert jkv.SlotSpace(2**31 - 64, 64).bound == 2**31


def test_pad_slots_fills_up_with_the_padding_id():
    np.testing.assert_array_equal(jkv.pad_slots([5, 6], 4), [5, 6, 0, 0])
    np.testing.assert_array_equal(jkv.pad_slots(np.array([5, 6], np.int64), 3, -1), [5, 6, -1])
    padded = jkv.pad_slots(jnp.array([7], jnp.int8), 2, padding_slot=-1)
    assert isinstance(padded, jax.Array)
    assert padded.dtype == jnp.int32
    np.testing.assert_array_equal(jkv.pad_slots([], 2), [0, 0])


def test_pad_slots_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="pad_slots: 3 ids do not fit length 2"):
        jkv.pad_slots([1, 2, 3], 2)
    with pytest.raises(ValueError, match="pad_slots: padding_slot must be 0 or -1, got 7"):
        jkv.pad_slots([1], 2, padding_slot=7)


def test_pad_slots_makes_one_trace_of_many_lengths():
    traces = []

    @jax.jit
    def step(loc):
        traces.append(1)
        return loc.sum()

    for n in range(1, 9):
        step(jkv.pad_slots(np.arange(n), 8))
    assert len(traces) == 1
