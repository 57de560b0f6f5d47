"""Handing out slot ids on the host, from pools of 10,000 and of a million pages of 16 slots.

Half of each pool is in use, and what is free lies scattered. A round allocates 64 pages, extends 256 requests by 100
tokens each, takes one decode token for each of 256 requests, and frees what each of the three took:

  list   a free list in plain Python: no checks, pages popped from a list's end, a `range` for each page
  jkv    `PagedTokenToKVPoolAllocator`

Times are medians; the last rows are those that depend on the pool. A call of jkv that finds its ascending list short
first merges what was freed since the last time into it: `alloc, merging` is the worst case, with half of the pool to
merge, paid once while that half is handed out (the mean of a whole round holds the usual share). `backup_state` and
`restore_state` copy a byte a page.
"""

import collections
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import jkv
from benchmarks import report

PAGE, REQUESTS, GROWTH, ALLOC_PAGES = 16, 256, 100, 64
POOLS = {"10k": 10_000, "1M": 1_000_000}
OPERATIONS = ("alloc", "free", "alloc_extend", "free (extend)", "alloc_decode", "free (decode)")
WHOLE_POOL = ("alloc, merging", "backup_state", "restore_state")
TURN = 5  # rounds in a row, so that a contender mostly finds its own data in the caches


class PlainList:
    """What one would write first: a Python list of free pages."""

    def __init__(self, pages: int):
        self.pages = list(range(pages, 0, -1))

    def alloc(self, n: int) -> np.ndarray | None:
        """`n` slots, whole pages."""
        return self.alloc_extend([0], [n], [-1])

    def alloc_extend(self, prefix_lens: Any, seq_lens: Any, last_loc: Any) -> np.ndarray | None:
        """Fills up each request's last page, then takes new pages."""
        needed = sum(-(-seq // PAGE) + (-prefix // PAGE) for prefix, seq in zip(prefix_lens, seq_lens, strict=True))
        if needed > len(self.pages):
            return None
        out: list[int] = []
        for prefix, seq, last in zip(prefix_lens, seq_lens, last_loc, strict=True):
            rest = min(seq - prefix, -prefix % PAGE)
            out.extend(range(last + 1, last + 1 + rest))
            for left in range(seq - prefix - rest, 0, -PAGE):
                start = self.pages.pop() * PAGE
                out.extend(range(start, start + min(left, PAGE)))
        return np.array(out, np.int32)

    def alloc_decode(self, seq_lens: Any, last_loc: Any) -> np.ndarray | None:
        """One slot for each request."""
        return self.alloc_extend([seq - 1 for seq in seq_lens], seq_lens, last_loc)

    def free(self, loc: np.ndarray) -> None:
        """Frees the pages of `loc`."""
        self.pages.extend({slot // PAGE for slot in loc.tolist()})


def timer(times: dict[str, list[float]]) -> Callable[..., Any]:
    """A function that calls its second argument on the rest and notes the time under its first."""

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments)
        times[name].append(time.perf_counter() - start)
        return result

    return timed


class Round:
    """One allocator with half of its pages in use, and the batches that a round serves from it."""

    def __init__(self, make: Callable[[int], Any], pages: int):
        rng = np.random.default_rng(0)
        self.allocator = make(pages)
        self.allocator.alloc(pages * PAGE)
        order = rng.permutation(pages).astype(np.int32) + 1
        self.allocator.free(order[: pages // 2] * PAGE)
        self.unmerged = None if isinstance(self.allocator, PlainList) else self.allocator.backup_state()
        in_use = order[pages // 2 :][:REQUESTS]
        prefix = rng.integers(1, 2000, REQUESTS)
        last = in_use * PAGE + (prefix - 1) % PAGE
        lists = self.unmerged is None  # the plain one is fastest on lists
        self.prefix, self.last = (x.tolist() if lists else x for x in (prefix, last))
        self.grown, self.decoded = (x.tolist() if lists else x for x in (prefix + GROWTH, prefix + 1))
        position = np.concatenate([np.arange(p, p + GROWTH) for p in prefix])
        self.on_new_page = position - np.repeat(prefix, GROWTH) >= np.repeat(-prefix % PAGE, GROWTH)
        self.decode_on_new_page = prefix % PAGE == 0

    def run(self, times: dict[str, list[float]]) -> None:
        """Adds the seconds of each operation, once each, to `times`."""
        timed, a = timer(times), self.allocator
        timed("free", a.free, timed("alloc", a.alloc, ALLOC_PAGES * PAGE))
        slots = timed("alloc_extend", a.alloc_extend, self.prefix, self.grown, self.last)
        timed("free (extend)", a.free, slots[self.on_new_page])
        slots = timed("alloc_decode", a.alloc_decode, self.decoded, self.last)
        timed("free (decode)", a.free, slots[self.decode_on_new_page])

    def run_whole_pool(self, times: dict[str, list[float]]) -> None:
        """The same for what costs in proportion to the pool."""
        if self.unmerged is not None:
            timed, a = timer(times), self.allocator
            state = timed("backup_state", a.backup_state)
            a.restore_state(self.unmerged)
            timed("alloc, merging", a.alloc, ALLOC_PAGES * PAGE)
            timed("restore_state", a.restore_state, state)


def cell(key: str, value: Any) -> str:
    """A measurement as the table shows it."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.2f}" if "/" in key else report.microseconds(value)


def main() -> None:
    """Prints the table."""
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="time for the whole table (default 10)")
    options = parser.parse_args()
    makers = {"list": PlainList, "jkv": lambda pages: jkv.PagedTokenToKVPoolAllocator(pages * PAGE, PAGE)}
    rounds = {(name, pool): Round(make, POOLS[pool]) for pool in POOLS for name, make in makers.items()}
    times: dict[Any, dict[str, list[float]]] = {key: collections.defaultdict(list) for key in rounds}
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        for key, contender in rounds.items():
            for _ in range(TURN):
                contender.run(times[key])
            contender.run_whole_pool(times[key])
    measurements: list[dict[str, Any]] = []
    for operation in (*OPERATIONS, "all six, mean", *WHOLE_POOL):
        row: dict[str, Any] = {"operation": operation}
        for (name, pool), seen in times.items():
            if operation == "all six, mean":
                row[f"{name} {pool}"] = sum(statistics.mean(seen[one]) for one in OPERATIONS)
            elif seen[operation]:
                row[f"{name} {pool}"] = statistics.median(seen[operation])
            else:
                row[f"{name} {pool}"] = None
        row["jkv 1M / 10k"] = row["jkv 1M"] / row["jkv 10k"]
        row["list / jkv, 1M"] = None if row["list 1M"] is None else row["list 1M"] / row["jkv 1M"]
        measurements.append(row)
    lines = [[cell(key, value) for key, value in row.items()] for row in measurements]
    title = f"Host-side allocation, microseconds a call, {len(times['jkv', '1M']['alloc'])} rounds"
    print(report.table(title, list(measurements[0]), lines))
    report.write_json(options.json, measurements)


if __name__ == "__main__":
    main()
