"""Prefix reuse: what matches, whose pages are whose, what goes first, what stays while it is read.

Fixtures: F1 has 8 single slots, F4 16 pages of 4, D4 2 pages of 4 tokens a rank on 4 ranks (ids 16 to 47).
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest

from jkv.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from jkv.radix_cache import Match, RadixCache
from jkv.radix_events import PagesRemoved, PagesStored, page_hashes


def f1() -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(8)


def f4() -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(64, 4)


def d4() -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(8, 4, dcp_size=4)


def fill(cache: RadixCache, tokens: Any, extra_key: Hashable = None) -> list[int]:
    """Inserts `tokens` as a request would that found nothing: the slots that it allocated, the tail freed again."""
    allocator, page = cache.allocator, cache.alloc_page_size
    slots = allocator.alloc(-(-len(tokens) // page) * page)
    assert slots is not None
    cache.insert(tokens, slots[: len(tokens)], extra_key)
    allocator.free(slots[len(tokens) // page * page :])
    return slots.tolist()


def matched(cache: RadixCache, tokens: Any, extra_key: Hashable = None) -> list[int]:
    slots = cache.match_prefix(tokens, extra_key).slots
    assert slots.dtype == np.int32
    assert slots.ndim == 1
    return slots.tolist()


def sizes(cache: RadixCache) -> tuple[int, int, int]:
    return cache.total_size, cache.evictable_size, cache.protected_size


def range_(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


A, B, C = ([x] * 4 for x in (1, 2, 3))  # a page of tokens each

# Matching


def test_a_match_is_the_longest_cached_prefix_in_whole_pages():
    cache = RadixCache(f4())
    slots = fill(cache, A + B + C)
    assert matched(cache, A + B + C) == slots
    assert matched(cache, A + B + C + A) == slots
    for tokens, n in [
        (A + B + C[:3], 8),
        (A + B + [3, 3, 3, 9], 8),
        (A + [2, 2, 2], 4),
        (A + C, 4),
        (A[:3], 0),
        ([], 0),
    ]:
        assert matched(cache, tokens) == slots[:n]
        assert matched(cache, np.array(tokens, np.int16)) == slots[:n]
    assert matched(cache, B + C) == []
    assert sizes(cache) == (12, 12, 0)


def test_pages_that_part_in_their_last_token_are_different_pages():
    cache = RadixCache(f4())
    slots = fill(cache, A + B + C)
    assert cache.insert(A + B + [3, 3, 3, 9], slots[:8] + cache.allocator.alloc(4).tolist()) == 8
    assert matched(cache, A + B + [3, 3, 3, 9]) == [*slots[:8], 16, 17, 18, 19]
    assert matched(cache, A + B + C) == slots


def test_a_page_of_the_cache_is_a_page_on_every_rank():
    cache = RadixCache(d4())
    assert cache.alloc_page_size == 16
    slots = fill(cache, list(range(31)))  # 15 of them on the partial page that stays with the caller
    assert slots[:16] == list(range(16, 32))
    assert matched(cache, list(range(31))) == list(range(16, 32))
    assert matched(cache, list(range(15))) == []
    assert sizes(cache) == (16, 16, 0)


def test_single_slots_match_token_by_token():
    cache = RadixCache(f1())
    assert fill(cache, [5, 6, 7, 8, 9]) == [1, 2, 3, 4, 5]
    assert matched(cache, [5, 6, 7, 1]) == [1, 2, 3]
    assert cache.insert([5, 6, 7, 1], [1, 2, 3, *cache.allocator.alloc(1)]) == 3
    assert matched(cache, [5, 6, 7, 1, 5]) == [1, 2, 3, 6]
    assert matched(cache, [5, 6, 7, 8, 9]) == [1, 2, 3, 4, 5]
    assert sizes(cache) == (6, 6, 0)


def test_every_prefix_of_sequences_that_part_at_every_page_is_found():
    rng = np.random.default_rng(0)
    cache = RadixCache(PagedTokenToKVPoolAllocator(4 * 4000, 4))
    sequences = [np.repeat(rng.integers(0, 2, rng.integers(1, 9)), 4) for _ in range(200)]
    held: dict[bytes, int] = {}  # the sequence up to a page's end -> that page's first slot
    for tokens in sequences:
        fill(cache, tokens)
        slots = matched(cache, tokens)
        assert len(slots) == len(tokens)
        for i in range(0, len(tokens), 4):
            assert held.setdefault(tokens[: i + 4].tobytes(), slots[i]) == slots[i]
            assert slots[i : i + 4] == list(range(slots[i], slots[i] + 4))
    assert len(set(held.values())) == len(held) == cache.total_size // 4
    assert cache.allocator.available_size() == 4 * 4000 - cache.total_size


@pytest.mark.parametrize("tokens", [[-1, -(2**40), 2**62, 0], [2**31, 2**32 + 1, 1, 1]])
def test_any_int64_is_a_token(tokens: list[int]):
    cache = RadixCache(f4())
    slots = fill(cache, tokens)
    assert matched(cache, tokens) == slots
    assert matched(cache, [np.int64(t).astype(np.int32).item() for t in tokens]) == []


def test_extra_keys_separate_trees():
    cache = RadixCache(f4())
    slots = {key: fill(cache, A + B, key) for key in (None, "lora", ("tenant", 7))}
    assert len({slot for mine in slots.values() for slot in mine}) == 24
    for key, mine in slots.items():
        assert matched(cache, A + B, key) == mine
    assert matched(cache, A + B, "other") == []
    assert matched(cache, A + B, extra_key="lora") == slots["lora"]


def test_a_match_is_the_callers_own_memory_and_an_insertion_keeps_a_copy():
    cache = RadixCache(f4())
    tokens, slots = np.array(A + B), cache.allocator.alloc(8)
    cache.insert(tokens, slots)
    tokens[:], slots[:] = 0, 0
    match = cache.match_prefix(A + B)
    match.slots[:] = 0
    assert matched(cache, A + B) == list(range(4, 12))


def test_a_small_part_does_not_keep_a_long_array_alive():
    cache = RadixCache(f4())
    fill(cache, A + B + C)
    node = cache.match_prefix(A).node
    for end in node, cache.match_prefix(A + B + C).node:
        assert end.tokens.base is None
        assert end.slots.base is None


# Whose pages are whose


def test_an_insertion_takes_whole_pages_over_and_leaves_the_partial_one():
    cache = RadixCache(f4())
    allocator = cache.allocator
    slots = allocator.alloc_extend([0], [10], [-1])
    assert cache.insert(range_(10), slots) == 0
    assert cache.total_size == 8
    assert allocator.available_size() == 64 - 12
    allocator.free(slots[8:])  # the caller's still
    assert allocator.available_size() == 64 - 8
    assert cache.insert(range_(3), [4, 5, 6]) == 0  # no whole page: nothing to take over
    assert cache.insert([], []) == 0
    assert cache.total_size == 8


def test_duplicate_pages_are_freed_and_the_caller_matches_again_for_the_caches_slots():
    cache = RadixCache(f4())
    allocator = cache.allocator
    first, second = (allocator.alloc_extend([0], [12], [-1]) for _ in range(2))  # two requests, the same prompt
    assert cache.insert(A + B + C, first) == 0
    assert allocator.available_size() == 64 - 24
    assert cache.insert(A + B + C, second) == 12
    assert allocator.available_size() == 64 - 12  # the second one's pages are free again
    assert matched(cache, A + B + C) == first.tolist()
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(second)


def test_the_very_same_slots_are_kept():
    cache = RadixCache(f4())
    allocator = cache.allocator
    fill(cache, A + B)
    shared = cache.match_prefix(A + B).slots
    own = allocator.alloc(8)
    # Another request has been faster with the third page.
    other = allocator.alloc(4)
    assert cache.insert(A + B + C, np.concatenate([shared, other])) == 8
    assert cache.insert(A + B + C + A, np.concatenate([shared, own])) == 12
    assert matched(cache, A + B + C + A) == [*shared, *other, *own[4:]]
    assert allocator.available_size() == 64 - 16
    assert cache.insert(A + B + C + A, [*shared, *other, *own[4:]]) == 16  # all its own: nothing to free
    assert allocator.available_size() == 64 - 16


def test_rejected_draft_tokens_give_their_pages_back():
    cache = RadixCache(f4())
    allocator = cache.allocator
    for committed, cached in [(3, 0), (5, 4), (8, 8)]:
        slots = allocator.alloc_extend([0], [16], [-1])  # a draft of 16, of which `committed` were accepted
        tokens = range_(committed) + 100 * committed
        assert cache.insert(tokens, slots[:committed]) == 0
        allocator.free(slots[committed // 4 * 4 :])
        assert cache.total_size == cached
        assert allocator.available_size() + cache.total_size == 64
        cache.reset()


def test_the_caches_pages_are_not_a_requests_to_free():
    for make in f1, f4, d4:
        cache = RadixCache(make())
        allocator, page = cache.allocator, cache.alloc_page_size
        tokens = range_(2 * page)
        slots = fill(cache, tokens)
        before = allocator.fingerprint(), sizes(cache)
        with pytest.raises(
            ValueError, match=rf"free .*: loc holds {slots[0]}.* \(a prefix cache holds them: its evict"
        ):
            allocator.free(slots)
        assert (allocator.fingerprint(), sizes(cache)) == before
        other = allocator.alloc(allocator.available_size())
        assert not np.isin(cache.match_prefix(tokens).slots, other).any()
        assert matched(cache, tokens) == slots
        assert cache.evict(2 * page) == 2 * page
        assert allocator.in_use(other).all()
        assert allocator.available_size() == 2 * page


def test_a_fork_does_not_fill_up_a_page_of_the_cache():
    cache = RadixCache(f4())
    allocator = cache.allocator
    slots = allocator.alloc_extend([0], [8], [-1])
    cache.insert(A + B, slots)
    with pytest.raises(ValueError, match="last_loc of requests 0: 9 lie on pages that a prefix cache holds"):
        allocator.alloc_extend([6], [7], slots[5:6])  # the first six tokens, then another
    own = allocator.alloc_extend([4], [7], slots[3:4])  # the whole page is read, the other one copied
    assert own.tolist() == [12, 13, 14]
    assert matched(cache, A + B) == slots.tolist()


def test_two_caches_on_one_allocator_keep_to_their_own_pages():
    allocator = f4()
    one, two = RadixCache(allocator), RadixCache(allocator)
    slots = {cache: fill(cache, A + B) for cache in (one, two)}
    assert slots[one] != slots[two]
    for mine, other in (one, two), (two, one):
        before = allocator.fingerprint(), sizes(one), sizes(two)
        for tokens in A + B, C + B:  # known, and unknown
            with pytest.raises(ValueError, match=rf"this one .* or another one, starting at ids {slots[other][0]}, "):
                mine.insert(tokens, slots[other])
        assert (allocator.fingerprint(), sizes(one), sizes(two)) == before
    allocator.alloc(64 - 16)
    assert one.evict(64) == 8
    assert allocator.in_use(slots[two]).all()
    assert fill(two, C + B) == slots[one]  # what one cache gave up, the other may have
    one.reset()
    assert (sizes(one), sizes(two)) == ((0, 0, 0), (16, 16, 0))
    assert (matched(two, A + B), matched(two, C + B)) == (slots[two], slots[one])
    two.reset()
    assert allocator.available_size() == 16
    assert not allocator.claimed(range_(68)).any()


@pytest.mark.parametrize(
    "change",
    [lambda c: fill(c, B), lambda c: c.evict(1), lambda c: c.reset(), lambda c: (fill(c, B), c.evict(5))],
    ids=["insert", "evict", "reset", "there and back"],
)
def test_the_allocator_is_not_taken_back_behind_the_cache(change: Callable[[RadixCache], Any]):
    cache = RadixCache(f4())
    allocator = cache.allocator
    fill(cache, A)
    state = allocator.backup_state()
    allocator.alloc(8)
    matched(cache, A)
    node = cache.match_prefix(A).node
    cache.inc_lock_ref(node)
    cache.dec_lock_ref(node)
    assert cache.evict(0) == 0
    allocator.restore_state(state)  # nothing of the cache's pages has changed
    assert allocator.available_size() == 60
    change(cache)
    before = allocator.fingerprint(), sizes(cache)
    with pytest.raises(ValueError, match=r"restore_state .*: a prefix cache took over or freed pages since the state"):
        allocator.restore_state(state)
    assert (allocator.fingerprint(), sizes(cache)) == before


def test_a_cache_is_reset_before_its_allocator_is_cleared():
    cache = RadixCache(f4())
    slots = fill(cache, A + B)
    with pytest.raises(
        ValueError, match=r"clear .*: a prefix cache holds 2 pages, starting at ids 4, 8: reset it first"
    ):
        cache.allocator.clear()
    assert matched(cache, A + B) == slots
    cache.reset()
    cache.allocator.clear()
    assert fill(cache, B) == slots[:4]


# Locks


@pytest.mark.parametrize(("make", "protected"), [(f1, 3), (f4, 0)])
def test_a_partial_match_locks_no_more_than_what_matched(make: Callable[[], Any], protected: int):
    cache = RadixCache(make())
    fill(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    match = cache.match_prefix([1, 2, 3])
    cache.inc_lock_ref(match.node)
    assert sizes(cache) == (8, 8 - protected, protected)
    assert cache.evict(100) == 8 - protected
    assert sizes(cache) == (protected, 0, protected)
    cache.dec_lock_ref(match.node)
    assert sizes(cache) == (protected, protected, 0)


def test_a_locked_path_is_never_evicted_and_locks_count():
    cache = RadixCache(f4())
    fill(cache, A + B)
    fill(cache, A + C)
    node = cache.match_prefix(A + B).node
    cache.inc_lock_ref(node)
    cache.inc_lock_ref(node)
    assert sizes(cache) == (12, 4, 8)
    assert cache.evict(100) == 4
    cache.dec_lock_ref(node)
    assert cache.evict(100) == 0
    assert matched(cache, A + B) != []
    cache.dec_lock_ref(node)
    assert sizes(cache) == (8, 8, 0)
    cache.inc_lock_ref(node)  # without a match in between
    assert cache.evict(100) == 0
    cache.dec_lock_ref(node)
    assert cache.evict(100) == 8
    assert cache.allocator.available_size() == 64


def test_a_split_copies_the_locks_to_both_halves_and_the_old_handle_unlocks_both():
    cache = RadixCache(f4())
    fill(cache, A + B + C)
    node = cache.match_prefix(A + B + C).node
    cache.inc_lock_ref(node)
    front = cache.match_prefix(A).node  # splits the locked node
    assert (front.lock_ref, node.lock_ref) == (1, 1)
    assert sizes(cache) == (12, 0, 12)
    cache.inc_lock_ref(front)
    fill(cache, A + C)  # and an insertion may split it again
    fill(cache, A + B + A)
    assert sizes(cache) == (20, 8, 12)
    cache.dec_lock_ref(node)
    assert sizes(cache) == (20, 16, 4)
    cache.dec_lock_ref(front)
    assert sizes(cache) == (20, 20, 0)


def test_an_unlock_without_a_lock_is_refused():
    cache = RadixCache(f4())
    fill(cache, A + B)
    root, inner, leaf = (cache.match_prefix(tokens).node for tokens in ([], A, A + B))
    cache.inc_lock_ref(leaf)
    for node in root, inner:  # a lock further down, or none at all, is not theirs
        with pytest.raises(ValueError, match=r"dec_lock_ref \(RadixCache\): Node\(\d tokens, .* unlock without a lock"):
            cache.dec_lock_ref(node)
    assert sizes(cache) == (8, 0, 8)
    cache.dec_lock_ref(leaf)
    with pytest.raises(ValueError, match=r"Node\(4 tokens, lock_ref 0\) is not locked itself"):
        cache.dec_lock_ref(leaf)
    assert sizes(cache) == (8, 8, 0)


def test_an_empty_match_can_be_locked_and_unlocked_too():
    cache = RadixCache(f4())
    node = cache.match_prefix(A).node
    cache.inc_lock_ref(node)
    fill(cache, A)
    assert sizes(cache) == (4, 4, 0)
    cache.reset()
    cache.dec_lock_ref(node)
    with pytest.raises(ValueError, match="unlock without a lock"):
        cache.dec_lock_ref(node)


def test_nodes_that_are_not_in_the_cache_are_refused():
    cache, other = RadixCache(f4()), RadixCache(f4())
    fill(cache, A + B)
    fill(other, A + B)
    evicted = cache.match_prefix(A + B).node
    inner = cache.match_prefix(A).node
    cache.evict(4)
    foreign, root = other.match_prefix(A).node, other.match_prefix([]).node
    for node in evicted, foreign, root, None, cache.match_prefix(A):
        for change in cache.inc_lock_ref, cache.dec_lock_ref:
            with pytest.raises(
                ValueError, match=r"c_lock_ref \(RadixCache\): node must be a node that is in this cache"
            ):
                change(node)
    cache.inc_lock_ref(inner)
    cache.dec_lock_ref(inner)
    cache.reset()
    with pytest.raises(ValueError, match=r"inc_lock_ref .* in this cache, got Node"):
        cache.inc_lock_ref(inner)
    assert sizes(cache) == (0, 0, 0)
    assert sizes(other) == (8, 8, 0)


# Eviction


def test_the_least_recently_used_leaf_goes_first_and_whole():
    cache = RadixCache(f4())
    fill(cache, A + A)
    fill(cache, B + B + B)
    fill(cache, C)
    matched(cache, A + A)  # used again: B is the oldest now
    assert cache.evict(0) == 0
    assert cache.evict(1) == 12
    assert matched(cache, B) == []
    fill(cache, C)  # an insertion is a use too
    assert cache.evict(4) == 8
    assert matched(cache, A) == []
    assert len(matched(cache, C)) == 4
    assert cache.allocator.available_size() == 64 - 4


def test_what_has_just_been_inserted_is_younger_than_any_earlier_use():
    cache = RadixCache(f4())
    fill(cache, A)
    matched(cache, A)
    fill(cache, B)
    assert cache.evict(1) == 4
    assert (matched(cache, A), matched(cache, B)) == ([], [8, 9, 10, 11])


def test_a_parent_goes_after_its_children_in_the_order_of_use():
    cache = RadixCache(f4())
    fill(cache, A + B)
    fill(cache, A + C)  # A is used with it
    fill(cache, B)
    assert [cache.evict(1) for _ in range(5)] == [4, 4, 4, 4, 0]
    cache = RadixCache(f4(), enable_events=True)
    for tokens in A + B, B, A + C:
        fill(cache, tokens)
    assert cache.evict(1000) == 16
    removed = [event.page_hashes for event in cache.take_events() if isinstance(event, PagesRemoved)]
    expected = [page_hashes(A + B, 4)[1:], page_hashes(B, 4), page_hashes(A + C, 4)[1:], page_hashes(A, 4)]
    assert [r.tolist() for r in removed] == [e.tolist() for e in expected]


def test_an_eviction_frees_at_least_what_was_asked_or_all_that_may_go():
    cache = RadixCache(f4())
    for token in range(8):
        fill(cache, [token] * 8)
    assert cache.allocator.available_size() == 0
    assert cache.evict(17) == 24
    assert cache.allocator.available_size() == 24
    assert cache.evict(10**9) == 40
    assert cache.evict(1) == 0
    assert sizes(cache) == (0, 0, 0)


def test_inside_a_free_group_evicted_pages_wait_for_its_end():
    cache = RadixCache(f4())
    allocator = cache.allocator
    fill(cache, A + B)
    allocator.free_group_begin()
    assert cache.evict(8) == 8
    assert (cache.total_size, allocator.available_size()) == (0, 56)
    allocator.free_group_end()
    assert allocator.available_size() == 64


def test_many_uses_leave_one_entry_a_node_to_evict_by():
    cache = RadixCache(f4())
    for token in range(4):
        fill(cache, [token] * 4)
    for turn in range(1000):
        matched(cache, [turn % 4] * 4)
    assert len(cache._queue._heap) == 4
    assert [cache.evict(1) for _ in range(5)] == [4, 4, 4, 4, 0]
    assert len(cache._queue._heap) == 0


def test_a_reset_frees_everything():
    cache = RadixCache(f4())
    fill(cache, A + B)
    fill(cache, A + C, "other")
    node = cache.match_prefix(A + B).node
    cache.inc_lock_ref(node)
    state = cache.allocator.fingerprint()
    with pytest.raises(ValueError, match=r"reset \(RadixCache\): 8 of 16 tokens are locked; unlock first"):
        cache.reset()
    assert sizes(cache) == (16, 8, 8)
    assert cache.allocator.fingerprint() == state
    cache.dec_lock_ref(node)
    cache.reset()
    assert sizes(cache) == (0, 0, 0)
    assert cache.allocator.available_size() == 64
    assert matched(cache, A + B) == []
    assert cache.evict(1) == 0
    cache.reset()
    assert len(fill(cache, A)) == 4
    assert cache.evict(4) == 4


# Events


def replay(held: set[tuple[Hashable, int]], cache: RadixCache) -> set[tuple[Hashable, int]]:
    """A router's view: the pages that are cached, by extra key and hash."""
    for event in cache.take_events():
        pages = {(event.extra_key, int(h)) for h in event.page_hashes}
        if isinstance(event, PagesStored):
            assert event.parent_hash is None or (event.extra_key, event.parent_hash) in held
            assert not pages & held
            assert page_hashes(event.token_ids, cache.alloc_page_size, event.parent_hash).tolist() == list(
                event.page_hashes
            )
            held |= pages
        else:
            assert pages <= held
            held -= pages
    return held


def test_a_router_knows_from_the_events_what_is_cached():
    cache = RadixCache(f4(), enable_events=True)
    held: set[tuple[Hashable, int]] = set()

    def known(tokens: list[int], key: Hashable = None) -> int:
        hashes = [(key, int(h)) in held for h in page_hashes(tokens, 4)]
        return (hashes + [False]).index(False) * 4

    fill(cache, A + B + C)
    held = replay(held, cache)
    assert known(A + B + C + A) == 12
    fill(cache, A + C, "lora")
    fill(cache, A + B + A)  # splits the first
    held = replay(held, cache)
    assert (known(A + B + A), known(A + B + C), known(A + B), known(A + C), known(A + C, "lora")) == (12, 12, 8, 4, 8)
    cache.insert(A + B + C, cache.allocator.alloc(12))  # duplicates are no news
    assert cache.take_events() == []
    for _ in range(3):
        cache.evict(1)
        held = replay(held, cache)
        assert len(held) * 4 == cache.total_size
        for tokens, key in [(A + B + C, None), (A + B + A, None), (A + C, "lora")]:
            assert known(tokens, key) == len(matched(cache, tokens, key))
    fill(cache, C + B + A)
    cache.reset()
    assert replay(held, cache) == set()


def test_a_stored_event_says_what_was_stored_and_keeps_it():
    cache = RadixCache(f4(), enable_events=True)
    tokens = np.array(A + B + C[:2])
    cache.insert(tokens[:4], cache.allocator.alloc(4))
    slots = np.concatenate([cache.match_prefix(tokens).slots, cache.allocator.alloc(8)])
    cache.insert(tokens, slots[: len(tokens)], None)
    tokens[:] = 0
    first, second = cache.take_events()
    assert isinstance(first, PagesStored)
    assert isinstance(second, PagesStored)
    hashes = page_hashes(A + B, 4)
    assert (first.extra_key, first.parent_hash, first.page_hashes.tolist()) == (None, None, hashes[:1].tolist())
    assert (second.extra_key, second.parent_hash, second.page_hashes.tolist()) == (None, hashes[0], hashes[1:].tolist())
    assert second.token_ids.tolist() == B
    second.token_ids[:] = 5  # the receiver's own
    assert len(matched(cache, A + B)) == 8
    assert cache.take_events() == []


def test_page_hashes_chain_and_are_the_same_everywhere():
    expected, previous = [], b""
    for page in A, B:
        previous = hashlib.blake2b(previous + b"".join(t.to_bytes(8, "little") for t in page), digest_size=8).digest()
        expected.append(int.from_bytes(previous, "little"))
    hashes = page_hashes(np.array(A + B + C[:3], np.int32), 4)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == expected
    assert page_hashes(B, 4, expected[0]).tolist() == expected[1:]
    assert page_hashes(A[:3], 4).tolist() == []
    assert page_hashes([], 4).shape == (0,)


def test_page_hashes_refuses_what_it_cannot_hash():
    with pytest.raises(TypeError, match="page_hashes: token_ids must hold signed integers"):
        page_hashes([1.0], 4)
    with pytest.raises(ValueError, match="page_hashes: page_size must be at least 1, got 0"):
        page_hashes(A, 0)
    with pytest.raises(ValueError, match="page_hashes: parent_hash must be at least 0, got -1"):
        page_hashes(A, 4, -1)
    with pytest.raises(ValueError, match="page_hashes: parent_hash must be at most 18446744073709551615, got"):
        page_hashes(A, 4, 2**64)


def test_events_are_taken_only_where_they_are_noted():
    with pytest.raises(ValueError, match=r"take_events \(RadixCache\): the cache was made without enable_events=True"):
        RadixCache(f4()).take_events()


# Refusals


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([20, 21, 22, 23, 24, 25, 26], "slots must have length 8, got 7"),
        ([21, 22, 23, 24, 28, 29, 30, 31], "whole pages of 4 .* at positions 0, which start with ids 21"),
        ([20, 21, 22, 23, 28, 29, 31, 30], "whole pages of 4 .* at positions 4, which start with ids 28"),
        ([20, 20, 20, 20, 28, 28, 28, 28], "whole pages of 4 .* at positions 0, 4, which start with ids 20, 28"),
        ([20, 21, 22, 23, 60, 61, 62, 63], "slots holds pages that are not in use, starting at ids 60"),
        ([0, 1, 2, 3, 20, 21, 22, 23], "slots holds pages that are not in use, starting at ids 0"),
        ([-4, -3, -2, -1, 68, 69, 70, 71], "slots holds pages that are not in use, starting at ids -4, 68"),
        ([2**40, 2**40 + 1, 2**40 + 2, 2**40 + 3, 20, 21, 22, 23], f"not in use, starting at ids {2**40}"),
        ([20, 21, 22, 23, 20, 21, 22, 23], "slots holds pages twice, starting at ids 20"),
        ([24, 25, 26, 27, 20, 21, 22, 23], "a cache has already, .* starting at ids 24"),
        ([20, 21, 22, 23, 24, 25, 26, 27], "a cache has already, .* starting at ids 24"),
        ([4, 5, 6, 7, 12, 13, 14, 15], "a cache has already, .* starting at ids 12"),
    ],
)
@pytest.mark.parametrize("tokens", [A + C, B + C], ids=["known", "unknown"])
def test_slots_that_are_not_the_callers_whole_pages_are_refused_and_nothing_changes(
    tokens: list[int], slots: list[int], message: str
):
    cache = RadixCache(f4(), enable_events=True)
    allocator = cache.allocator
    assert fill(cache, A + B + B) == list(range(4, 16))
    assert fill(cache, C) == list(range(16, 20))
    allocator.alloc(12)  # ids 20 to 31, of which the middle page is cached too
    cache.insert([9] * 4, range_(4) + 24)
    if tokens == B + C and slots[0] == 4:
        message = "a cache has already, .* starting at ids 4, 12"
    before, events = (allocator.fingerprint(), sizes(cache)), len(cache.take_events())
    with pytest.raises(ValueError, match=rf"insert \(RadixCache\): .*{message}"):
        cache.insert(tokens, slots)
    assert (allocator.fingerprint(), sizes(cache)) == before
    assert events == 3
    assert cache.take_events() == []
    assert matched(cache, A + B + B) == list(range(4, 16))
    assert matched(cache, tokens) == ([4, 5, 6, 7] if tokens[0] == 1 else [])


def test_pages_that_wait_in_a_free_group_are_refused():
    cache = RadixCache(f4())
    allocator = cache.allocator
    slots = allocator.alloc(4)
    allocator.free_group_begin()
    allocator.free(slots)
    with pytest.raises(ValueError, match=r"insert \(RadixCache\): slots holds pages that are not in use, .* ids 4"):
        cache.insert(A, slots)
    allocator.free_group_end()
    assert allocator.available_size() == 64


def test_a_page_that_was_evicted_can_be_cached_again():
    cache = RadixCache(f4())
    fill(cache, A)
    cache.evict(4)
    cache.allocator.clear()
    assert fill(cache, B) == [4, 5, 6, 7]
    assert matched(cache, B) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda c: c.match_prefix([1.0]),
            TypeError,
            r"match_prefix \(RadixCache\): token_ids must hold signed integers",
        ),
        (lambda c: c.match_prefix([[1]]), ValueError, r"match_prefix \(RadixCache\): token_ids must have shape \[n\]"),
        (
            lambda c: c.match_prefix(A, []),
            TypeError,
            r"match_prefix \(RadixCache\): extra_key must be hashable, got list",
        ),
        (lambda c: c.insert([True], [4]), TypeError, r"insert \(RadixCache\): token_ids must hold signed integers"),
        (lambda c: c.insert([[1]], [4]), ValueError, r"insert \(RadixCache\): token_ids must have shape \[n\]"),
        (lambda c: c.insert([1], np.ones(1)), TypeError, r"insert \(RadixCache\): slots must hold signed integers"),
        (lambda c: c.insert([1], [[4]]), ValueError, r"insert \(RadixCache\): slots must have shape \[n\]"),
        (lambda c: c.insert([1], [4], {}), TypeError, r"insert \(RadixCache\): extra_key must be hashable, got dict"),
        (lambda c: c.evict(-1), ValueError, r"evict \(RadixCache\): num_tokens must be at least 0, got -1"),
        (lambda c: c.evict(1.0), ValueError, r"evict \(RadixCache\): num_tokens must be an integer, got 1.0"),
        (lambda c: RadixCache(8), ValueError, "RadixCache: allocator must be one of jkv's allocators, got int"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call(RadixCache(f4()))


# What it costs, and that it is the same everywhere


def test_matching_a_long_prompt_is_twenty_times_faster_than_a_loop_over_its_tokens():
    cache = RadixCache(PagedTokenToKVPoolAllocator(100_000, 16))
    prompt = np.random.default_rng(0).integers(0, 50_000, 100_000).astype(np.int32)
    cached = fill(cache, prompt)
    tokens, stored = prompt.tolist(), prompt.tolist()

    def loop() -> list[int]:
        slots = []
        for mine, its, slot in zip(tokens, stored, cached, strict=True):
            if mine != its:
                break
            slots.append(slot)
        return slots

    def best_of_five(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    assert matched(cache, prompt) == loop()
    assert best_of_five(loop) > 20 * best_of_five(lambda: cache.match_prefix(prompt))


def test_the_same_calls_leave_the_same_state_whatever_the_hash_seed():
    code = """if True:
        import numpy as np
        from jkv.allocator import PagedTokenToKVPoolAllocator
        from jkv.radix_cache import RadixCache
        rng = np.random.default_rng(0)
        allocator = PagedTokenToKVPoolAllocator(256, 4)
        cache = RadixCache(allocator, enable_events=True)
        for _ in range(300):
            tokens = np.repeat(rng.integers(0, 3, rng.integers(1, 6)), 4)
            cache.evict(max(0, tokens.size - allocator.available_size()))
            cache.insert(tokens, allocator.alloc(tokens.size), rng.choice(["a", "b"]))
        for event in cache.take_events():
            print(type(event).__name__, event.extra_key, event.page_hashes.tolist())
        print(allocator.fingerprint())"""
    outputs = set()
    for seed in "1", "2":
        env = {**os.environ, "PYTHONHASHSEED": seed}
        root = pathlib.Path(__file__).parent.parent
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, timeout=60
        )
        assert "PagesRemoved a" in done.stdout, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_its_repr_says_how_full_it_is():
    cache = RadixCache(d4())
    fill(cache, range_(16))
    match = cache.match_prefix(range_(16))
    cache.inc_lock_ref(match.node)
    assert repr(cache) == "RadixCache(alloc_page_size=16, total_size 16, protected_size 16)"
    assert isinstance(match, Match)
    assert repr(match.node) == "Node(16 tokens, lock_ref 1)"
