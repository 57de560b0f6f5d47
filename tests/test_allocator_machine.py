"""Random sequences of operations on the host side against plain models: dictionaries, lists, and loops over tokens."""

import collections
import copy
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

from jkv.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from jkv.request import ReqToTokenPool

# (pages, page_size, dcp_size); page_size 0 stands for the token allocator. The large ones reach the merge by sorting.
GEOMETRIES = [(8, 0, 1), (300, 0, 1), (9, 1, 1), (7, 1, 4), (12, 4, 1), (5, 4, 4), (10, 3, 2), (400, 2, 1)]
few = st.integers(0, 7)
any_row = st.integers(1, 5) | st.integers(-1, 6)
ids = st.integers(-3, 500)


class Model:
    """Pages in plain lists: handed out from the front, which is sorted anew with the freed ones when short."""

    def __init__(self, count: int):
        self.front, self.freed, self.used = list(range(1, count + 1)), [], set()
        self.held: list[int] | None = None

    def available(self) -> int:
        return len(self.front) + len(self.freed)

    def take(self, n: int) -> list[int] | None:
        if n > self.available():
            return None
        if n > len(self.front):
            self.front, self.freed = sorted(self.front + self.freed), []
        pages, self.front = self.front[:n], self.front[n:]
        self.used |= set(pages)
        return pages

    def free(self, pages: set[int]) -> None:
        self.used -= pages
        (self.freed if self.held is None else self.held).extend(pages)


class AllocatorMachine(RuleBasedStateMachine):
    covered: ClassVar[collections.Counter[str]] = collections.Counter()

    @initialize(geometry=st.sampled_from(GEOMETRIES))
    def make(self, geometry: tuple[int, int, int]):
        count, page_size, dcp_size = geometry
        self.tokens = page_size == 0
        if self.tokens:
            self.allocator: Any = TokenToKVPoolAllocator(count)
            self.other: Any = TokenToKVPoolAllocator(count)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(count * page_size, page_size, dcp_size)
            self.other = PagedTokenToKVPoolAllocator(count * page_size, page_size, dcp_size)
        self.count, self.page = count, max(page_size, 1) * dcp_size
        self.model, self.requests, self.saved = Model(count), [], []  # a request is the list of its slots

    def cover(self, what: str) -> None:
        self.covered["operations"] += 1
        self.covered[what] += 1

    def refused(self, what: str, error: type[Exception], call, *arguments) -> None:
        before = self.allocator.fingerprint()
        with pytest.raises(error):
            call(*arguments)
        assert self.allocator.fingerprint() == before
        self.cover(f"refused {what}")

    def grow(self, requests: list[list[int]], lengths: list[int]) -> list[int] | None:
        """Grows the model's requests token by token; None, and nothing done, on shortage."""
        starts = [p for r, n in zip(requests, lengths, strict=True) for p in range(len(r), n) if p % self.page == 0]
        pages = self.model.take(len(starts))
        if pages is None:
            return None
        out = []
        for request, n in zip(requests, lengths, strict=True):
            while len(request) < n:
                request.append(pages.pop(0) * self.page if len(request) % self.page == 0 else request[-1] + 1)
                out.append(request[-1])
        return out

    def compare(self, what: str, got: np.ndarray | None, expected: list[int] | None) -> None:
        if expected is None:
            assert got is None
            self.cover(f"{what} short")
        else:
            assert got is not None
            assert got.dtype == np.int32
            assert got.tolist() == expected
            got[:] = -1  # the caller's own
            self.cover(what)

    def batch(self, picks: list[int], fresh: int) -> list[list[int]]:
        chosen = [self.requests[i] for i in dict.fromkeys(i for i in picks if i < len(self.requests))]
        return chosen + [[] for _ in range(fresh)]

    def keep(self, requests: list[list[int]]) -> None:
        self.requests += [r for r in requests if r and not any(r is known for known in self.requests)]

    @rule(pages=few)
    def alloc(self, pages: int):
        taken = self.model.take(pages)
        slots = None if taken is None else [p * self.page + i for p in taken for i in range(self.page)]
        self.compare("alloc", self.allocator.alloc(pages * self.page), slots)
        self.keep([slots or []])

    @rule(leave=few)
    def alloc_nearly_all(self, leave: int):
        self.alloc(max(0, self.model.available() - leave))

    @rule(
        picks=st.lists(few, max_size=3),
        fresh=st.integers(0, 3),
        growth=st.lists(st.integers(0, 40), min_size=6, max_size=6),
    )
    def alloc_extend(self, picks: list[int], fresh: int, growth: list[int]):
        requests = self.batch(picks, fresh)
        lengths = [len(r) + g for r, g in zip(requests, growth, strict=False)]
        before, last = [len(r) for r in requests], [r[-1] if r else -1 for r in requests]
        expected = self.grow(requests, lengths)
        self.compare("extend", self.allocator.alloc_extend(before, np.array(lengths, int), last), expected)
        self.keep(requests)

    @rule(picks=st.lists(few, max_size=6), fresh=st.integers(0, 2))
    def alloc_decode(self, picks: list[int], fresh: int):
        requests = self.batch(picks, fresh)
        lengths, last = [len(r) + 1 for r in requests], [r[-1] if r else -1 for r in requests]
        expected = self.grow(requests, lengths)
        self.compare("decode", self.allocator.alloc_decode(lengths, np.array(last, np.int32)), expected)
        self.keep(requests)

    @precondition(lambda self: self.requests)
    @rule(pick=few, how=st.sampled_from(["whole", "backwards", "one id a page"]))
    def free(self, pick: int, how: str):
        request = self.requests.pop(pick % len(self.requests))
        loc = {"whole": request, "backwards": request[::-1], "one id a page": request[:: self.page]}[how]
        self.allocator.free(loc if pick % 2 else np.array(loc, np.int32))
        self.model.free({slot // self.page for slot in request})
        self.cover("free" if self.model.held is None else "free in a group")

    @precondition(lambda self: self.requests)
    @rule(pick=few, drop=st.integers(0, 20))
    def give_up_a_tail(self, pick: int, drop: int):
        """A rejected draft: whole pages behind the kept tokens go back, the rest of the last page stays its own."""
        request = self.requests[pick % len(self.requests)]
        keep = max(0, len(request) - drop)
        whole = -(-keep // self.page) * self.page
        tail = request[whole:]
        self.allocator.free(tail)
        self.model.free({slot // self.page for slot in tail})
        del request[keep:]
        self.requests = [r for r in self.requests if r]
        self.cover("tail")

    @precondition(lambda self: self.model.held is None)
    @rule()
    def begin(self):
        self.allocator.free_group_begin()
        self.model.held = []
        self.cover("group")

    @precondition(lambda self: self.model.held is not None)
    @rule()
    def begin_another(self):
        self.refused("nested group", ValueError, self.allocator.free_group_begin)
        self.end()

    @rule()
    def end(self):
        self.allocator.free_group_end()
        self.model.freed += self.model.held or []
        self.model.held = None
        self.cover("group end")

    @rule()
    def backup(self):
        moment = (
            self.allocator.backup_state(),
            self.allocator.fingerprint(),
            copy.deepcopy((self.model, self.requests)),
        )
        self.saved = [*self.saved[-2:], moment]
        self.cover("backup")

    @precondition(lambda self: self.saved)
    @rule(pick=few)
    def restore(self, pick: int):
        state, fingerprint, moment = self.saved[pick % len(self.saved)]
        self.allocator.restore_state(state)
        assert self.allocator.fingerprint() == fingerprint
        self.model, self.requests = copy.deepcopy(moment)
        self.cover("restore")

    @rule(sure=st.integers(0, 3))
    def clear(self, sure: int):
        if sure == 3:
            self.allocator.clear()
            self.model, self.requests = Model(self.count), []
            self.cover("clear")

    @rule(good=st.booleans(), bad=st.lists(ids, min_size=1, max_size=3), pick=few)
    def free_wrongly(self, good: bool, bad: list[int], pick: int):
        bad = [slot for slot in bad if slot // self.page not in self.model.used]
        mine = self.requests[pick % len(self.requests)] if good and self.requests else []
        if bad:
            self.refused("free", ValueError, self.allocator.free, mine + bad)

    @precondition(lambda self: self.tokens and self.requests)
    @rule(pick=few)
    def free_twins(self, pick: int):
        request = self.requests[pick % len(self.requests)]
        self.refused("free of twins", ValueError, self.allocator.free, [*request, request[0]])

    @rule(slot=ids, prefix=st.integers(1, 40), pick=few)
    def extend_wrongly(self, slot: int, prefix: int, pick: int):
        request = self.requests[pick % len(self.requests)] if self.requests else []
        batch = [[len(request), prefix], [len(request) + 3, prefix + 1], [request[-1] if request else -1, slot]]
        fits = (slot + 1) % self.page == prefix % self.page and slot // self.page in self.model.used
        if prefix % self.page and not fits:
            self.refused("extension", ValueError, self.allocator.alloc_extend, *batch)
        elif len(request) % self.page:
            twice = [[n, n] for n in (len(request), len(request) + 1, request[-1])]
            self.refused("shared page", ValueError, self.allocator.alloc_extend, *twice)
            self.refused("shared page", ValueError, self.allocator.alloc_decode, twice[1], twice[2])

    @rule(n=st.integers(-20, 200))
    def call_wrongly(self, n: int):
        self.refused("state", ValueError, self.allocator.restore_state, self.other.backup_state())
        if n < 0 or n % self.page:
            self.refused("alloc", ValueError, self.allocator.alloc, n)
        self.refused("dtype", TypeError, self.allocator.free, [float(n)])

    @invariant()
    def nothing_is_lost_and_nothing_is_handed_out_twice(self):
        if not hasattr(self, "model"):
            return
        model, held = self.model, self.model.held or []
        assert self.allocator.available_size() == model.available() * self.page
        assert sorted([*model.front, *model.freed, *held, *model.used]) == list(range(1, self.count + 1))
        owned = [slot for request in self.requests for slot in request]
        assert len(set(owned)) == len(owned)
        assert {slot // self.page for slot in owned} == model.used

    def teardown(self):
        if not hasattr(self, "model"):
            return
        self.end()
        for request in self.requests:
            self.allocator.free(request)
        assert self.allocator.available_size() == self.allocator.capacity
        # The whole pool is there, in the order of the model's lists.
        self.model.free(set(self.model.used))
        everything = self.allocator.alloc(self.allocator.capacity)
        assert everything[:: self.page].tolist() == [page * self.page for page in self.model.take(self.count)]


class RequestMachine(RuleBasedStateMachine):
    covered: ClassVar[collections.Counter[str]] = collections.Counter()
    size, context = 5, 12

    def __init__(self):
        super().__init__()
        self.pool = ReqToTokenPool(self.size, self.context)
        self.model, self.rows = Model(self.size), {row: {} for row in range(self.size + 1)}

    def cover(self, what: str) -> None:
        self.covered["operations"] += 1
        self.covered[what] += 1

    def refused(self, what: str, call, *arguments) -> None:
        with pytest.raises(ValueError, match=r"\(ReqToTokenPool\)"):
            call(*arguments)
        self.cover(f"refused {what}")

    @rule(n=st.integers(0, 3))
    def alloc(self, n: int):
        got, expected = self.pool.alloc(n), self.model.take(n)
        assert (None if got is None else got.tolist()) == expected
        self.cover("alloc" if expected is not None else "alloc short")

    @rule(rows=st.lists(st.integers(-1, 6), min_size=1, max_size=3))
    def free(self, rows: list[int]):
        if len(set(rows)) == len(rows) and set(rows) <= self.model.used:
            self.pool.free(rows[0] if len(rows) == 1 else rows)
            self.model.free(set(rows))
            self.rows.update({row: {} for row in rows})
            self.cover("free")
        else:
            self.refused("free", self.pool.free, rows)

    @rule(
        row=any_row,
        start=st.integers(0, 6) | st.integers(-1, 13),
        slots=st.lists(st.integers(1, 40), max_size=6) | st.lists(st.integers(-1, 2), max_size=6),
    )
    def write(self, row: int, start: int, slots: list[int]):
        if row in self.model.used and 0 <= start <= self.context - len(slots) and min(slots, default=1) > 0:
            self.pool.write(row, start, slots)
            self.rows[row].update(zip(range(start, start + len(slots)), slots, strict=True))
            self.cover("write")
        else:
            self.refused("write", self.pool.write, row, start, slots)

    @rule(
        rows=st.lists(st.integers(0, 5), max_size=3),
        at=st.lists(st.integers(-1, 12), min_size=3, max_size=3),
        slot=st.integers(0, 9),
    )
    def write_each(self, rows: list[int], at: list[int], slot: int):
        at, slots = at[: len(rows)], [slot] * len(rows)
        good = set(rows) <= self.model.used and len(set(rows)) == len(rows)
        if not rows or (good and slot and all(0 <= p < self.context for p in at)):
            self.pool.write_each(rows, at, slots)
            for row, position in zip(rows, at, strict=True):
                self.rows[row][position] = slot
            self.cover("write_each")
        else:
            self.refused("write_each", self.pool.write_each, rows, at, slots)

    @rule(row=any_row, start=st.integers(0, 2) | st.integers(-1, 12), length=st.integers(0, 3) | st.integers(-1, 6))
    def read(self, row: int, start: int, length: int):
        wanted = range(start, start + length)
        inside = row in self.model.used and start >= 0 <= length and start + length <= self.context
        if inside and set(wanted) <= set(self.rows[row]):
            assert self.pool.read(row, start, length).tolist() == [self.rows[row][p] for p in wanted]
            self.cover("read")
        else:
            self.refused("read", self.pool.read, row, start, length)

    @rule(sure=st.integers(0, 5))
    def clear(self, sure: int):
        if sure == 5:
            self.pool.clear()
            self.model, self.rows = Model(self.size), {row: {} for row in range(self.size + 1)}
            self.cover("clear")

    @invariant()
    def the_table_is_what_the_running_requests_wrote(self):
        assert self.pool.available_size() == self.model.available()
        table = [[self.rows[row].get(p, 0) for p in range(self.context)] for row in range(self.size + 1)]
        assert self.pool.req_to_token.tolist() == table


ALLOCATOR_OUTCOMES = {
    *("alloc", "alloc short", "extend", "extend short", "decode", "decode short", "free", "free in a group", "tail"),
    *("group", "group end", "backup", "restore", "clear", "refused nested group", "refused free"),
    *("refused free of twins", "refused extension", "refused shared page", "refused state", "refused alloc"),
    "refused dtype",
}
REQUEST_OUTCOMES = {
    *("alloc", "alloc short", "free", "write", "write_each", "read", "clear"),
    *("refused free", "refused write", "refused write_each", "refused read"),
}
MACHINES = [(AllocatorMachine, ALLOCATOR_OUTCOMES), (RequestMachine, REQUEST_OUTCOMES)]


def run(machine: type[Any], outcomes: set[str], operations: int, random: bool) -> None:
    machine.covered.clear()
    settings = hypothesis.settings(
        max_examples=operations // 45, stateful_step_count=100, derandomize=not random, deadline=None, database=None
    )
    run_state_machine_as_test(machine, settings=settings)
    assert machine.covered["operations"] >= operations, dict(machine.covered)
    rare = {what: machine.covered[what] for what in outcomes if machine.covered[what] < operations // 1000}
    assert not rare, f"hardly tried: {rare} of {dict(machine.covered)}"


@pytest.mark.parametrize(("machine", "outcomes"), MACHINES)
def test_ten_thousand_random_operations_agree_with_the_model(machine: type[Any], outcomes: set[str]):
    run(machine, outcomes, 10_000, random=False)


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "outcomes"), MACHINES)
def test_a_hundred_thousand_random_operations_agree_with_the_model(machine: type[Any], outcomes: set[str]):
    run(machine, outcomes, 100_000, random=True)
