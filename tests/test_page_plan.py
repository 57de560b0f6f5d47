"""The arithmetic of an extension: order, pages used, shortage, limits, refusals."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from jkv.page_plan import decode_slots, extend_slots, new_pages

CASES = json.loads((pathlib.Path(__file__).parent / "data" / "index_math.json").read_text())


def ids(array: np.ndarray | None) -> list[int]:
    assert array is not None
    assert array.dtype == np.int32
    assert array.ndim == 1
    return array.tolist()


@pytest.mark.parametrize("case", CASES["alloc_extend"], ids=range(60))
def test_extend_slots_hands_out_what_sglang_does(case: dict[str, Any]):
    arguments = (case["prefix_lens"], case["seq_lens"], case["last_loc"], case["free_pages"], case["page_size"])
    slots, used = extend_slots(*arguments)
    assert (ids(slots), used) == (case["out"], case["pages_used"])
    # Numpy arrays of any signed width do too, and a list that is exactly long enough.
    slots, used = extend_slots(
        *(np.array(a, np.int32) for a in arguments[:3]),
        np.array(case["free_pages"][:used], np.int64),
        case["page_size"],
    )
    assert ids(slots) == case["out"]
    if used:
        assert extend_slots(*arguments[:3], case["free_pages"][: used - 1], case["page_size"]) == (None, 0)


@pytest.mark.parametrize("case", CASES["alloc_decode"], ids=range(40))
def test_decode_slots_hands_out_what_sglang_does(case: dict[str, Any]):
    arguments = (case["seq_lens"], case["last_loc"], case["free_pages"], case["page_size"])
    slots, used = decode_slots(*arguments)
    assert (ids(slots), used) == (case["out"], case["pages_used"])
    if used:
        assert decode_slots(*arguments[:2], case["free_pages"][: used - 1], case["page_size"]) == (None, 0)


def test_new_pages_are_counted_beyond_the_page_that_is_filled_up():
    for page in (1, 4, 7):
        grid = [(prefix, seq) for prefix in range(30) for seq in range(prefix, 30)]
        prefix, seq = np.array(grid, np.int64).T
        # A token takes a page where its position is the first of one.
        expected = [sum(position % page == 0 for position in range(*span)) for span in grid]
        assert new_pages(prefix, seq, page).tolist() == expected
    huge = np.array([2**63 - 1])
    assert new_pages(huge - 9, huge, 8).tolist() == [1]


def test_extending_reads_no_page_that_it_does_not_use():
    slots, used = extend_slots([4], [9], [19], [3, 2, -7, 0], 4)
    assert (ids(slots), used) == ([12, 13, 14, 15, 8], 2)


def test_an_empty_batch_takes_nothing():
    assert extend_slots([], [], [], [5], 4)[1] == decode_slots([], [], [], 4)[1] == 0
    assert ids(extend_slots([], [], [], [], 4)[0]) == ids(decode_slots([], [], [5], 4)[0]) == []


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (
            ([5], [6], [11], [9], 4),
            ValueError,
            r"extend_slots: last_loc of requests 0: .* % 4 == .* got last_loc 11 for",
        ),
        (
            ([0, 5], [1, 6], [-1, -4], [9], 4),
            ValueError,
            r"last_loc of requests 1: .* got last_loc -4 for prefix lengths 5",
        ),
        (([1], [2], [0], [9], 4), ValueError, r"in \[4, 2147483648\), got last_loc 0"),
        (([1], [2], [2**31], [9], 4), ValueError, "got last_loc 2147483648"),
        (([1], [2], [2**31 - 2], [9], 3), ValueError, r"in \[3, 2147483646\), got last_loc 2147483646"),
        (([5, 6], [6, 7], [8, 9], [9], 4), ValueError, "last_loc of requests 0, 1 lie on one page"),
        (
            ([3], [2], [6], [9], 4),
            ValueError,
            "requests 0: expected 0 <= prefix_lens <= seq_lens, got .* 3 and seq_lens 2",
        ),
        (([-1], [2], [6], [9], 4), ValueError, "got prefix_lens -1 and seq_lens 2"),
        (([1], [2, 3], [4], [9], 4), ValueError, "extend_slots: seq_lens must have length 1, got 2"),
        (([1], [2], [], [9], 4), ValueError, "extend_slots: last_loc must have length 1, got 0"),
        (([[1]], [2], [4], [9], 4), ValueError, r"prefix_lens must have shape \[n\], got \(1, 1\)"),
        (([1.0], [2], [4], [9], 4), TypeError, "prefix_lens must hold signed integers .* got float64"),
        (([1], [True], [4], [9], 4), TypeError, "seq_lens must hold signed integers .* got bool"),
        (([1], [2], np.array([4], np.uint32), [9], 4), TypeError, "last_loc must hold signed integers .* got uint32"),
        (([0], [2], [-1], np.zeros(0), 4), TypeError, "free_pages must hold signed integers .* got float64"),
        (([0], [2], [-1], 9, 4), ValueError, r"free_pages must have shape \[n\], got \(\)"),
        (([0], [2], [-1], [0], 4), ValueError, r"free_pages must lie in \[1, 536870912\), got 0"),
        (([0], [2], [-1], [2**29], 4), ValueError, "free_pages must lie in .* got 536870912"),
        (([0], [2], [-1], [9], 0), ValueError, "page_size must be at least 1, got 0"),
        (([0], [2], [-1], [9], 2**31), ValueError, "page_size must be at most 2147483647, got 2147483648"),
        (([0], [2], [-1], [9], 4.0), ValueError, "page_size must be an integer, got 4.0"),
        (([0], [2], [-1], [9], True), ValueError, "page_size must be an integer, got True"),
        (([0], [2], [-1], [9], np.array([4])), ValueError, r"page_size must be an integer, got array\(\[4\]\)"),
        (([0], [2], [-1], [[9], [8, 7]], 4), ValueError, r"free_pages must have shape \[n\], got rows of different"),
    ],
)
def test_extend_slots_refuses(arguments: tuple, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        extend_slots(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (
            ([1, 0, -3], [-1, -1, -1], [9], 4),
            ValueError,
            r"decode_slots: seq_lens of requests 1, 2 must count .* got 0, -3",
        ),
        (
            ([6], [9], [9], 4),
            ValueError,
            "decode_slots: last_loc of requests 0: .* got last_loc 9 for prefix lengths 5",
        ),
        (([6, 3], [8, 8], [9], 4), ValueError, "decode_slots: last_loc of requests 1"),
        (([7, 7], [9, 9], [9], 4), ValueError, "last_loc of requests 0, 1 lie on one page"),
        (([7, 7, 6], [9, 5, 8], [9], 4), ValueError, "last_loc of requests 0, 2 lie on one page"),
        (([6], [8, 8], [9], 4), ValueError, "decode_slots: last_loc must have length 1, got 2"),
        ((["6"], [9], [9], 4), TypeError, "decode_slots: seq_lens must hold signed integers"),
        (([6], [9], [9], 0), ValueError, "decode_slots: page_size must be at least 1"),
    ],
)
def test_decode_slots_refuses(arguments: tuple, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        decode_slots(*arguments)


@pytest.mark.parametrize("length", [2**29, 2**31 - 1, 2**40, 2**63 - 1])
def test_counts_do_not_overflow_32_or_64_bits(length: int):
    many = [length] * 300
    assert extend_slots([0] * 300, many, [-1] * 300, [1, 2, 3], 1) == (None, 0)
    assert extend_slots([0] * 300, many, [-1] * 300, [1, 2, 3], 7) == (None, 0)


def test_slots_up_to_the_end_of_int32_are_handed_out():
    top = 2**31 // 4 - 1
    assert ids(extend_slots([0], [4], [-1], np.array([top]), 4)[0]) == list(range(2**31 - 4, 2**31))
    assert ids(extend_slots([3], [4], [2**31 - 2], [], 4)[0]) == [2**31 - 1]
    assert ids(extend_slots([0], [4], [-1], np.array([100], np.int8), 4)[0]) == [400, 401, 402, 403]
