"""Continuous batching in a pool that is too small: prefixes are shared, and a request may be put off to the host.

A request is admitted as soon as its prompt fits, not its longest possible text. Before each step the scheduler asks how
many pages it will take; where they are missing it evicts what the prefix cache can spare, then takes pool pages away
from the request that was admitted last. Its rows wait on the host, and come back to other slots, bit for bit.

Only pages of prompts are shared. The rows of new tokens come out of another program, whose sums may round differently:
with them in the cache a text could depend on who was served before.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

import jkv
from examples.engine import Engine, Phase, Request, promised
from examples.striped import Server


class Usage(NamedTuple):
    """The pool after a step, in tokens: `free` + `cached` + `used` is its capacity."""

    seconds: float  # since the run began, without the compilation of steps
    free: int
    cached: int  # in the prefix cache, read by running requests or not
    used: int  # by running requests alone
    running: int
    waiting: int
    new_tokens: int  # so far
    retractions: int  # so far


class SharingEngine(Engine):
    """`Engine` with a prefix cache and retraction. `usage` has an entry a step, and `on_step` is called after each."""

    def __init__(
        self,
        server: Server,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        lanes: int,
        on_step: Callable[[Usage], None] | None = None,
    ):
        """As `Engine`, by page."""
        super().__init__(server, prompts, max_new_tokens, lanes, by_page=True)
        self.cache = jkv.RadixCache(self.allocator)
        self.admission = jkv.Admission(self.slots, server.context_len)
        self.on_step = on_step
        self.usage: list[Usage] = []
        self.hit_tokens = self.retractions = 0
        self._matches: dict[Request, jkv.Match] = {}  # of running requests, in the order of their admission: locked
        self._hosts: dict[Request, jkv.HostCopy] = {}  # the rows of those that are put off
        self._began = time.perf_counter()
        self._restore = jkv.checked_jit(lambda pool, host, loc: pool.load_cpu_copy(host, loc), donate_argnums=0)

    def leaked_pages(self) -> int:
        """Pages that neither the allocator nor the cache has, when nothing runs; empties the cache to count them."""
        self.cache.reset()
        return (self.allocator.capacity - self.allocator.available_size()) // self.slots.alloc_page_size

    def _admit(self) -> None:
        """Places the requests that have waited longest, one by one, so that each finds the pages of those before."""
        while self.waiting and None in self.lanes and self._place(self.waiting[0]):
            request = self.waiting.popleft()
            while request.cached < len(request.prompt_ids):
                self._step([request], self.chunk, self.stats.prefill)
        self.stats.running = max(self.stats.running, len(self._running()))

    def _place(self, request: Request) -> bool:
        """Gives a request a lane, and slots: those of its cached prefix, and new ones. False where it has to wait."""
        rows = request.cached or len(request.prompt_ids)
        match = self.cache.match_prefix(np.array(request.prompt_ids[:-1]))  # the last token is run for its logits
        self.cache.inc_lock_ref(match.node)
        shared = match.slots.size
        available = self.allocator.available_size() + self.cache.evictable_size
        if not self.admission.can_admit(rows, available, shared):
            self.cache.dec_lock_ref(match.node)
            return False
        pages = self.admission.extend_pages_needed([shared], [rows])
        self.cache.evict(self.admission.shortfall(pages, self.allocator.available_size()))
        own = promised(self.allocator.alloc_extend([shared], [rows], [-1]))
        request.row, request.shared = int(promised(self.table.alloc(1))[0]), shared
        self._matches[request] = match
        self.table.write(request.row, 0, np.concatenate([match.slots, own]))
        self.lanes[self.lanes.index(None)] = request
        if request in self._hosts:
            # What is in the cache is there already; of the host's rows only the others are written.
            loc = self._padded(request)
            loc[:shared] = 0
            self.pool = self._restore(self.pool, self._hosts.pop(request), loc)
            self._share(request)
        else:
            request.cached = shared
            self.hit_tokens += shared
        return True

    def _extend(self) -> None:
        """Makes room for the step, then as `Engine`."""
        while missing := self.admission.shortfall(
            self.admission.decode_pages_needed([len(r.known) for r in self._running()]), self.allocator.available_size()
        ):
            if not self.cache.evict(missing):
                self._retract(next(reversed(self._matches)))
        super()._extend()

    def _retract(self, request: Request) -> None:
        """Puts a request off, its rows on the host, to be the next that is placed."""
        self._hosts[request] = self.pool.get_cpu_copy(self._padded(request))
        self._leave(request)
        self.waiting.appendleft(request)
        self.retractions += 1

    def _padded(self, request: Request) -> np.ndarray:
        """The slots of a request's rows, padded to the same length for all: one program moves the rows of any."""
        loc = np.zeros(self.table.max_context_len, np.int32)
        loc[: request.cached] = self.table.read(request.row, 0, request.cached)
        return loc

    def _step(self, lanes: Sequence[Request | None], width: int, phase: Phase) -> None:
        super()._step(lanes, width, phase)
        free, cached = self.allocator.available_size(), self.cache.total_size
        used = self.slots.capacity - free - cached
        new = sum(len(request.token_ids) for request in self.requests)
        seconds = time.perf_counter() - self._began - self.stats.compile_seconds
        self.usage.append(
            Usage(seconds, free, cached, used, len(self._running()), len(self.waiting), new, self.retractions)
        )
        if self.on_step:
            self.on_step(self.usage[-1])

    def _take(self, request: Request, token: int) -> None:
        if not request.token_ids:
            self._share(request)
        super()._take(request, token)

    def _share(self, request: Request) -> None:
        """Gives the pages of a prompt, all of whose rows are there, to the cache, and goes on with the cache's."""
        prompt = np.array(request.prompt_ids)
        self.cache.insert(prompt, self.table.read(request.row, 0, prompt.size))
        # Pages that the cache had already are free again: the slots for them are the cache's, not those from before.
        before, match = self._matches[request], self.cache.match_prefix(prompt)
        self.cache.inc_lock_ref(match.node)
        self.cache.dec_lock_ref(before.node)
        self._matches[request], request.shared = match, match.slots.size
        self.table.write(request.row, 0, match.slots)

    def _leave(self, request: Request) -> None:
        super()._leave(request)
        self.cache.dec_lock_ref(self._matches.pop(request).node)
        request.shared = 0
