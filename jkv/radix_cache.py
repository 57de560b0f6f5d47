"""Prefix reuse: which slots hold the keys and values of a prompt's first pages, from an earlier request with the same.

The cache owns pages of an allocator, in a radix tree over token ids. A page of it is one page of the allocator: under
DCP `page_size * dcp_size` tokens. All work on tokens is on whole arrays, and nothing here looks at a clock: the same
calls leave the same cache in every process.
"""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jkv.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from jkv.host_ids import int_array, integer, named, signed_array
from jkv.page_runs import first_slots
from jkv.radix_events import PagesRemoved, PagesStored, page_hashes
from jkv.radix_queue import EvictionQueue
from jkv.radix_tree import Node, RadixTree, Slots


class Match(NamedTuple):
    """What `RadixCache.match_prefix` found.

    Attributes:
      slots: int32 `[n]`, one per token of the cached prefix, the caller's own memory.
      node: the end of that prefix in the tree, to lock and unlock it by.
    """

    slots: Slots
    node: Node


class RadixCache:
    """A page-granular cache from token ids to slots, with locks and least-recently-used eviction.

    A request's life: `match_prefix(prompt[:-1])` (one token has to be computed, for its logits) and `inc_lock_ref` of
    the node; allocation and computation of the rest; `insert` of tokens and slots; `free` of the slots behind the last
    whole page; `dec_lock_ref`. A request that is to go on after `insert` matches again, takes the cache's slots, locks
    the new node and unlocks the old one: its own pages may have been duplicates, which are freed.

    What is inserted is the cache's own: it claims the pages (`allocator.claim`), and from then on only `evict` and
    `reset` free them; the allocator refuses to free them, or to fill them up. The slots of a match are to be read, not
    written: a request goes on in pages of its own. Several caches may share an allocator, each with pages of its own.

    The allocator cannot be taken back behind the cache: `insert`, `evict` and `reset` between its `backup_state` and
    `restore_state` make it refuse the latter, and `clear` needs a `reset` first.

    Args:
      allocator: hands out the pages that will be inserted, and takes back what is evicted.
      enable_events: whether to note what is stored and removed, for `take_events`.

    Attributes:
      allocator: the same.
      alloc_page_size: tokens of a page, the allocator's.

    Raises:
      ValueError: `allocator` is not an allocator.
    """

    def __init__(self, allocator: TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator, *, enable_events: bool = False):
        if not isinstance(allocator, TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator):
            raise ValueError(f"RadixCache: allocator must be one of jkv's allocators, got {type(allocator).__name__}")
        self.allocator = allocator
        self.alloc_page_size = allocator.alloc_page_size
        self._tree = RadixTree(self.alloc_page_size)
        self._total = self._protected = self._clock = 0
        self._queue = EvictionQueue()
        self._events: list[PagesStored | PagesRemoved] | None = [] if enable_events else None

    def __repr__(self) -> str:
        return (
            f"RadixCache(alloc_page_size={self.alloc_page_size}, total_size {self.total_size}, "
            f"protected_size {self.protected_size})"
        )

    @property
    def total_size(self) -> int:
        """Tokens in the cache."""
        return self._total

    @property
    def protected_size(self) -> int:
        """Tokens in the cache that are locked."""
        return self._protected

    @property
    def evictable_size(self) -> int:
        """Tokens in the cache that `evict` can free now."""
        return self._total - self._protected

    def match_prefix(self, token_ids: npt.ArrayLike, extra_key: Hashable = None) -> Match:
        """The longest cached prefix of a sequence, in whole pages; it counts as used now.

        Lock the node before anything else is allocated or evicted: until then the slots may be freed at any time.

        Args:
          token_ids: int `[n]`. An array is much faster than a list.
          extra_key: what else the keys and values depend on (an adapter, a tenant): only entries inserted with an equal
            one match. Any hashable value.

        Returns:
          `Match(slots, node)`; no slots, and the root, where not even the first page is cached.

        Raises:
          TypeError: `token_ids` are not signed integers, or `extra_key` is not hashable.
          ValueError: `token_ids` are not 1-D.
        """
        where = "match_prefix (RadixCache)"
        tokens = signed_array(token_ids, where, "token_ids")
        found = self._tree.find(tokens, _hashable(extra_key, where))
        node = self._tree.cut(found)
        self._touch(found.nodes)
        return Match(self._tree.slots_of(found), node)

    def insert(self, token_ids: npt.ArrayLike, slots: npt.ArrayLike, extra_key: Hashable = None) -> int:
        """Adds the whole pages of a sequence; they count as used now.

        The cache takes over the pages that it did not have. Where it had a prefix already, the caller's pages for it
        are duplicates and are freed to the allocator, except those that are the cache's own, from an earlier match.
        The slots behind the last whole page stay the caller's; they are not read.

        Args:
          token_ids: int `[n]`.
          slots: int `[n]`, the slot of each token: whole pages of consecutive ids, each page's first id a multiple of
            the page, in use, none of them twice, and none that the cache holds for other tokens, or another cache.
          extra_key: as for `match_prefix`.

        Returns:
          How many leading tokens were cached before. The caller's pages for them are gone: match again for the cache's.

        Raises:
          TypeError: `token_ids` or `slots` are not signed integers, or `extra_key` is not hashable.
          ValueError: lengths that differ, or slots that are not as above; they are named, and nothing has changed.
        """
        where, page = "insert (RadixCache)", self.alloc_page_size
        tokens = signed_array(token_ids, where, "token_ids")
        ids = int_array(slots, where, "slots", length=tokens.size)
        extra_key = _hashable(extra_key, where)
        whole = tokens.size // page * page
        first = first_slots(ids[:whole], page, where, "slots")
        idle = ~self.allocator.in_use(first)
        if idle.any():
            raise ValueError(f"{where}: slots holds pages that are not in use, starting at ids {named(first[idle])}")
        found = self._tree.find(tokens, extra_key)
        known = found.length // page
        own = np.zeros(first.size, bool)
        own[:known] = first[:known] == self._tree.slots_of(found)[::page]
        held = self.allocator.claimed(first) & ~own
        if held.any():
            raise ValueError(
                f"{where}: slots holds pages that a cache has already, this one for other tokens or another one, "
                f"starting at ids {named(first[held])}"
            )
        duplicates = first[:known][~own[:known]]
        parent = self._tree.cut(found)
        self._touch(found.nodes)
        if duplicates.size:
            self.allocator.free(duplicates)
        if whole > found.length:
            new = slice(found.length, whole)
            leaf = self._tree.add(parent, extra_key, tokens[new].copy(), ids[new].astype(np.int32))
            leaf.last_use = self._clock
            self.allocator.claim(first[known:])
            self._total += leaf.tokens.size
            self._queue.push(leaf)
            if self._events is not None:
                before = None if parent.hashes is None else int(parent.hashes[-1])
                leaf.hashes = page_hashes(leaf.tokens, page, before)
                self._events.append(PagesStored(extra_key, leaf.hashes, before, leaf.tokens.astype(np.int64)))
        return found.length

    def evict(self, num_tokens: int) -> int:
        """Frees least recently used leaves, whole ones, that are not locked; a parent that is left bare is a leaf too.

        Args:
          num_tokens: how many tokens to free at least.

        Returns:
          The tokens freed: fewer where nothing else may go. With a free group open they become available at its end.

        Raises:
          ValueError: `num_tokens` is negative or not an integer.
        """
        wanted = integer(num_tokens, "evict (RadixCache)", "num_tokens", low=0)
        freed, pages = 0, []  # of each page its first id
        while freed < wanted and (leaf := self._queue.pop()):
            freed += leaf.tokens.size
            pages.append(leaf.slots[:: self.alloc_page_size])
            self._queue.push(self._tree.remove(leaf))
            self._note_removed(leaf)
        if pages:
            self._give_back(np.concatenate(pages))
        return freed

    def inc_lock_ref(self, node: Node) -> None:
        """Locks the prefix that ends with `node` against eviction, until `dec_lock_ref` has been called as often.

        Raises:
          ValueError: `node` is not in this cache, or no longer.
        """
        path = self._path(node, "inc_lock_ref")
        node.held += 1
        for above in path:
            self._protected += above.tokens.size if above.lock_ref == 0 else 0
            above.lock_ref += 1

    def dec_lock_ref(self, node: Node) -> None:
        """Takes back one `inc_lock_ref` of this very node.

        Raises:
          ValueError: `node` is not locked (a lock further down does not count), or not in this cache, or no longer.
        """
        path = self._path(node, "dec_lock_ref")
        if node.held == 0:
            raise ValueError(f"dec_lock_ref (RadixCache): {node} is not locked itself: an unlock without a lock")
        node.held -= 1
        for above in path:
            above.lock_ref -= 1
            self._protected -= above.tokens.size if above.lock_ref == 0 else 0
        self._queue.push(node)

    def reset(self) -> None:
        """Empties the cache and frees its pages to the allocator.

        Raises:
          ValueError: a part is locked, which means that somebody reads it. Nothing has changed.
        """
        if self._protected:
            raise ValueError(f"reset (RadixCache): {self._protected} of {self._total} tokens are locked; unlock first")
        pages = []
        for node in self._tree.clear():
            pages.append(node.slots[:: self.alloc_page_size])
            self._note_removed(node)
        self._queue.clear()
        if pages:
            self._give_back(np.concatenate(pages))

    def take_events(self) -> list[PagesStored | PagesRemoved]:
        """What has been stored and removed since the last call, in order.

        Raises:
          ValueError: the cache was made without `enable_events=True`.
        """
        if self._events is None:
            raise ValueError("take_events (RadixCache): the cache was made without enable_events=True")
        events, self._events = self._events, []
        return events

    def _touch(self, nodes: list[Node]) -> None:
        self._clock += 1
        for node in nodes:
            node.last_use = self._clock

    def _give_back(self, first: npt.NDArray[np.integer]) -> None:
        """Frees pages, given by their first ids."""
        self._total -= first.size * self.alloc_page_size
        self.allocator.unclaim(first)
        self.allocator.free(first)

    def _note_removed(self, node: Node) -> None:
        if self._events is not None and node.hashes is not None:
            self._events.append(PagesRemoved(node.extra_key, node.hashes))

    def _path(self, node: Node, operation: str) -> list[Node]:
        path = self._tree.path_up(node) if isinstance(node, Node) else None
        if path is None:
            raise ValueError(f"{operation} (RadixCache): node must be a node that is in this cache, got {node!r}")
        return path


def _hashable(extra_key: Hashable, where: str) -> Hashable:
    try:
        hash(extra_key)
    except TypeError:
        raise TypeError(f"{where}: extra_key must be hashable, got {type(extra_key).__name__}") from None
    return extra_key
