"""The table of the running requests: rows, what they hold, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jkv.request import ReqToTokenPool


def pool_with_a_row() -> tuple[ReqToTokenPool, int]:
    pool = ReqToTokenPool(4, 8)
    rows = pool.alloc(2)
    assert rows.tolist() == [1, 2]
    return pool, int(rows[0])


def test_rows_are_handed_out_once_and_row_0_never():
    pool = ReqToTokenPool(4, 8)
    assert pool.req_to_token.shape == (5, 8)
    assert pool.req_to_token.dtype == np.int32
    rows = pool.alloc(3)
    assert rows.dtype == np.int32
    assert rows.tolist() == [1, 2, 3]
    assert pool.available_size() == 1
    assert pool.alloc(2) is None
    assert pool.available_size() == 1
    assert pool.alloc(0).tolist() == []
    pool.free([2])
    pool.free(1)
    assert pool.alloc(3).tolist() == [1, 2, 4]
    assert pool.alloc(1) is None
    assert repr(pool) == "ReqToTokenPool(size=4, max_context_len=8, available 0 of 4)"


def test_returned_rows_and_slots_are_the_callers_own():
    pool = ReqToTokenPool(4, 8)
    rows = pool.alloc(1)
    assert rows.flags.owndata
    rows[:] = 3
    assert pool.alloc(1).tolist() == [2]
    pool.write(1, 0, [5, 6, 7])
    pool.read(1, 0, 3)[:] = 9
    slots = np.array([8], np.int32)
    pool.write(1, 3, slots)
    slots[:] = 9
    assert pool.read(1, 0, 4).tolist() == [5, 6, 7, 8]


def test_the_table_shows_what_was_written_and_nothing_else():
    pool, row = pool_with_a_row()
    pool.write(row, 0, np.array([16, 17], np.int64))
    pool.write(row, 5, [40, 41, 42])
    pool.write(row, 1, [33])
    pool.write(row, 8, [])
    expected = np.zeros((5, 8), np.int32)
    expected[1] = [16, 33, 0, 0, 0, 40, 41, 42]
    np.testing.assert_array_equal(pool.req_to_token, expected)
    pool.write_each([2, 1], [3, 2], [20, 2**31 - 1])
    expected[2, 3], expected[1, 2] = 20, 2**31 - 1
    np.testing.assert_array_equal(pool.req_to_token, expected)


def test_the_table_can_only_be_changed_by_writing():
    pool, row = pool_with_a_row()
    with pytest.raises(ValueError, match="read-only"):
        pool.req_to_token[row, 0] = 5
    with pytest.raises(ValueError, match="read-only"):
        pool.req_to_token[0] = 5
    assert not pool.req_to_token.any()
    copied = pool.req_to_token[np.array([row]), :4]
    pool.write(row, 0, [5])
    assert not copied.any()


def test_a_freed_rows_slots_cannot_be_read_by_its_next_owner():
    pool, row = pool_with_a_row()
    pool.write(row, 2, [16, 17, 18])
    pool.write(row, 0, [19])
    pool.write_each([2], [7], [20])
    pool.write_each([2], [1], [21])
    pool.free([row, 2])
    assert not pool.req_to_token.any()
    rows = pool.alloc(4)
    assert row in rows
    pool.write(row, 0, [30])
    with pytest.raises(ValueError, match=r"read \(ReqToTokenPool\): positions 1, 2, 3 of row 1 hold no slot yet"):
        pool.read(row, 0, 4)


def test_clear_frees_and_zeroes_every_row():
    pool, row = pool_with_a_row()
    pool.write(row, 0, [16, 17])
    pool.write_each([2], [7], [20])
    pool.clear()
    assert not pool.req_to_token.any()
    assert pool.alloc(4).tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="hold no slot yet"):
        pool.read(row, 0, 1)


def test_only_committed_positions_can_be_read():
    pool, row = pool_with_a_row()
    pool.write(row, 0, [4, 5, 6])
    assert pool.read(row, 0, 3).tolist() == [4, 5, 6]
    assert pool.read(row, 3, 0).tolist() == []
    with pytest.raises(ValueError, match="positions 3, 4 of row 1 hold no slot yet"):  # 5 asked for, 3 committed
        pool.read(row, 0, 5)
    pool.write(row, 3, [7])
    with pytest.raises(ValueError, match="positions 4, 5, 6 of row 1"):  # a draft that runs ahead of the allocation
        pool.read(row, 3, 4)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda p: p.write(0, 0, [5]),
            ValueError,
            r"write \(ReqToTokenPool\): row 0 is not in use .* row 0 is reserved",
        ),
        (lambda p: p.write(3, 0, [5]), ValueError, "row 3 is not in use"),
        (lambda p: p.write(5, 0, [5]), ValueError, r"row 5 is not in use \(rows are 1 ... 4"),
        (lambda p: p.write(2**40, 0, [5]), ValueError, "row 1099511627776 is not in use"),
        (lambda p: p.write(-1, 0, [5]), ValueError, "row must be at least 0, got -1"),
        (lambda p: p.write(True, 0, [5]), ValueError, "row must be an integer, got True"),
        (lambda p: p.write(1, -1, [5]), ValueError, "start must be at least 0, got -1"),
        (lambda p: p.write(1, 1.0, [5]), ValueError, "start must be an integer, got 1.0"),
        (lambda p: p.write(1, 6, [5, 6, 7]), ValueError, "positions 6 ... 8 pass max_context_len 8"),
        (lambda p: p.write(1, 2**62, [5]), ValueError, "pass max_context_len 8"),
        (lambda p: p.write(1, 0, [[5]]), ValueError, r"slots must have shape \[n\], got \(1, 1\)"),
        (lambda p: p.write(1, 0, 5), ValueError, r"slots must have shape \[n\], got \(\)"),
        (lambda p: p.write(1, 0, [5.0]), TypeError, r"write \(ReqToTokenPool\): slots must hold signed integers"),
        (
            lambda p: p.write(1, 0, [5, 0, -1]),
            ValueError,
            r"slots must be ids in .* \(0 is the padding slot\), got 0, -1",
        ),
        (lambda p: p.write(1, 0, [2**32 + 5]), ValueError, "got 4294967301"),
        (lambda p: p.write_each([1, 1], [0, 1], [5, 6]), ValueError, r"write_each .*: rows holds 1 \(given twice\)"),
        (lambda p: p.write_each([1, 3], [0, 1], [5, 6]), ValueError, r"write_each .*: rows holds 3 \(not in use"),
        (lambda p: p.write_each([1, 0], [0, 1], [5, 6]), ValueError, r"rows holds 0 \(outside \[1, 5\)"),
        (lambda p: p.write_each([1, 2], [0, 8], [5, 6]), ValueError, r"positions must lie in \[0, 8\), got 8"),
        (lambda p: p.write_each([1, 2], [-1, 0], [5, 6]), ValueError, r"positions must lie in \[0, 8\), got -1"),
        (lambda p: p.write_each([1, 2], [0], [5, 6]), ValueError, "positions must have length 2, got 1"),
        (lambda p: p.write_each([1, 2], [0, 1], [5]), ValueError, "slots must have length 2, got 1"),
        (lambda p: p.write_each([1, 2], [0, 1], [5, 0]), ValueError, r"write_each .*: slots must be ids in .* got 0"),
        (lambda p: p.write_each([1.0], [0], [5]), TypeError, "rows must hold signed integers"),
        (lambda p: p.read(0, 0, 1), ValueError, r"read \(ReqToTokenPool\): row 0 is not in use"),
        (lambda p: p.read(3, 0, 1), ValueError, "row 3 is not in use"),
        (lambda p: p.read(1, 0, -1), ValueError, "length must be at least 0, got -1"),
        (lambda p: p.read(1, 7, 2), ValueError, "positions 7 ... 8 pass max_context_len 8"),
        (lambda p: p.read(1, 2, 1), ValueError, "positions 2 of row 1 hold no slot yet"),
        (lambda p: p.free([0]), ValueError, r"free \(ReqToTokenPool\): rows holds 0 \(outside \[1, 5\)"),
        (lambda p: p.free(-1), ValueError, r"rows holds -1 \(outside"),
        (lambda p: p.free([1, 5]), ValueError, r"rows holds 5 \(outside"),
        (lambda p: p.free([2, 2]), ValueError, r"rows holds 2 \(given twice\)"),
        (lambda p: p.free([1, 3]), ValueError, r"rows holds 3 \(not in use"),
        (lambda p: p.free(1.0), TypeError, "rows must hold signed integers .* got float64"),
        (lambda p: p.free([[1]]), ValueError, r"rows must have shape \[n\], got \(1, 1\)"),
        (lambda p: p.alloc(-1), ValueError, r"alloc \(ReqToTokenPool\): n must be at least 0, got -1"),
        (lambda p: p.alloc(1.0), ValueError, "n must be an integer, got 1.0"),
    ],
)
def test_a_wrong_call_is_refused_and_changes_nothing(
    call: Callable[[ReqToTokenPool], Any], error: type[Exception], match: str
):
    pool, row = pool_with_a_row()
    pool.write(row, 0, [16, 17])
    before = pool.req_to_token.copy()
    with pytest.raises(error, match=match):
        call(pool)
    np.testing.assert_array_equal(pool.req_to_token, before)
    assert pool.available_size() == 2
    assert pool.alloc(2).tolist() == [3, 4]


def test_a_second_free_is_refused():
    pool, row = pool_with_a_row()
    pool.free(row)
    with pytest.raises(ValueError, match=r"rows holds 1 \(not in use"):
        pool.free(row)
    assert pool.available_size() == 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0, 8), "ReqToTokenPool: size must be at least 1, got 0"),
        ((4, 0), "ReqToTokenPool: max_context_len must be at least 1, got 0"),
        ((4.0, 8), "ReqToTokenPool: size must be an integer, got 4.0"),
    ],
)
def test_a_wrong_size_is_refused(arguments: tuple, match: str):
    with pytest.raises(ValueError, match=match):
        ReqToTokenPool(*arguments)
