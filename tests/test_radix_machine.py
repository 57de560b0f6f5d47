"""Random requests through prefix cache, allocator and admission, with a pool of plain numbers.

The model knows the cache page by page: a trie in dictionaries that predicts every match, every duplicate, and which
pages go in what order. The pool is an array with a number per slot: what a token wrote depends on all tokens in front
of it, and a page that becomes free is wiped, so that whoever reads a slot that is no longer his sees a wrong number.
"""

import collections
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jkv.admission import Admission
from jkv.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from jkv.radix_cache import Match, RadixCache
from jkv.radix_events import PagesStored, page_hashes
from jkv.slots import SlotSpace

# (pages, page_size, dcp_size); page_size 0 stands for the token allocator.
GEOMETRIES = [(12, 0, 1), (14, 2, 1), (12, 1, 2), (10, 4, 1), (9, 2, 2)]
few = st.integers(0, 5)
blocks = st.sampled_from([0, 0, 0, 1, 1, 2, 3])
prompts = st.tuples(st.lists(blocks, min_size=1, max_size=4), few, st.sampled_from([None, None, None, "adapter"]))


class Entry:
    """A cached page in the model. `ends`: a node of the cache ends with it; the pages up to there go together."""

    def __init__(self, parent: "Entry | None", tokens: tuple[int, ...], page: int, hash_: int | None):
        self.parent, self.tokens, self.page, self.hash = parent, tokens, page, hash_
        self.children: dict[Any, Entry] = {}
        self.last_use = self.locks = 0
        self.ends = True


class Model:
    """The cache, page by page."""

    def __init__(self, page: int):
        self.page, self.clock = page, 0
        self.roots: dict[Any, Entry] = {}

    def entries(self) -> Iterator[tuple[Any, Entry]]:
        for key, root in self.roots.items():
            stack = [*root.children.values()]
            while stack:
                entry = stack.pop()
                stack += entry.children.values()
                yield key, entry

    def pages_of(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[i : i + self.page]) for i in range(0, len(tokens) - self.page + 1, self.page)]

    def match(self, tokens: list[int], key: Any) -> list[Entry]:
        self.clock += 1
        at = self.roots.setdefault(key, Entry(None, (), 0, None))
        path = []
        for page in self.pages_of(tokens):
            if page not in at.children:
                break
            at = at.children[page]
            at.last_use = self.clock
            path.append(at)
        at.ends = True
        return path

    def insert(self, tokens: list[int], key: Any, pages: list[int]) -> tuple[int, set[int]]:
        """The number of pages known before, and the duplicates."""
        path = self.match(tokens, key)
        at = path[-1] if path else self.roots[key]
        wanted = self.pages_of(tokens)
        for run, page in zip(wanted[len(path) :], pages[len(path) :], strict=True):
            hash_ = int(page_hashes(run, self.page, at.hash)[0])
            at.children[run] = Entry(at, run, page, hash_)
            at = at.children[run]
            at.last_use, at.ends = self.clock, False
        at.ends = True
        return len(path), {mine for mine, entry in zip(pages, path, strict=False) if mine != entry.page}

    def evict(self, tokens: int) -> set[int]:
        gone: set[int] = set()
        while len(gone) * self.page < tokens:
            leaves = [entry for _, entry in self.entries() if not entry.children and not entry.locks]
            if not leaves:
                break
            entry = min(leaves, key=lambda leaf: leaf.last_use)
            assert [leaf.last_use for leaf in leaves].count(entry.last_use) == 1  # the order is no accident
            while True:
                gone.add(entry.page)
                parent = entry.parent
                assert parent is not None
                del parent.children[entry.tokens]
                if parent.ends:
                    break
                entry = parent
        return gone


class Reader:
    """Tokens whose slots somebody reads: a request, or one that only holds a match."""

    def __init__(self, key: Any, tokens: list[int], match: Match, path: list[Entry]):
        self.key, self.tokens, self.node, self.path = key, tokens, match.node, path
        self.slots: list[int] = match.slots.tolist()


class RadixMachine(RuleBasedStateMachine):
    covered: ClassVar[collections.Counter[str]] = collections.Counter()

    @initialize(geometry=st.sampled_from(GEOMETRIES), served=st.lists(prompts, min_size=2, max_size=4))
    def make(self, geometry: tuple[int, int, int], served: list[tuple[list[int], int, Any]]):
        self.count, page_size, dcp_size = geometry
        space = SlotSpace(self.count * max(page_size, 1), max(page_size, 1), dcp_size)
        if page_size:
            self.allocator: Any = PagedTokenToKVPoolAllocator(space.size, page_size, dcp_size)
        else:
            self.allocator = TokenToKVPoolAllocator(space.size)
        self.admission, self.page = Admission(space, 10_000), space.alloc_page_size
        self.cache, self.model = RadixCache(self.allocator, enable_events=True), Model(self.page)
        self.free, self.used, self.grouped = set(range(1, self.count + 1)), set(), None
        self.requests: list[Reader] = []
        self.readers: list[Reader] = []
        self.numbers: dict[Any, int] = {}
        self.memory = np.zeros(space.bound, np.int64)
        self.routed: set[tuple[Any, int]] = set()
        self.saved: tuple[Any, int] | None = None
        self.changes = 0  # of the pages that are cached
        for prompt in served:
            self.start(prompt)
            if self.requests:
                self.finish(0, 0)

    def cover(self, what: str) -> None:
        self.covered["operations"] += 1
        self.covered[what] += 1

    def sequence(self, blocks: list[int], tail: int) -> list[int]:
        """Pages of four kinds, two of which differ in their last token only, and a part of a page."""
        pages = [[block // 2] * (self.page - 1) + [block] for block in blocks]
        return [*itertools.chain(*pages), *[tail % 2] * (tail % self.page)]

    def values(self, key: Any, tokens: list[int]) -> list[int]:
        """What each token writes: a number of its own for each sequence that leads up to it."""
        prefixes = [(key, *tokens[: i + 1]) for i in range(len(tokens))]
        return [self.numbers.setdefault(prefix, len(self.numbers) + 1) for prefix in prefixes]

    def own(self, request: Reader) -> set[int]:
        return {slot // self.page for slot in request.slots[len(request.path) * self.page :]}

    def take(self, slots: np.ndarray) -> None:
        pages = {int(slot) // self.page for slot in slots}
        assert pages & self.free | pages & self.used == pages  # new ones, and a request's last; no cached one
        self.free -= pages
        self.used |= pages

    def release(self, pages: set[int]) -> None:
        self.used -= pages
        (self.free if self.grouped is None else self.grouped).update(pages)
        for page in pages:
            self.memory[page * self.page : (page + 1) * self.page] = 0

    def match(self, key: Any, tokens: list[int], count: bool = True) -> tuple[Match, list[Entry]]:
        match, path = self.cache.match_prefix(np.array(tokens, int), key), self.model.match(tokens, key)
        assert match.slots.tolist() == [entry.page * self.page + i for entry in path for i in range(self.page)]
        assert self.memory[match.slots].tolist() == self.values(key, tokens)[: len(match.slots)]
        if count:
            self.cover("match" if path else "no match")
        return match, path

    def lock(self, reader: Reader) -> None:
        self.cache.inc_lock_ref(reader.node)
        for entry in reader.path:
            entry.locks += 1
        self.cover("lock")

    def unlock(self, reader: Reader) -> None:
        self.cache.dec_lock_ref(reader.node)
        for entry in reader.path:
            entry.locks -= 1
        self.cover("unlock")

    def insert(self, request: Reader) -> int:
        """Inserts what a request has; returns the length of its whole pages."""
        whole = len(request.slots) // self.page * self.page
        pages = [slot // self.page for slot in request.slots[: whole : self.page]]
        known, duplicates = self.model.insert(request.tokens, request.key, pages)
        got = self.cache.insert(request.tokens, np.array(request.slots, np.int32), request.key)
        assert got == known * self.page
        self.release(duplicates)
        self.used -= set(pages)
        self.changes += known < len(pages)
        self.cover("insert with duplicates" if duplicates else "insert")
        return whole

    def give_up(self, request: Reader) -> None:
        own = self.own(request)
        self.allocator.free([page * self.page for page in own])
        self.release(own)
        self.unlock(request)

    def make_room(self, missing: int) -> None:
        if missing:
            self.evict(missing)

    def missing(self, pages: int) -> int:
        return self.admission.shortfall(pages, self.allocator.available_size())

    @rule(prompt=prompts)
    def start(self, prompt: tuple[list[int], int, Any]):
        blocks, tail, key = prompt
        tokens = self.sequence(blocks, tail)
        if not tokens or len(tokens) > self.admission.max_request_len:
            return
        request = Reader(key, tokens, *self.match(key, tokens[:-1]))
        self.lock(request)
        before = len(request.slots)
        self.make_room(self.missing(self.admission.extend_pages_needed([before], [len(tokens)])))
        short = self.missing(self.admission.extend_pages_needed([before], [len(tokens)])) > 0
        slots = self.allocator.alloc_extend([before], [len(tokens)], [request.slots[-1] if before else -1])
        assert (slots is None) == short
        if slots is None:
            self.unlock(request)
            self.cover("no room")
            return
        self.take(slots)
        request.slots += slots.tolist()
        self.memory[slots] = self.values(key, tokens)[before:]
        self.requests.append(request)
        self.cover("start on a prefix" if before else "start")

    @rule(prompt=prompts)
    def start_twins(self, prompt: tuple[list[int], int, Any]):
        self.start(prompt)
        self.start(prompt)

    @precondition(lambda self: self.requests)
    @rule(steps=st.integers(1, 4), token=st.integers(0, 1), victim=few)
    def decode(self, steps: int, token: int, victim: int):
        for _ in range(steps):
            self.decode_step(token, victim)

    def decode_step(self, token: int, victim: int) -> None:
        lens = [len(request.tokens) + 1 for request in self.requests]
        if max(lens, default=0) > self.admission.limit:
            self.finish(lens.index(max(lens)), 0)
            return
        self.make_room(self.missing(self.admission.decode_pages_needed(lens)))
        while self.requests and self.missing(self.admission.decode_pages_needed(lens)):
            self.give_up(self.requests.pop(victim % len(self.requests)))
            self.cover("retract")
            lens = [len(request.tokens) + 1 for request in self.requests]
        slots = self.allocator.alloc_decode(lens, [request.slots[-1] for request in self.requests])
        assert slots is not None
        self.take(slots)
        for request, slot in zip(self.requests, slots.tolist(), strict=True):
            assert slot not in request.slots
            request.tokens.append(token)
            request.slots.append(slot)
            self.memory[slot] = self.values(request.key, request.tokens)[-1]
        self.cover("decode")

    @precondition(lambda self: self.requests)
    @rule(pick=few)
    def insert_and_go_on(self, pick: int):
        request = self.requests[pick % len(self.requests)]
        whole = self.insert(request)
        old = Reader(request.key, [], Match(np.array([]), request.node), request.path)
        match, path = self.match(request.key, request.tokens)
        assert len(match.slots) == whole
        request.node, request.path = match.node, path
        self.lock(request)
        self.unlock(old)
        request.slots[:whole] = match.slots.tolist()

    @precondition(lambda self: self.requests)
    @rule(pick=few, go_on=st.integers(0, 2))
    def finish(self, pick: int, go_on: int):
        if go_on:
            self.insert_and_go_on(pick)
            return
        request = self.requests.pop(pick % len(self.requests))
        whole = self.insert(request)
        tail = request.slots[whole:]
        self.allocator.free(tail)
        self.release({slot // self.page for slot in tail})
        self.unlock(request)
        self.cover("finish")

    @precondition(lambda self: self.requests)
    @rule(pick=few)
    def abort(self, pick: int):
        self.give_up(self.requests.pop(pick % len(self.requests)))
        self.cover("abort")

    @rule(prompt=prompts)
    def read(self, prompt: tuple[list[int], int, Any]):
        blocks, tail, key = prompt
        tokens = self.sequence(blocks, tail)
        reader = Reader(key, tokens, *self.match(key, tokens))
        if len(self.readers) < 3:
            self.lock(reader)
            self.readers.append(reader)

    @rule(prompt=prompts)
    def look(self, prompt: tuple[list[int], int, Any]):
        blocks, tail, key = prompt
        self.match(key, self.sequence(blocks, tail))

    @precondition(lambda self: self.readers)
    @rule(pick=few)
    def unlock_and_lock_again(self, pick: int):
        reader = self.readers[pick % len(self.readers)]
        self.unlock(reader)
        self.lock(reader)

    @precondition(lambda self: self.readers)
    @rule(pick=few)
    def stop_reading(self, pick: int):
        self.unlock(self.readers.pop(pick % len(self.readers)))

    @rule(tokens=st.integers(0, 6) | st.integers(0, 20))
    def evict(self, tokens: int):
        gone = self.model.evict(tokens)
        assert self.cache.evict(tokens) == len(gone) * self.page
        self.release(gone)
        self.changes += bool(gone)
        left = any(not entry.locks for _, entry in self.model.entries())
        self.cover(("evict some" if left else "evict all") if gone else "evict nothing")

    @rule(sure=few)
    def reset(self, sure: int):
        if any(entry.locks for _, entry in self.model.entries()):
            self.refused("reset", self.cache.reset)
        elif sure == 5:
            gone = {entry.page for _, entry in self.model.entries()}
            self.cache.reset()
            self.release(gone)
            self.changes += bool(gone)
            self.model.roots.clear()
            self.cover("reset")

    @precondition(lambda self: self.grouped is None)
    @rule(sure=few)
    def begin_group(self, sure: int):
        if sure:
            return
        self.allocator.free_group_begin()
        self.grouped = set()
        self.cover("group")

    @precondition(lambda self: self.grouped is not None)
    @rule()
    def end_group(self):
        self.allocator.free_group_end()
        self.free, self.grouped = self.free | self.grouped, None
        self.cover("group end")

    @precondition(lambda self: next(self.model.entries(), None))
    @rule(picks=st.lists(few, min_size=1, max_size=3), mine=st.booleans(), inside=few)
    def meddle(self, picks: list[int], mine: bool, inside: int):
        """Frees cached pages, alone or with a request's own; fills them up; clears the allocator under the cache."""
        cached = [entry.page for _, entry in self.model.entries()]
        pages = list({cached[pick % len(cached)] for pick in picks})
        own = sorted(self.own(self.requests[picks[0] % len(self.requests)])) if mine and self.requests else []
        ids = [page * self.page + inside % self.page for page in own + pages]
        by = r"\((Paged)?TokenToKVPoolAllocator\): .*a prefix cache holds"
        self.refused("free", self.allocator.free, ids, by=by)
        self.refused("claim", self.allocator.claim, ids, by=by)
        if filled := inside % self.page:
            last = pages[0] * self.page + filled - 1
            self.refused("extension", self.allocator.alloc_extend, [filled], [filled + 1], [last], by=by)
            self.refused("extension", self.allocator.alloc_decode, [filled + 1], [last], by=by)
        self.refused("clear", self.allocator.clear, by=by)

    @rule(pages=few)
    def back_up_and_draft(self, pages: int):
        state, before = self.allocator.backup_state(), self.allocator.fingerprint()
        self.allocator.alloc(pages * self.page)
        self.allocator.restore_state(state)
        assert self.allocator.fingerprint() == before
        self.saved = state, self.changes

    @precondition(lambda self: self.saved and self.saved[1] != self.changes)
    @rule()
    def restore_wrongly(self):
        by = r"restore_state .*: a prefix cache took over or freed pages since"
        self.refused("restore", self.allocator.restore_state, self.saved[0], by=by)

    def refused(self, what: str, call: Any, *arguments: Any, by: str = r"\(RadixCache\)") -> None:
        before = self.allocator.fingerprint(), repr(self.cache)
        with pytest.raises(ValueError, match=by):
            call(*arguments)
        assert (self.allocator.fingerprint(), repr(self.cache)) == before
        assert self.cache.take_events() == []
        self.cover(f"refused {what}")

    @rule(prompt=prompts)
    def unlock_wrongly(self, prompt: tuple[list[int], int, Any]):
        blocks, tail, key = prompt
        match, path = self.match(key, self.sequence(blocks, tail), count=False)
        end = path[-1] if path else None
        if all((other.path[-1] if other.path else None) is not end for other in self.requests + self.readers):
            self.refused("unlock", self.cache.dec_lock_ref, match.node)

    @rule(prompt=prompts, shift=st.integers(0, 3), pages=st.lists(st.integers(-1, 15), min_size=5, max_size=5))
    def insert_wrongly(self, prompt: tuple[list[int], int, Any], shift: int, pages: list[int]):
        blocks, tail, key = prompt
        tokens = self.sequence(blocks, tail)
        whole = len(tokens) // self.page
        if not whole:
            return
        _, path = self.match(key, tokens, count=False)
        self.routed_changes()
        pages, shift = pages[:whole], shift % self.page
        right = [i < len(path) and page == path[i].page for i, page in enumerate(pages)]
        good = [page in self.used or ok for page, ok in zip(pages, right, strict=True)]
        if all(good) and len(set(pages)) == len(pages) and not shift:
            return
        slots = [page * self.page + i + shift for page in pages for i in range(self.page)]
        self.refused("insert", self.cache.insert, tokens, slots + [0] * (len(tokens) - len(slots)), key)
        self.refused("lengths", self.cache.insert, tokens, slots[:-1], key)

    def routed_changes(self) -> None:
        for event in self.cache.take_events():
            pages = {(event.extra_key, int(hash_)) for hash_ in event.page_hashes}
            assert (pages.isdisjoint if isinstance(event, PagesStored) else pages.issubset)(self.routed)
            self.routed ^= pages

    @invariant()
    def each_page_is_exactly_one_of_free_cached_and_in_use(self):
        if not hasattr(self, "model"):
            return
        entries = list(self.model.entries())
        parts = [self.free, self.grouped or set(), self.used, {entry.page for _, entry in entries}]
        assert sorted(itertools.chain(*parts)) == list(range(1, self.count + 1))
        assert self.allocator.available_size() == len(self.free) * self.page
        owned = [page for request in self.requests for page in self.own(request)]
        assert sorted(owned) == sorted(self.used)
        assert self.cache.total_size == len(entries) * self.page
        every = np.arange(self.count + 1) * self.page
        assert set(np.flatnonzero(self.allocator.claimed(every))) == parts[3]
        assert set(np.flatnonzero(self.allocator.in_use(every))) == parts[2] | parts[3]
        assert self.cache.protected_size == sum(entry.locks > 0 for _, entry in entries) * self.page
        assert self.cache.evictable_size == sum(entry.locks == 0 for _, entry in entries) * self.page
        self.routed_changes()
        assert self.routed == {(key, entry.hash) for key, entry in entries}

    @invariant()
    def a_reader_sees_what_its_tokens_wrote(self):
        if not hasattr(self, "model"):
            return
        for reader in self.requests + self.readers:
            expected = self.values(reader.key, reader.tokens)[: len(reader.slots)]
            assert self.memory[reader.slots].tolist() == expected

    def teardown(self):
        if not hasattr(self, "model"):
            return
        for reader in self.readers:
            self.unlock(reader)
        while self.requests:
            self.finish(0, 0)
        self.allocator.free_group_end()
        cached = self.allocator.capacity - len(self.free | (self.grouped or set())) * self.page
        assert self.cache.evict(self.allocator.capacity) == cached
        assert self.allocator.available_size() == self.allocator.capacity
        assert self.cache.total_size == 0


OUTCOMES = {
    *("match", "no match", "lock", "unlock", "insert", "insert with duplicates", "start", "start on a prefix"),
    *(
        "no room",
        "decode",
        "retract",
        "finish",
        "abort",
        "evict some",
        "evict all",
        "evict nothing",
        "reset",
        "group",
        "group end",
    ),
    *("refused reset", "refused unlock", "refused insert", "refused lengths", "refused restore"),
    *("refused free", "refused claim", "refused extension", "refused clear"),
}


def run(operations: int, random: bool) -> None:
    RadixMachine.covered.clear()
    settings = hypothesis.settings(
        max_examples=operations // 50, stateful_step_count=60, derandomize=not random, deadline=None, database=None
    )
    run_state_machine_as_test(RadixMachine, settings=settings)
    covered = RadixMachine.covered
    assert covered["operations"] >= operations, dict(covered)
    rare = {what: covered[what] for what in OUTCOMES if covered[what] < max(1, operations // 1000)}
    assert not rare, f"hardly tried: {rare} of {dict(covered)}"


def test_two_thousand_random_operations_agree_with_the_model():
    run(2_000, random=False)


@pytest.mark.slow
def test_a_hundred_thousand_random_operations_agree_with_the_model():
    run(100_000, random=True)
