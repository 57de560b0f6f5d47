"""Greedy continuous batching over a pool: lanes, pages and rows on the host, one jitted step on the devices.

A request is admitted when a lane is free and the pages of its longest possible text are not promised to others, so
that a running request never runs out of pages. It gives lane and pages back as soon as it ends. Two shapes are
compiled: a chunk of prompt tokens and a single token for each lane.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

import jkv
from examples.kv import Pool
from examples.mesh import UsageError
from examples.striped import Batch, Server

MAX_CHUNK = 64  # prompt tokens of a lane in one step


@dataclass(eq=False)
class Request:
    """A prompt and what came of it. `cached` tokens of it have rows in the pool."""

    index: int
    prompt_ids: list[int]
    limit: int  # tokens, prompt included
    token_ids: list[int] = field(default_factory=list)
    first_logits: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [vocabulary], after the prompt
    row: int = 0  # of ReqToTokenPool
    cached: int = 0
    shared: int = 0  # the first of them whose slots are not the request's own

    @property
    def known(self) -> list[int]:
        """The text so far."""
        return self.prompt_ids + self.token_ids


@dataclass
class Phase:
    """Steps of one kind: how many, the tokens they ran, and their seconds."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class Stats:
    """What a run used; `rank_rows` [dcp] is the most rows that requests held on each rank, `running` the most lanes."""

    rank_rows: np.ndarray
    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
    running: int = 0
    compile_seconds: float = 0.0


class Engine:
    """Serves prompts in `lanes` lanes over a server's pool. The same calls do the same in every process."""

    def __init__(
        self,
        server: Server,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        lanes: int,
        on_token: Callable[[int, int, bool], None] | None = None,
        *,
        by_page: bool = False,
    ):
        """Takes the requests, all of which must fit (see `check_fits`); each may have a `max_new_tokens` of its own.

        `on_token(index, token, is_last)` is called as tokens come. `by_page` runs prompts one after the other, a page a
        step: a token is then computed in the same place of the same program, whatever is in the pool already.
        """
        slots = server.pool.slots
        self.server, self.pool, self.slots = server, server.pool, slots
        most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        for name, (prompt, new) in enumerate(zip(prompts, most, strict=True)):
            check_fits(f"prompt {name}", len(prompt), new, server.context_len, slots.capacity)
        self.requests = [
            Request(i, list(ids), len(ids) + new) for i, (ids, new) in enumerate(zip(prompts, most, strict=True))
        ]
        longest = max(request.limit for request in self.requests)
        self.by_page = by_page
        self.chunk = min(MAX_CHUNK, 1 << (max(len(ids) for ids in prompts) - 1).bit_length())
        if by_page:
            self.chunk = slots.alloc_page_size
        self.allocator = jkv.PagedTokenToKVPoolAllocator(slots.size, slots.page_size, dcp_size=slots.dcp_size)
        self.table = jkv.ReqToTokenPool(lanes, self._pages(longest) * slots.alloc_page_size)
        self.waiting = deque(self.requests)
        self.lanes: list[Request | None] = [None] * lanes
        self.stats = Stats(rank_rows=np.zeros(slots.dcp_size, np.int64))
        self.on_token = on_token
        self.steps: dict[tuple[int, ...], Callable] = {}

    def run(self) -> tuple[list[Request], Stats, Pool]:
        """Serves everything; returns the requests in their order, what the run used, and the pool as it was left."""
        while self.waiting or self._running():
            self._admit()
            while prefilling := [r for r in self._running() if r.cached < len(r.prompt_ids)]:
                lanes = prefilling[:1] if self.by_page else [r if r in prefilling else None for r in self.lanes]
                self._step(lanes, self.chunk, self.stats.prefill)
            if self._running():
                self._extend()
                self._step(list(self.lanes), 1, self.stats.decode)
        jkv.wait_for_checks()
        return self.requests, self.stats, self.pool

    def run_alone(self) -> list[Request]:
        """Serves everything like `run`, but each request by itself: none begins before the one in front has ended."""
        alone, self.waiting = self.waiting, deque()
        for request in alone:
            self.waiting.append(request)
            self.run()
        return self.requests

    def _running(self) -> list[Request]:
        return [request for request in self.lanes if request is not None]

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.slots.alloc_page_size)

    def _admit(self) -> None:
        """Gives free lanes to the requests that have waited longest, as long as the pages suffice to their ends."""
        pledged = sum(self._pages(request.limit) for request in self._running())
        admitted = []
        for lane, occupant in enumerate(self.lanes):
            if occupant is not None or not self.waiting:
                continue
            pledged += self._pages(self.waiting[0].limit)
            if pledged * self.slots.alloc_page_size > self.slots.capacity:
                break
            request = self.waiting.popleft()
            request.row = int(promised(self.table.alloc(1))[0])
            self.lanes[lane] = request
            admitted.append(request)
        if not admitted:
            return
        lengths = [len(request.prompt_ids) for request in admitted]
        loc = promised(self.allocator.alloc_extend([0] * len(lengths), lengths, [-1] * len(lengths)))
        for request, part in zip(admitted, np.split(loc, np.cumsum(lengths)[:-1]), strict=True):
            self.table.write(request.row, 0, part)
        self.stats.running = max(self.stats.running, len(self._running()))

    def _extend(self) -> None:
        """A slot for the latest token of each running request, whose row is yet to be written."""
        rows, lengths = [r.row for r in self._running()], [len(r.known) for r in self._running()]
        last = self.table.req_to_token[rows, np.array(lengths) - 2]
        self.table.write_each(rows, np.array(lengths) - 1, promised(self.allocator.alloc_decode(lengths, last)))

    def _step(self, lanes: Sequence[Request | None], width: int, phase: Phase) -> None:
        """Runs the next `width` tokens, at most, of each request; who has come to the end of its text gets a token."""
        batch = self._batch(lanes, width)
        step = self._compiled(batch)
        began = time.perf_counter()
        self.pool, tokens, logits = step(self.server.params, self.pool, batch)
        chosen = np.asarray(tokens)
        held = np.unique(self.table.req_to_token[[request.row for request in self._running()]])
        fresh = [r for r in lanes if r and not r.token_ids and r.cached + width >= len(r.prompt_ids)]
        first = np.asarray(logits) if fresh else None
        for lane, request in enumerate(lanes):
            if request is None:
                continue
            request.cached += int(batch.new[lane])
            if request.cached < len(request.known):
                continue
            if first is not None and not request.token_ids:
                request.first_logits = first[lane]
            self._take(request, int(chosen[lane]))
        phase.steps += 1
        phase.tokens += int(batch.new.sum())
        phase.seconds += time.perf_counter() - began
        by_rank = np.bincount(self.slots.owner(held[held > 0]), minlength=self.slots.dcp_size)
        self.stats.rank_rows = np.maximum(self.stats.rank_rows, by_rank)

    def _compiled(self, batch: Batch) -> Callable:
        """The step for the batch's shape, compiled ahead so that the time it takes is told apart."""
        if (shape := batch.tokens.shape) not in self.steps:
            began = time.perf_counter()
            self.steps[shape] = self.server.step.lower(self.server.params, self.pool, batch).compile()
            self.stats.compile_seconds += time.perf_counter() - began
        return self.steps[shape]

    def _batch(self, lanes: Sequence[Request | None], width: int) -> Batch:
        """Fresh host arrays for one step: the devices may still read the arrays of the step before."""
        tokens, loc = np.zeros((len(lanes), width), np.int32), np.zeros((len(lanes), width), np.int32)
        start, count = np.zeros(len(lanes), np.int32), np.zeros(len(lanes), np.int32)
        rows = np.array([request.row if request else 0 for request in lanes])
        for lane, request in enumerate(lanes):
            if request is None:
                continue
            new = request.known[request.cached : request.cached + width]
            tokens[lane, : len(new)] = new
            start[lane], count[lane] = request.cached, len(new)
            loc[lane] = jkv.pad_slots(self.table.read(request.row, request.cached, len(new)), width)
        return Batch(tokens, start, count, loc, self.table.req_to_token[rows])

    def _take(self, request: Request, token: int) -> None:
        request.token_ids.append(token)
        done = token == self.server.end_id or len(request.known) == request.limit
        if self.on_token:
            self.on_token(request.index, token, done)
        if done:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """Gives back the lane, the row and the slots that are the request's own."""
        self.allocator.free(self.table.read(request.row, request.shared, request.cached - request.shared))
        self.table.free(request.row)
        self.lanes[self.lanes.index(request)] = None


def promised(taken: np.ndarray | None) -> np.ndarray:
    """What a pool gave to a request that was admitted, and that therefore had to be there."""
    if taken is None:
        raise RuntimeError("an admitted request ran out of slots or rows: somebody else takes from the same pool")
    return taken


def check_fits(name: str, prompt_len: int, max_new_tokens: int, context_len: int, capacity: int) -> None:
    """Raises UsageError unless a prompt and its new tokens fit the model's context and the pool of all ranks."""
    if prompt_len == 0:
        raise UsageError(f"{name} is empty: there is nothing to continue")
    if max_new_tokens < 1:
        raise UsageError(f"at least one new token must be asked for, got {max_new_tokens}")
    room = min(context_len, capacity)
    limits = f"the model's context is {context_len} tokens, the pool holds {capacity} over all ranks"
    if prompt_len > room - 1:
        raise UsageError(f"{name} has {prompt_len} tokens, at most {room - 1} can be served: {limits}")
    if max_new_tokens > room - prompt_len:
        raise UsageError(
            f"{name} has {prompt_len} tokens, which leaves room for {room - prompt_len} new ones, not "
            f"{max_new_tokens}: {limits}"
        )
