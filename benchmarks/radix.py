"""A prefix cache that holds a million tokens: match, insert, evict, and a prompt of 100,000 tokens.

The cache holds 1,125 conversations of 992 tokens that begin with one of 20 system prompts of 192 tokens each, and a
document of 100,000 tokens. A round matches the document, matches five conversations, inserts five with 256 new tokens
behind a cached system prompt, and evicts as many tokens, which takes the least recently used leaves of all.

  trie   a node for every token, in plain Python: a dict of children; evicting collects all leaves into a heap first
  jkv    `RadixCache`, pages of 16 tokens

`loop over tokens` is the time that Python needs to compare the document with a list token by token: what the match has
to beat. Medians. Tokens come as an array to jkv and as a list to the trie, as each likes them best.
"""

import collections
import heapq
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import report
from jkv.allocator import PagedTokenToKVPoolAllocator
from jkv.radix_cache import RadixCache

PAGE, VOCABULARY = 16, 50_000
SYSTEMS, SYSTEM, CONVERSATIONS, CONVERSATION, DOCUMENT, ADDED = 20, 192, 1_125, 1_000 // PAGE * PAGE, 100_000, 256
POOL = 1_200_000 // PAGE * PAGE


class TrieNode:
    """A token."""

    __slots__ = ("children", "last_use", "parent", "slot", "token")

    def __init__(self, parent: "TrieNode | None", token: int, slot: int):
        self.parent, self.token, self.slot = parent, token, slot
        self.children: dict[int, TrieNode] = {}
        self.last_use = 0


class Trie:
    """What one would write first: a node for every token."""

    def __init__(self) -> None:
        self.root, self.clock, self.size = TrieNode(None, -1, 0), 0, 0
        self.free: list[int] = []

    def match(self, tokens: list[int]) -> tuple[list[int], TrieNode]:
        """Slots of the longest cached prefix, and its last node."""
        self.clock += 1
        node, slots = self.root, []
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                break
            node = child
            node.last_use = self.clock
            slots.append(node.slot)
        return slots, node

    def insert(self, tokens: list[int], slots: list[int]) -> int:
        """Adds a sequence; the slots of what was there before are freed."""
        known, node = self.match(tokens)
        self.free.extend(slots[: len(known)])
        for token, slot in zip(tokens[len(known) :], slots[len(known) :], strict=True):
            child = TrieNode(node, token, slot)
            child.last_use = self.clock
            node.children[token] = child
            node = child
        self.size += len(tokens) - len(known)
        return len(known)

    def evict(self, num_tokens: int) -> int:
        """Frees the least recently used leaves."""
        leaves: list[tuple[int, int, TrieNode]] = []
        stack, number = [self.root], itertools.count()
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children:
                leaves.append((node.last_use, next(number), node))
        heapq.heapify(leaves)
        freed = 0
        while freed < num_tokens and leaves:
            node = heapq.heappop(leaves)[2]
            parent = node.parent
            if parent is None:
                break
            del parent.children[node.token]
            self.free.append(node.slot)
            freed += 1
            if not parent.children:
                heapq.heappush(leaves, (parent.last_use, next(number), parent))
        self.size -= freed
        return freed


class Prompts:
    """The document, and conversations without end that share a few system prompts."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.document = self.tokens(DOCUMENT)
        self.systems = [self.tokens(SYSTEM) for _ in range(SYSTEMS)]

    def tokens(self, n: int) -> np.ndarray:
        """`n` random tokens."""
        return self.rng.integers(0, VOCABULARY, n).astype(np.int32)

    def conversation(self, n: int) -> np.ndarray:
        """A system prompt and `n` tokens more."""
        return np.concatenate([self.systems[self.rng.integers(SYSTEMS)], self.tokens(n)])


def loop(tokens: list[int], stored: list[int]) -> int:
    """How many tokens agree, one at a time."""
    same = 0
    for mine, its in zip(tokens, stored, strict=True):
        if mine != its:
            break
        same += 1
    return same


def main() -> None:
    """Prints the table."""
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="time for the rounds (default 10)")
    options = parser.parse_args()
    prompts, allocator, trie = Prompts(), PagedTokenToKVPoolAllocator(POOL, PAGE), Trie()
    cache = RadixCache(allocator)
    times: dict[tuple[str, str], list[float]] = collections.defaultdict(list)

    def timed(operation: str, contender: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments)
        times[operation, contender].append(time.perf_counter() - start)
        return result

    def insert(tokens: np.ndarray) -> None:
        """Into both, timed: what is new behind the prefix that is cached."""
        found = cache.match_prefix(tokens).slots
        fresh: Any = allocator.alloc(tokens.size - found.size)
        timed(f"insert {ADDED} new tokens", "jkv", cache.insert, tokens, np.concatenate([found, fresh]))
        listed, slots = tokens.tolist(), [*found.tolist(), *fresh.tolist()]
        timed(f"insert {ADDED} new tokens", "trie", trie.insert, listed, slots)

    conversations = [prompts.conversation(CONVERSATION - SYSTEM) for _ in range(CONVERSATIONS)]
    for tokens in (prompts.document, *conversations):
        insert(tokens)
    times.clear()
    cached = cache.total_size
    document = prompts.document.tolist()
    copy = prompts.document.tolist()
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end or len(times["loop over tokens", "trie"]) < 3:
        timed("loop over tokens", "trie", loop, document, copy)
        timed("match 100,000 tokens", "trie", trie.match, document)
        timed("match 100,000 tokens", "jkv", cache.match_prefix, prompts.document)
        for _ in range(5):
            known = conversations[prompts.rng.integers(CONVERSATIONS // 2, CONVERSATIONS)]
            timed(f"match {CONVERSATION} tokens", "trie", trie.match, known.tolist())
            timed(f"match {CONVERSATION} tokens", "jkv", cache.match_prefix, known)
            insert(prompts.conversation(ADDED))
        timed(f"evict {5 * ADDED} tokens", "trie", trie.evict, 5 * ADDED)
        timed(f"evict {5 * ADDED} tokens", "jkv", cache.evict, 5 * ADDED)

    measurements: list[dict[str, Any]] = []
    for operation in dict.fromkeys(operation for operation, _ in times):
        row: dict[str, Any] = {"operation": operation}
        row |= {who: statistics.median(times[operation, who]) for who in ("trie", "jkv") if times[operation, who]}
        row["trie / jkv"] = row["trie"] / row["jkv"] if "jkv" in row else None
        measurements.append(row)
    matching = measurements[0]["trie"] / measurements[1]["jkv"]
    lines = [
        [
            row["operation"],
            report.microseconds(row["trie"]),
            report.microseconds(row["jkv"]) if "jkv" in row else "",
            f"{row['trie / jkv']:.1f}" if row["trie / jkv"] else "",
        ]
        for row in measurements
    ]
    title = f"Prefix cache with {cached:,} tokens, microseconds a call"
    print(report.table(title, ["operation", "trie", "jkv", "trie / jkv"], lines))
    print(f"Matching 100,000 tokens takes jkv 1/{matching:.0f} of the loop over them.")
    report.write_json(options.json, measurements)


if __name__ == "__main__":
    main()
