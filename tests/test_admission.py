"""Which requests the pool takes, and what their next step needs, against the allocator that then serves it."""

from typing import Any

import numpy as np
import pytest

from jkv.admission import Admission
from jkv.allocator import PagedTokenToKVPoolAllocator
from jkv.slots import SlotSpace, pad_slots
from tests.small_pools import mha, mla, on, write

# Fixture D4: 2 pages of 4 tokens a rank on 4 ranks, so 32 ids in pages of 16.
D4 = SlotSpace(8, 4, 4)
PER_RANK, CONTEXT = 690_240, 1_048_576


def allocator_of(slots: SlotSpace) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(slots.size, slots.page_size, slots.dcp_size)


# How long a request may be


@pytest.mark.parametrize(
    ("dcp_size", "capacity", "longest"), [(1, 690_240, 690_239), (2, 1_380_480, 1_048_575), (8, 5_521_920, 1_048_575)]
)
@pytest.mark.parametrize("page_size", [1, 64])
def test_a_request_is_bound_by_the_aggregate_pool_counted_once(
    dcp_size: int, capacity: int, longest: int, page_size: int
):
    slots = SlotSpace(PER_RANK, page_size, dcp_size)
    admission = Admission(slots, CONTEXT)
    assert slots.capacity == capacity
    assert admission.max_request_len == longest
    assert admission.max_new_tokens(longest) == 1  # admitted, and never with nothing to generate
    assert admission.max_new_tokens(1000) == longest + 1 - 1000
    assert admission.max_new_tokens(0) == longest + 1


def test_a_context_longer_than_the_pool_is_cut_to_the_whole_pool_not_to_a_ranks_share():
    admission = Admission(SlotSpace(65_536, 64, 8), 10_000_000)
    assert admission.max_request_len == 524_287
    assert admission.max_new_tokens(400_000) == 124_288  # more than six ranks' shares of prompt, and room left
    assert admission.max_new_tokens(65_536) == 458_752


def test_a_request_longer_than_a_ranks_share_is_admitted_and_served():
    admission, allocator = Admission(D4, 64), allocator_of(D4)
    assert admission.max_request_len == 31
    assert admission.can_admit(20, allocator.available_size())
    assert admission.can_admit(31, 32)
    assert allocator.alloc_extend([0], [31 + admission.max_new_tokens(31)], [-1]) is not None
    assert allocator.available_size() == 0


@pytest.mark.parametrize("prompt_len", [32, 33, 10**12])
def test_a_prompt_that_can_never_fit_is_an_error_that_names_all_numbers(prompt_len: int):
    admission = Admission(D4, 64)
    message = (
        rf"prompt_len {prompt_len} passes max_request_len 31 = 32 = min\(context_len 64, size 8 \* dcp_size 4\) - 1"
    )
    with pytest.raises(ValueError, match="max_new_tokens: " + message):
        admission.max_new_tokens(prompt_len)
    with pytest.raises(ValueError, match="can_admit: " + message):
        admission.can_admit(prompt_len, 1_000_000)


# What a step takes


@pytest.mark.parametrize(("seq_lens", "pages"), [([63, 64], 0), ([64, 65], 1), ([1, 1, 1], 3), ([], 0), ([129], 1)])
def test_a_decode_step_takes_a_page_where_the_new_token_starts_one(seq_lens: list[int], pages: int):
    assert Admission(SlotSpace(1024, 64), 1024).decode_pages_needed(seq_lens) == pages
    assert Admission(SlotSpace(256, 16, 4), 1024).decode_pages_needed(np.array(seq_lens, np.int32)) == pages


def test_small_requests_take_whole_pages_of_all_ranks():
    admission = Admission(D4, 64)
    assert admission.extend_pages_needed([0, 0, 0], [1, 1, 1]) == 3
    assert admission.shortfall(3, allocator_of(D4).available_size()) == 16  # 48 of 32 ids
    # Two requests of two tokens and one free page of 128: the second waits.
    admission, allocator = Admission(SlotSpace(128, 128), 64), allocator_of(SlotSpace(128, 128))
    assert admission.can_admit(2, allocator.available_size())
    assert allocator.alloc_extend([0], [2], [-1]) is not None
    assert not admission.can_admit(2, allocator.available_size())


@pytest.mark.parametrize(
    ("prompt_len", "cached_len", "pages"), [(15, 0, 1), (16, 0, 2), (31, 0, 2), (31, 16, 1), (16, 16, 1), (0, 0, 1)]
)
def test_admission_counts_the_first_new_token_and_not_the_cached_prefix(prompt_len: int, cached_len: int, pages: int):
    admission = Admission(D4, 64)
    for available in range(49):
        fits = available // 16 >= pages
        assert admission.can_admit(prompt_len, available, cached_len) == fits
        assert admission.can_admit(np.int64(prompt_len), np.int32(available), cached_len=np.int64(cached_len)) == fits


@pytest.mark.parametrize(
    ("pages", "available", "missing"), [(0, 0, 0), (1, 16, 0), (1, 15, 16), (3, 16, 32), (2, 31, 16), (2, 100, 0)]
)
def test_the_shortfall_is_in_ids_and_a_part_of_a_page_is_no_page(pages: int, available: int, missing: int):
    assert Admission(D4, 64).shortfall(pages, available) == missing


@pytest.mark.parametrize(("page_size", "dcp_size"), [(1, 1), (4, 1), (1, 4), (4, 4), (3, 2)])
def test_what_was_asked_is_what_the_allocator_takes(page_size: int, dcp_size: int):
    rng = np.random.default_rng(page_size * 10 + dcp_size)
    slots = SlotSpace(26 * page_size, page_size, dcp_size)
    admission, page = Admission(slots, 10_000), slots.alloc_page_size
    outcomes = set()
    for _ in range(60):
        allocator = allocator_of(slots)
        prefix = rng.integers(0, 4 * page, 5)
        last = np.array([allocator.alloc_extend([0], [n], [-1])[-1] if n else -1 for n in prefix])
        seq = prefix + rng.integers(0, 6 * page, 5)
        for grow, arguments, needed in [
            (allocator.alloc_decode, (prefix + 1, last), admission.decode_pages_needed(prefix + 1)),
            (allocator.alloc_extend, (prefix, seq, last), admission.extend_pages_needed(prefix, seq)),
        ]:
            before, state = allocator.available_size(), allocator.backup_state()
            missing = admission.shortfall(needed, before)
            got = grow(*arguments)
            outcomes.add(got is None)
            assert (got is None) == (missing > 0)
            assert before - allocator.available_size() == (0 if missing else needed * page)
            allocator.restore_state(state)
            if missing:  # and it is exactly what was missing: a page less would not do
                assert needed * page - missing == before
    assert outcomes == {True, False}


# Retraction


@pytest.mark.parametrize(("make", "dcp_size"), [(mha, 1), (mla, 4)])
def test_a_retracted_request_resumes_with_the_same_bits_at_other_slots(make: Any, dcp_size: int):
    slots = SlotSpace(12, 2, dcp_size)
    pool = make(slots.size, slots.page_size, **(on(dcp_size) if dcp_size > 1 else {}))
    admission, allocator, page = Admission(slots, 1000), allocator_of(slots), slots.alloc_page_size

    def pages_missing(lens: list[int]) -> int:
        return admission.shortfall(admission.decode_pages_needed(lens), allocator.available_size()) // page

    def padded(loc: np.ndarray) -> np.ndarray:  # one shape, one compilation
        return pad_slots(loc, 3 * page)

    lens = [2 * page, 3 * page - 1]  # five of six pages
    first, second = (allocator.alloc_extend([0], [n], [-1]) for n in lens)
    pool = write(write(pool, padded(first), start=1.0), padded(second), start=50.0)
    assert pages_missing([n + 1 for n in lens]) == 0
    step = allocator.alloc_decode([n + 1 for n in lens], [first[-1], second[-1]])
    pool = write(pool, padded(step), start=90.0)
    second, lens = np.append(second, step[1]), [n + 1 for n in lens]
    before = [np.array(part) for part in pool.get_kv(0, second)]
    assert len(np.unique(before[0])) > 10

    assert pages_missing([n + 1 for n in lens]) == 1  # known before the step runs, and not in the middle of it
    host = pool.get_cpu_copy(second)
    allocator.free(second)
    assert pages_missing([lens[0] + 1]) == 0
    other = allocator.alloc(3 * page)  # somebody else's by now, and overwritten
    assert set(other) == set(second)
    pool = write(pool, other, start=20.0)
    allocator.free(np.append(first, step[0]))

    assert admission.can_admit(lens[1] - 1, allocator.available_size())
    again = allocator.alloc_extend([0], lens[1:], [-1])
    assert not set(again) & set(second)
    pool = pool.load_cpu_copy(host, again)
    for got, expected in zip(pool.get_kv(0, again), before, strict=True):
        np.testing.assert_array_equal(got, expected)


# Bad input


@pytest.mark.parametrize("context_len", [0, -1, 1.5, True, None])
def test_a_context_that_is_no_positive_integer_is_refused(context_len: Any):
    with pytest.raises(ValueError, match=r"Admission: context_len must be (at least 1|an integer), got"):
        Admission(D4, context_len)


def test_slots_that_are_no_slot_space_are_refused():
    with pytest.raises(ValueError, match="Admission: slots must be a SlotSpace, got int"):
        Admission(8192, 64)


def test_a_step_beyond_the_longest_request_is_refused():
    admission = Admission(D4, 30)
    limit = r"30 = min\(context_len 30, size 8 \* dcp_size 4\)"
    assert admission.decode_pages_needed([30]) == 0
    with pytest.raises(ValueError, match=rf"decode_pages_needed: seq_lens of requests 1 .* in \[1, {limit}\], got 31"):
        admission.decode_pages_needed([30, 31])
    with pytest.raises(ValueError, match=r"decode_pages_needed: seq_lens of requests 0 must .* got 0"):
        admission.decode_pages_needed([0])
    assert admission.extend_pages_needed([0], [30]) == 2
    with pytest.raises(ValueError, match=rf"extend_pages_needed: requests 1: .* <= {limit}, got .* seq_lens 31"):
        admission.extend_pages_needed([0, 30], [30, 31])
    for prefix, seq in ([-1], [3]), ([4], [3]):
        with pytest.raises(ValueError, match="extend_pages_needed: requests 0: expected 0 <= prefix_lens <= seq_lens"):
            admission.extend_pages_needed(prefix, seq)


def test_lengths_that_are_no_batch_of_integers_are_refused():
    admission = Admission(D4, 64)
    with pytest.raises(TypeError, match="decode_pages_needed: seq_lens must hold signed integers"):
        admission.decode_pages_needed([1.0])
    with pytest.raises(ValueError, match=r"decode_pages_needed: seq_lens must have shape \[n\]"):
        admission.decode_pages_needed([[1]])
    with pytest.raises(ValueError, match="extend_pages_needed: seq_lens must have length 2, got 1"):
        admission.extend_pages_needed([0, 0], [1])
    with pytest.raises(TypeError, match="extend_pages_needed: prefix_lens must hold signed integers"):
        admission.extend_pages_needed(np.zeros(1, np.uint32), [1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.max_new_tokens(-1), "max_new_tokens: prompt_len must be at least 0, got -1"),
        (lambda a: a.max_new_tokens(2.0), "max_new_tokens: prompt_len must be an integer, got 2.0"),
        (lambda a: a.can_admit(-1, 5), "can_admit: prompt_len must be at least 0, got -1"),
        (lambda a: a.can_admit(20, 5, -16), "can_admit: cached_len must be at least 0, got -16"),
        (lambda a: a.can_admit(20, 5, 4), "cached_len must be whole pages of 16 = page_size 4 .* dcp_size 4 .*, got 4"),
        (lambda a: a.can_admit(20, 5, 32), "can_admit: cached_len must be .* within prompt_len 20, got 32"),
        (lambda a: a.can_admit(20, -5), "shortfall: available must be at least 0, got -5"),
        (lambda a: a.shortfall(-1, 5), "shortfall: pages must be at least 0, got -1"),
        (lambda a: a.shortfall(1, None), "shortfall: available must be an integer, got None"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(call: Any, message: str):
    with pytest.raises(ValueError, match=message):
        call(Admission(D4, 64))


def test_its_repr_says_what_bounds_it():
    assert repr(Admission(D4, 64)) == f"Admission({D4}, context_len=64)"
