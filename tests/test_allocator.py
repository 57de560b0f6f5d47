"""Allocation of slot ids: order, shortage, refusals, groups, backups, limits.

Fixtures: F1 has 8 single slots, F4 16 pages of 4, D4 2 pages of 4 tokens a rank on 4 ranks (ids 16 to 47).
"""

import pathlib
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jkv.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator


def f1() -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(8)


def f4() -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(64, 4)


def d4() -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(8, 4, dcp_size=4)


Allocator = TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator


def ids(array: np.ndarray | None) -> list[int]:
    assert array is not None
    assert array.dtype == np.int32
    assert array.ndim == 1
    return array.tolist()


# Geometry


def test_the_first_page_is_never_handed_out_and_every_other_id_is_once():
    assert ids(f1().alloc(8)) == list(range(1, 9))
    assert ids(f4().alloc(64)) == list(range(4, 68))
    assert ids(d4().alloc(32)) == list(range(16, 48))


def test_capacity_is_the_aggregate_pool_counted_once():
    allocator = d4()
    assert (allocator.page_size, allocator.alloc_page_size) == (4, 16)
    assert (allocator.capacity, allocator.bound) == (32, 48)
    assert allocator.available_size() == 32  # not 8, one rank's share, and not 128, the factor twice
    assert ids(allocator.alloc_extend([0], [20], [-1])) == list(range(16, 36))  # more than a rank's 8 tokens
    allocator.clear()
    assert allocator.alloc(48) is None
    assert ids(allocator.alloc(32)) == list(range(16, 48))


def test_under_dcp_a_token_takes_a_widened_page():
    allocator = d4()
    assert allocator.alloc_extend([0] * 3, [1] * 3, [-1] * 3) is None  # 3 * 16 > 32, though 3 tokens < 8
    assert ids(allocator.alloc_extend([0] * 2, [1] * 2, [-1] * 2)) == [16, 32]  # each starts on rank 0
    allocator = PagedTokenToKVPoolAllocator(8, 1, dcp_size=4)
    assert ids(allocator.alloc_extend([0] * 2, [5, 1], [-1] * 2)) == [4, 5, 6, 7, 8, 12]


def test_two_requests_of_two_tokens_do_not_fit_one_large_page():
    allocator = PagedTokenToKVPoolAllocator(128, 128)
    assert allocator.alloc_extend([0, 0], [2, 2], [-1, -1]) is None
    assert ids(allocator.alloc_extend([0], [2], [-1])) == [128, 129]


def test_the_largest_pool_of_int32_ids_is_accepted_and_the_next_is_not():
    page = 2**20
    PagedTokenToKVPoolAllocator(2**31 - 2 * page, page)
    with pytest.raises(
        ValueError, match=r"\(size 2146435072 \+ page_size 1048576\) \* dcp_size 1 = 2147483648 .* int32"
    ):
        PagedTokenToKVPoolAllocator(2**31 - page, page)
    with pytest.raises(ValueError, match=r"dcp_size 8 = .* do not fit int32"):
        PagedTokenToKVPoolAllocator(2**28, page, dcp_size=8)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: PagedTokenToKVPoolAllocator(10, 4),
            "PagedTokenToKVPoolAllocator: size .* multiple of page_size 4, got 10",
        ),
        (lambda: PagedTokenToKVPoolAllocator(0, 4), "PagedTokenToKVPoolAllocator: size must be at least 1, got 0"),
        (
            lambda: PagedTokenToKVPoolAllocator(8, -4),
            "PagedTokenToKVPoolAllocator: page_size must be at least 1, got -4",
        ),
        (
            lambda: PagedTokenToKVPoolAllocator(8, 4, 0),
            "PagedTokenToKVPoolAllocator: dcp_size must be at least 1, got 0",
        ),
        (lambda: PagedTokenToKVPoolAllocator(8.0, 4), "PagedTokenToKVPoolAllocator: size must be an integer, got 8.0"),
        (lambda: TokenToKVPoolAllocator(-1), "TokenToKVPoolAllocator: size must be at least 1, got -1"),
        (
            lambda: TokenToKVPoolAllocator(2**31 - 1),
            r"TokenToKVPoolAllocator: .* = 2147483648 slot ids do not fit int32",
        ),
        (lambda: TokenToKVPoolAllocator(8, 0), "TokenToKVPoolAllocator: dcp_size must be at least 1, got 0"),
        (
            lambda: TokenToKVPoolAllocator(8, dcp_size=4),
            r"dcp_size must be 1, got 4; use PagedTokenToKVPoolAllocator\(size=8, page_size=1, dcp_size=4\)",
        ),
    ],
)
def test_a_wrong_geometry_is_refused(make: Callable[[], Allocator], match: str):
    with pytest.raises(ValueError, match=match):
        make()


def test_repr_is_one_line_and_says_what_is_left():
    allocator = d4()
    allocator.alloc(16)
    assert repr(allocator) == "PagedTokenToKVPoolAllocator(size=8, page_size=4, dcp_size=4, available 16 of 32)"
    assert repr(f1()) == "TokenToKVPoolAllocator(size=8, page_size=1, dcp_size=1, available 8 of 8)"
    assert repr(allocator.backup_state()) == "FreeListState(free 1)"


# Taking


@pytest.mark.parametrize("make", [f1, f4, d4])
def test_an_empty_batch_takes_nothing(make: Callable[[], Allocator]):
    allocator = make()
    assert (
        ids(allocator.alloc_extend([], [], [])) == ids(allocator.alloc_decode([], [])) == ids(allocator.alloc(0)) == []
    )
    allocator.free([])
    assert allocator.available_size() == allocator.capacity


def test_a_request_fills_up_its_page_before_it_takes_another():
    allocator = f4()
    assert ids(allocator.alloc_extend([0, 0], [5, 4], [-1, -1])) == [4, 5, 6, 7, 8, 12, 13, 14, 15]
    assert ids(allocator.alloc_extend([5, 4], [7, 6], [8, 15])) == [9, 10, 16, 17]
    assert ids(allocator.alloc_decode([8, 7], [10, 17])) == [11, 18]
    assert ids(allocator.alloc_decode([9, 8], [11, 18])) == [20, 19]
    assert allocator.available_size() == 64 - 5 * 4


def test_a_decode_at_63_of_64_takes_no_page_and_at_64_one():
    allocator = PagedTokenToKVPoolAllocator(64 * 4, 64)
    assert ids(allocator.alloc_extend([0, 0], [63, 64], [-1, -1]))[62:64] == [126, 128]
    assert ids(allocator.alloc_decode([64, 65], [126, 191])) == [127, 192]
    assert allocator.available_size() == 64


def test_the_token_allocator_serves_a_scheduler_that_pages():
    allocator = f1()
    assert ids(allocator.alloc_extend([0, 0], [2, 3], [-1, -1])) == [1, 2, 3, 4, 5]
    assert ids(allocator.alloc_decode([3, 4], [2, 5])) == [6, 7]
    assert allocator.alloc_decode([4, 5], [6, 7]) is None
    assert allocator.available_size() == 1


def test_a_page_stays_its_requests_own_when_a_draft_is_rejected():
    allocator = f4()
    assert ids(allocator.alloc_extend([0], [8], [-1])) == list(range(4, 12))
    # 8 drafted, 3 kept: the next tokens stand where the rejected ones stood
    assert ids(allocator.alloc_extend([3], [5], [6])) == [7, 12]
    allocator.free([4, 5, 6, 7, 12, 8])
    assert allocator.available_size() == 64


def shortages(allocator: Allocator) -> list[Callable[[], Any]]:
    page, left = allocator.alloc_page_size, allocator.available_size()
    return [
        lambda: allocator.alloc(left + page),
        lambda: allocator.alloc(2**80 * page),
        lambda: allocator.alloc_extend([0], [left + 1], [-1]),
        lambda: allocator.alloc_extend([0] * 300, [2**63 - 1] * 300, [-1] * 300),
        lambda: allocator.alloc_extend([0, 0], [1, left], [-1, -1]),
        lambda: allocator.alloc_decode([1] * (left // page + 1), [-1] * (left // page + 1)),
    ]


@pytest.mark.parametrize("make", [f1, f4, d4])
@pytest.mark.parametrize("left", [0, 1])
def test_a_shortage_is_none_and_takes_nothing(make: Callable[[], Allocator], left: int):
    allocator = make()
    allocator.alloc(allocator.capacity - left * allocator.alloc_page_size)
    before = allocator.fingerprint()
    for call in shortages(allocator):
        assert call() is None
        assert allocator.fingerprint() == before
    if left:
        assert ids(allocator.alloc_decode([1], [-1])) == [allocator.capacity]


def test_one_free_page_is_not_given_to_three_requests():
    allocator = f4()
    allocator.alloc(60)
    before = allocator.fingerprint()
    assert allocator.alloc_extend([0] * 3, [2] * 3, [-1] * 3) is None
    assert allocator.fingerprint() == before
    assert ids(allocator.alloc_extend([0], [2], [-1])) == [64, 65]


@pytest.mark.parametrize("pages", [16, 1000])  # 1000: few free pages of many are sorted, not found by a scan
def test_freed_pages_come_back_in_ascending_order_when_the_list_runs_short(pages: int):
    allocator = PagedTokenToKVPoolAllocator(pages * 4, 4)
    allocator.alloc(pages * 4 - 8)
    for page in (9, 3, 12, 5):
        allocator.free([page * 4 + 1])
    # the front still serves: no need to sort
    assert ids(allocator.alloc(4))[0] == (pages - 1) * 4
    # it runs short: 5, 9, 12 and the last page join in order behind 3
    assert ids(allocator.alloc(8))[::4] == [12, 20]
    allocator.free([4, 5])
    assert ids(allocator.alloc(12))[::4] == [36, 48, pages * 4]
    assert ids(allocator.alloc(4)) == [4, 5, 6, 7]
    assert allocator.alloc(4) is None


@pytest.mark.parametrize("make", [f1, f4, d4])
@pytest.mark.parametrize("operation", ["alloc", "alloc_extend", "alloc_decode"])
def test_what_is_returned_is_the_callers_own(make: Callable[[], Allocator], operation: str):
    allocator = make()
    page, state = allocator.alloc_page_size, allocator.backup_state()
    arguments = {"alloc": [page], "alloc_extend": [[0], [page], [-1]], "alloc_decode": [[1], [-1]]}[operation]
    for _ in range(2):
        slots = getattr(allocator, operation)(*arguments)
        assert ids(slots)[0] == page
        slots[:] = 99  # in a view of the free list this would be handed out later
        assert ids(allocator.alloc(page)) == list(range(2 * page, 3 * page))
        allocator.restore_state(state)


def test_what_the_caller_passes_is_not_kept():
    allocator = f4()
    allocator.alloc(64)
    loc = np.array([8, 16], np.int64)
    allocator.free(loc)
    loc[:] = 40
    assert ids(allocator.alloc(8))[::4] == [8, 16]


# Giving back


@pytest.mark.parametrize(
    ("make", "loc", "match"),
    [
        (
            f1,
            [0, 3, 3, 99],
            r"free \(TokenToKVPoolAllocator\): loc holds 0, 99 \(outside \[1, 9\).*\); 3 \(given twice\)",
        ),
        (f1, [3, 3], r"loc holds 3 \(given twice\)"),
        (f1, [3, 7], r"loc holds 7 \(not in use"),
        (f1, [-1], r"loc holds -1 \(outside \[1, 9\)"),
        (f1, [2**32 + 3], r"loc holds 4294967299 \(outside"),
        (f1, [9], r"loc holds 9 \(outside"),
        (f4, [0, 4, 68, 3], r"free \(PagedTokenToKVPoolAllocator\): loc holds 0, 68, 3 \(outside \[4, 68\)"),
        (f4, [4, 29, 5, 28], r"loc holds 29, 28 \(not in use"),
        (d4, [15], r"loc holds 15 \(outside \[16, 48\)"),
        (d4, [16, 48], r"loc holds 48 \(outside"),
        (d4, [16, 36], r"loc holds 36 \(not in use"),
        (f4, list(range(-20, 0)), r"loc holds -20, -19, -18, -17, -16, -15, -14, -13 and 12 more \(outside"),
        (f4, [[4]], r"loc must have shape \[n\], got \(1, 1\)"),
        (f4, 4, r"loc must have shape \[n\], got \(\)"),
    ],
)
def test_a_wrong_free_names_the_ids_and_changes_nothing(make: Callable[[], Allocator], loc: Any, match: str):
    allocator = make()
    allocator.alloc(6 if make is f1 else 24 if make is f4 else 16)
    before = allocator.fingerprint()
    for array in (loc, np.array(loc, np.int64)):
        with pytest.raises(ValueError, match=match):
            allocator.free(array)
        assert allocator.fingerprint() == before


@pytest.mark.parametrize("loc", [[4.0], [True], np.array([4], np.uint32), np.zeros(0), [None], [2**63]])
def test_ids_that_are_not_signed_integers_are_a_type_error(loc: Any):
    allocator = f4()
    allocator.alloc(8)
    with pytest.raises(TypeError, match=r"free \(PagedTokenToKVPoolAllocator\): loc must hold signed integers"):
        allocator.free(loc)
    assert allocator.available_size() == 56


def test_a_second_free_is_refused_and_nothing_is_gained():
    allocator = f1()
    slots = allocator.alloc(3)
    allocator.free(slots)
    with pytest.raises(ValueError, match=r"loc holds 3 \(not in use \(never handed out, or freed before\)\)"):
        allocator.free(slots[-1:])
    assert allocator.available_size() == 8


def test_any_id_of_a_page_frees_the_page_once():
    allocator = d4()
    allocator.alloc(32)
    allocator.free([35, 32, 47, 33])
    assert allocator.available_size() == 16
    with pytest.raises(ValueError, match=r"34 \(not in use"):
        allocator.free([34])
    allocator.free(np.arange(16, 32, dtype=np.int32))
    assert allocator.available_size() == 32


@pytest.mark.parametrize("make", [f1, f4, d4])
def test_in_use_follows_each_page_from_its_allocation_to_its_release(make: Callable[[], Allocator]):
    allocator = make()
    page = allocator.alloc_page_size
    every = np.arange(-page, allocator.bound + page)  # ids below and above the space, and the padding page too
    taken = allocator.alloc(2 * page)
    assert every[allocator.in_use(every)].tolist() == ids(taken)
    allocator.free(taken[:page])
    assert every[allocator.in_use(every)].tolist() == ids(taken[page:])
    allocator.free_group_begin()
    allocator.free(taken[page:])
    assert not allocator.in_use(every).any()  # held for release: nobody's
    allocator.free_group_end()
    assert not allocator.in_use(every).any()
    taken = allocator.alloc(allocator.capacity)
    assert allocator.in_use(every).sum() == allocator.capacity
    assert allocator.in_use(taken[::-1]).all()
    assert allocator.in_use([]).shape == (0,)
    assert allocator.in_use([]).dtype == bool


def test_in_use_refuses_what_are_no_ids():
    with pytest.raises(TypeError, match=r"in_use \(TokenToKVPoolAllocator\): loc must hold signed integers .* float64"):
        f1().in_use([1.0])
    with pytest.raises(ValueError, match=r"in_use \(PagedTokenToKVPoolAllocator\): loc must have shape \[n\]"):
        f4().in_use([[4]])


def test_ids_of_several_pages_may_come_in_any_order():
    allocator = f4()
    allocator.alloc(64)
    allocator.free([8, 4, 9, 5, 8])
    assert allocator.available_size() == 8
    assert ids(allocator.alloc(8)) == list(range(4, 12))


def test_a_thousand_random_cycles_lose_nothing():
    allocator, rng, live = f4(), np.random.default_rng(0), []
    for _ in range(1000):
        if (slots := allocator.alloc_extend([0], [int(rng.integers(1, 20))], [-1])) is not None:
            live.append(slots)
        while live and (slots is None or rng.random() < 0.4):
            allocator.free(live.pop(int(rng.integers(len(live)))))
            slots = 0
        together = np.concatenate([[0], *live])
        assert np.unique(together).size == together.size
    for slots in live:
        allocator.free(slots)
    assert allocator.available_size() == 64
    assert sorted(ids(allocator.alloc(64))) == list(range(4, 68))


# Free groups


@pytest.mark.parametrize("make", [f1, f4, d4])
def test_a_free_group_is_hidden_until_it_ends(make: Callable[[], Allocator]):
    allocator = make()
    page, capacity = allocator.alloc_page_size, allocator.capacity
    slots = allocator.alloc(capacity)
    allocator.free_group_begin()
    allocator.free(slots[:page])
    allocator.free(slots[page : 2 * page])
    assert allocator.available_size() == 0
    assert allocator.alloc(page) is None
    allocator.free_group_end()
    assert allocator.available_size() == 2 * page
    assert ids(allocator.alloc(page)) == list(range(page, 2 * page))


@pytest.mark.parametrize("pages", [16, 1000])
def test_what_a_group_holds_is_not_among_what_is_merged(pages: int):
    allocator = PagedTokenToKVPoolAllocator(pages * 4, 4)
    slots = allocator.alloc(pages * 4)
    allocator.free(slots[20:24])
    allocator.free_group_begin()
    allocator.free(slots[8:16])
    assert ids(allocator.alloc(4)) == [24, 25, 26, 27]
    assert allocator.alloc(4) is None
    allocator.free_group_end()
    assert ids(allocator.alloc(8)) == list(range(12, 20))


@pytest.mark.parametrize("make", [f1, f4])
def test_a_double_free_is_caught_inside_a_group_at_once(make: Callable[[], Allocator]):
    allocator = make()
    slots = allocator.alloc(8)
    allocator.free_group_begin()
    allocator.free(slots[:4])
    before = allocator.fingerprint()
    with pytest.raises(ValueError, match=rf"loc holds {slots[0]} \(freed before in this free group\)"):
        allocator.free([slots[0], slots[5]])
    with pytest.raises(ValueError, match="outside"):
        allocator.free([0])
    assert allocator.fingerprint() == before
    allocator.free_group_end()
    with pytest.raises(ValueError, match=rf"loc holds {slots[0]} \(not in use"):
        allocator.free(slots[:1])
    allocator.free(slots[4:])
    assert allocator.available_size() == allocator.capacity


def test_an_extension_from_a_page_held_by_a_group_is_refused():
    allocator = f4()
    slots = allocator.alloc_extend([0], [6], [-1])
    allocator.free_group_begin()
    allocator.free(slots)
    with pytest.raises(ValueError, match="9 lie on pages that are not in use"):
        allocator.alloc_decode([7], [9])


def test_ending_a_group_twice_or_an_empty_one_does_nothing():
    allocator = f4()
    slots = allocator.alloc(16)
    allocator.free_group_end()
    allocator.free_group_begin()
    allocator.free(slots[:4])
    allocator.free_group_end()
    allocator.free_group_end()
    allocator.free_group_begin()
    allocator.free_group_end()
    assert allocator.available_size() == 52
    allocator.free(slots[4:8])
    assert allocator.available_size() == 56


def test_groups_do_not_nest_and_the_open_one_loses_nothing():
    allocator = f4()
    slots = allocator.alloc(16)
    allocator.free_group_begin()
    allocator.free(slots[:8])
    with pytest.raises(
        ValueError, match=r"free_group_begin \(PagedTokenToKVPoolAllocator\): a free group is open already"
    ):
        allocator.free_group_begin()
    allocator.free(slots[8:])
    allocator.free_group_end()
    assert allocator.available_size() == 64


def test_clear_resets_everything_an_open_group_too():
    for allocator in (f1(), f4(), d4()):
        fresh, page = allocator.fingerprint(), allocator.alloc_page_size
        slots = allocator.alloc(2 * page)
        allocator.free_group_begin()
        allocator.free(slots[:page])
        allocator.clear()
        assert allocator.fingerprint() == fresh
        allocator.free_group_begin()
        allocator.free_group_end()
        with pytest.raises(ValueError, match="not in use"):
            allocator.free(slots[page:])
        assert ids(allocator.alloc(page)) == list(range(page, 2 * page))


# Pages that a cache holds


@pytest.mark.parametrize("make", [f1, f4, d4])
def test_a_claimed_page_is_in_use_until_it_is_unclaimed_and_freed(make: Callable[[], Allocator]):
    allocator = make()
    page = allocator.alloc_page_size
    every = np.arange(-page, allocator.bound + page)
    taken = allocator.alloc(2 * page)
    fresh = allocator.fingerprint()
    allocator.claim(taken[:page])
    assert every[allocator.claimed(every)].tolist() == ids(taken[:page])
    assert every[allocator.in_use(every)].tolist() == ids(taken)
    assert allocator.available_size() == allocator.capacity - 2 * page
    assert allocator.fingerprint() != fresh  # the same free is an error in one process only
    allocator.free(taken[page:])
    allocator.unclaim(taken[:page])
    assert not allocator.claimed(every).any()
    assert every[allocator.in_use(every)].tolist() == ids(taken[:page])
    allocator.free(taken[:page])
    assert allocator.available_size() == allocator.capacity
    assert allocator.claimed([]).shape == (0,)
    assert allocator.claimed([]).dtype == bool


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda a: a.free([4, 5, 11, 8]),
            r"free \(Paged.*\): loc holds 11, 8 \(a prefix cache holds them: its evict or reset frees them\)$",
        ),
        (lambda a: a.free([9, 28, 0]), r"loc holds 0 \(outside .*\); 28 \(not in use .*\); 9 \(a prefix cache holds"),
        (lambda a: a.claim([4, 8]), r"claim \(Paged.*\): loc holds 8 \(a prefix cache holds them"),
        (lambda a: a.claim([28]), r"claim \(Paged.*\): loc holds 28 \(not in use"),
        (lambda a: a.claim([0, 68]), r"claim \(Paged.*\): loc holds 0, 68 \(outside \[4, 68\)"),
        (lambda a: a.unclaim([8, 4, 0]), r"unclaim \(Paged.*\): .* 4 \(in use, but claimed by no cache\)$"),
        (lambda a: a.unclaim([8, 28]), r"unclaim \(Paged.*\): loc holds 28 \(not in use"),
        (
            lambda a: a.alloc_extend([4, 2, 1], [5, 4, 2], [7, 9, 12]),
            r"alloc_extend \(Paged.*\): last_loc of requests 1: 9 lie on pages that a prefix cache holds, .*copy",
        ),
        (
            lambda a: a.alloc_decode([4, 4], [14, 10]),
            r"alloc_decode \(Paged.*\): last_loc of requests 1: 10 lie on pages that a prefix cache holds",
        ),
        (
            lambda a: a.clear(),
            r"clear \(Paged.*\): a prefix cache holds 2 pages, starting at ids 8, 16: reset it first",
        ),
    ],
)
def test_what_a_cache_holds_is_nobody_elses_and_nothing_changes(call: Callable[[Allocator], Any], match: str):
    allocator = f4()
    allocator.alloc(24)
    allocator.claim([8, 9, 10, 11, 16])
    before, claimed = allocator.fingerprint(), allocator.claimed(np.arange(68)).tolist()
    with pytest.raises(ValueError, match=match):
        call(allocator)
    assert (allocator.fingerprint(), allocator.claimed(np.arange(68)).tolist()) == (before, claimed)


def test_a_single_slot_is_claimed_once():
    allocator = f1()
    allocator.alloc(3)
    with pytest.raises(ValueError, match=r"claim \(TokenToKVPoolAllocator\): loc holds 2 \(given twice\)"):
        allocator.claim([2, 1, 2])
    allocator.claim([2])
    with pytest.raises(ValueError, match=r"free \(TokenToKVPoolAllocator\): loc holds 2 \(a prefix cache holds"):
        allocator.free([1, 2])
    assert ids(allocator.alloc_decode([3], [2])) == [4]  # a page of one slot is never filled up


def test_claims_take_signed_integers():
    for call in f4().claim, f4().unclaim, f4().claimed:
        with pytest.raises(TypeError, match=rf"{call.__name__} \(Paged.*\): loc must hold signed integers .* float64"):
            call([4.0])


def test_a_request_that_reads_a_claimed_page_and_does_not_grow_takes_nothing():
    allocator = f4()
    allocator.alloc(8)
    allocator.claim([4])
    assert ids(allocator.alloc_extend([2, 8], [2, 9], [5, 11])) == [12]
    assert ids(allocator.alloc_extend([4], [5], [7])) == [16]  # behind whole pages: nothing of a page that is held


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.claim([8]),
        lambda a: a.unclaim([4]),
        lambda a: (a.unclaim([4]), a.free([4])),
        lambda a: (a.unclaim([4]), a.claim([4])),  # somebody else's perhaps
    ],
)
def test_a_state_from_before_a_claim_changed_is_refused(change: Callable[[Allocator], Any]):
    allocator = f4()
    allocator.alloc(8)
    allocator.claim([4])
    state, before = allocator.backup_state(), allocator.fingerprint()
    allocator.alloc(4)
    allocator.restore_state(state)
    assert allocator.fingerprint() == before
    change(allocator)
    changed = allocator.fingerprint()
    with pytest.raises(ValueError, match=r"restore_state \(Paged.*\): a prefix cache took over or freed pages since"):
        allocator.restore_state(state)
    assert allocator.fingerprint() == changed


# Backup and restore


@pytest.mark.parametrize("make", [f1, f4])
def test_a_rejected_draft_is_rolled_back_exactly(make: Callable[[], Allocator]):
    allocator = make()
    kept = allocator.alloc(4)
    allocator.free(allocator.alloc(4))
    state, before = allocator.backup_state(), allocator.fingerprint()
    drafts = []
    for _ in range(3):  # the same state serves again and again
        drafts.append(ids(allocator.alloc(4)))
        allocator.free(kept)
        allocator.free_group_begin()
        allocator.free(drafts[-1])
        allocator.restore_state(state)
        assert allocator.fingerprint() == before
    assert drafts[0] == drafts[1] == drafts[2]
    allocator.free(kept)
    assert allocator.available_size() == allocator.capacity


def test_states_of_different_moments_do_not_disturb_each_other():
    allocator = f4()
    slots = allocator.alloc(64)
    allocator.free(slots[:12])
    early, at_early = allocator.backup_state(), allocator.fingerprint()
    allocator.free(slots[12:40])
    late, at_late = allocator.backup_state(), allocator.fingerprint()
    allocator.restore_state(early)
    allocator.free(slots[40:])  # overwrites what stood behind the early state
    allocator.alloc(24)
    allocator.restore_state(late)
    assert allocator.fingerprint() == at_late
    assert ids(allocator.alloc(40)) == list(range(4, 44))
    allocator.restore_state(early)
    assert allocator.fingerprint() == at_early


def test_a_backup_inside_a_group_holds_the_group():
    allocator = f4()
    slots = allocator.alloc(16)
    allocator.free_group_begin()
    allocator.free(slots[:4])
    state = allocator.backup_state()
    allocator.free(slots[4:8])
    allocator.free_group_end()
    for _ in range(2):
        allocator.restore_state(state)
        with pytest.raises(ValueError, match="open already"):
            allocator.free_group_begin()
        allocator.free(slots[8:12])
    allocator.restore_state(state)
    allocator.free_group_end()
    assert allocator.available_size() == 52


def test_a_state_of_another_allocator_is_refused():
    allocator = f4()
    allocator.alloc(8)
    before = allocator.fingerprint()
    with pytest.raises(
        ValueError, match=r"restore_state \(PagedTokenToKVPoolAllocator\): .* taken from another allocator"
    ):
        allocator.restore_state(f4().backup_state())
    with pytest.raises(ValueError, match="expected what backup_state returned, got tuple"):
        allocator.restore_state((1, 2))
    assert allocator.fingerprint() == before


# Refusals of the taking side


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda a: a.alloc(33),
            ValueError,
            r"alloc \(Paged.*\): n must be a multiple of 16 = page_size 4 \* dcp_size 4, got 33",
        ),
        (lambda a: a.alloc(-16), ValueError, "n must be at least 0, got -16"),
        (lambda a: a.alloc(16.0), ValueError, "n must be an integer, got 16.0"),
        (lambda a: a.alloc(False), ValueError, "n must be an integer, got False"),
        (
            lambda a: a.alloc_extend([5], [6], [16 + 5]),
            ValueError,
            r"alloc_extend \(Paged.*\): last_loc of requests 0: .* % 16",
        ),
        (
            lambda a: a.alloc_extend([0, 5], [1, 6], [-1, 36]),
            ValueError,
            "last_loc of requests 1: 36 lie on pages .* not in use",
        ),
        (
            lambda a: a.alloc_extend([5], [6], [16 * 40 + 4]),
            ValueError,
            r"in \[16, 48\), got last_loc 644 for prefix lengths 5",
        ),
        (lambda a: a.alloc_extend([5], [6], [4]), ValueError, r"in \[16, 48\), got last_loc 4"),
        (lambda a: a.alloc_decode([6], [52]), ValueError, r"in \[16, 48\), got last_loc 52 for prefix lengths 5"),
        (lambda a: a.alloc_extend([6], [5], [21]), ValueError, "requests 0: expected 0 <= prefix_lens <= seq_lens"),
        (lambda a: a.alloc_extend([5, 7], [6, 8], [20, 22]), ValueError, "requests 0, 1 lie on one page"),
        (
            lambda a: a.alloc_extend([5.0], [6], [20]),
            TypeError,
            r"alloc_extend \(Paged.*\): prefix_lens must hold signed",
        ),
        (lambda a: a.alloc_extend([5], [6, 7], [20]), ValueError, "seq_lens must have length 1, got 2"),
        (lambda a: a.alloc_decode([6], [21]), ValueError, r"alloc_decode \(Paged.*\): last_loc of requests 0"),
        (
            lambda a: a.alloc_decode([6], [36]),
            ValueError,
            "last_loc of requests 0: 36 lie on pages that are not in use",
        ),
        (lambda a: a.alloc_decode([0], [-1]), ValueError, r"alloc_decode \(Paged.*\): seq_lens of requests 0"),
        (lambda a: a.alloc_decode([6], [[20]]), ValueError, r"last_loc must have shape \[n\], got \(1, 1\)"),
    ],
)
def test_a_wrong_call_is_refused_and_changes_nothing(
    call: Callable[[Allocator], Any], error: type[Exception], match: str
):
    allocator = d4()
    allocator.alloc(16)
    before = allocator.fingerprint()
    with pytest.raises(error, match=match):
        call(allocator)
    assert allocator.fingerprint() == before


def test_the_precondition_of_a_partly_filled_page():
    allocator = f4()
    allocator.alloc_extend([0], [16], [-1])
    before = allocator.fingerprint()
    with pytest.raises(ValueError, match="got last_loc 11 for prefix lengths 5"):
        allocator.alloc_extend([5], [6], [11])
    assert allocator.fingerprint() == before
    assert ids(allocator.alloc_extend([5], [6], [12])) == [13]


def test_the_last_page_can_be_filled_up():
    allocator = f4()
    allocator.alloc(60)
    assert ids(allocator.alloc_extend([0], [2], [-1])) == [64, 65]
    assert ids(allocator.alloc_decode([3], [65])) == [66]


def test_a_request_that_does_not_grow_takes_nothing_beside_one_that_does():
    allocator = f4()
    allocator.alloc_extend([0], [2], [-1])
    assert ids(allocator.alloc_extend([2, 2], [2, 3], [5, 5])) == [6]  # only one of the two takes from the page


# Reproducibility and cost

REPLAY = """
import numpy as np
from jkv.allocator import PagedTokenToKVPoolAllocator
allocator, live, seen = PagedTokenToKVPoolAllocator(64, 4, 2), [], []
for step in range(300):
    slots = allocator.alloc_extend([0], [step * 7 % 23 + 1], [-1])
    if slots is None:
        allocator.free(live.pop(step % len(live)))
    else:
        live.append(slots)
        seen.extend(slots.tolist())
print(sum(i * s for i, s in enumerate(seen)), allocator.fingerprint())
"""


def test_every_process_hands_out_the_same_ids():
    root = pathlib.Path(__file__).parent.parent
    runs = [
        subprocess.run(
            [sys.executable, "-c", REPLAY],
            cwd=root,
            env={"PYTHONPATH": str(root), "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1234")
    ]
    assert runs[0] == runs[1] != ""


def test_fingerprints_tell_states_and_geometries_apart():
    seen = {f1().fingerprint(), f4().fingerprint(), d4().fingerprint()}
    seen |= {PagedTokenToKVPoolAllocator(32, 2).fingerprint(), PagedTokenToKVPoolAllocator(8, 1).fingerprint()}
    allocator = f4()
    slots = allocator.alloc(8)
    seen.add(allocator.fingerprint())
    allocator.free_group_begin()
    seen.add(allocator.fingerprint())
    allocator.free(slots[:4])
    seen.add(allocator.fingerprint())
    allocator.free_group_end()
    seen.add(allocator.fingerprint())
    allocator.claim(slots[4:])
    seen.add(allocator.fingerprint())
    assert len(seen) == 9  # F1 and a paged pool of 8 single ids are one geometry
    allocator.unclaim(slots[4:])
    allocator.free(slots[4:])
    other = f4()
    slots = other.alloc(8)
    other.free(slots[4:])  # given back in another order: the same from here on
    other.free(slots[:4])
    assert allocator.fingerprint() == other.fingerprint()


def test_an_operation_touches_no_memory_of_the_pools_size():
    peaks = {}
    for pages in (10_000, 1_000_000):
        allocator = PagedTokenToKVPoolAllocator(pages * 4, 4)
        tokens = np.full(256, 5)
        tracemalloc.start()
        slots = allocator.alloc_extend(tokens * 0, tokens, tokens)
        allocator.free(allocator.alloc_decode(tokens - 4, tokens))
        allocator.free(slots)
        slots = allocator.alloc(1024)
        allocator.claim(slots)
        allocator.unclaim(slots)
        allocator.free(slots)
        peaks[pages] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[1_000_000] < 1.1 * peaks[10_000] < 300_000
