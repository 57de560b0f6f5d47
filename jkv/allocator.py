"""Who gets which slot: allocation of logical slot ids on the host, in numpy, with pages widened by `dcp_size`.

An allocator hands out whole pages of `page_size * dcp_size` ids, so that each request starts on rank 0 of a page of its
own; page 0 is the padding page. Nothing here touches a device, and the same calls give the same ids in every process.

A page has one owner, and no count of references. That is the request that it was allocated for: the ids behind its last
token, up to the page's end, are that request's to take next, and it frees the page. Or it is a prefix cache that has
claimed the page: then only the cache frees it. Requests may read the same whole pages (of a cache, which locks them); a
fork of one takes a page of its own for a last page that is not full, and copies the tokens there (`move_kv_cache`).
"""

import numpy as np
import numpy.typing as npt

from jkv.free_list import FreeList, FreeListState
from jkv.host_ids import INT32_MAX, int_array, integer, named
from jkv.page_plan import Plan, Slots, pages_needed, plan_decode, plan_extend, slots_of


class _PageAllocator:
    """The operations of both allocators. `_one_id_once`: a call of `free` may name an id, or else a page, only once."""

    _one_id_once: bool

    def __init__(self, size: int, page_size: int, dcp_size: int):
        name = type(self).__name__
        self.size = integer(size, name, "size", low=1)
        self.page_size = integer(page_size, name, "page_size", low=1)
        self.dcp_size = integer(dcp_size, name, "dcp_size", low=1)
        if self.size % self.page_size:
            raise ValueError(f"{name}: size must be a multiple of page_size {self.page_size}, got {self.size}")
        self.alloc_page_size = self.page_size * self.dcp_size
        self.capacity = self.size * self.dcp_size
        self.bound = self.capacity + self.alloc_page_size
        if self.bound > INT32_MAX:
            raise ValueError(
                f"{name}: (size {self.size} + page_size {self.page_size}) * dcp_size {self.dcp_size} = {self.bound} "
                f"slot ids do not fit int32 (at most {INT32_MAX})"
            )
        self._pages = FreeList(self.size // self.page_size)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(size={self.size}, page_size={self.page_size}, dcp_size={self.dcp_size}, "
            f"available {self.available_size()} of {self.capacity})"
        )

    def _where(self, operation: str) -> str:
        return f"{operation} ({type(self).__name__})"

    def available_size(self) -> int:
        """Slot ids that can be handed out now, over all ranks together, without those that an open free group holds."""
        return self._pages.available * self.alloc_page_size

    def alloc(self, n: int) -> Slots | None:
        """`n` slot ids: whole pages, in ascending order within each.

        Args:
          n: number of ids, a multiple of `alloc_page_size`.

        Returns:
          int32 `[n]`, the caller's own memory; or None, with nothing taken, where fewer are available.

        Raises:
          ValueError: `n` is negative, not an integer, or not a multiple of the page.
        """
        where, page = self._where("alloc"), self.alloc_page_size
        n = integer(n, where, "n", low=0)
        if n % page:
            raise ValueError(
                f"{where}: n must be a multiple of {page} = page_size {self.page_size} * dcp_size {self.dcp_size}, "
                f"got {n}"
            )
        pages = self._pages.take(n // page)
        if pages is None:
            return None
        slots: Slots = np.repeat(pages * np.int32(page), page).reshape(-1, page)
        slots += np.arange(page, dtype=np.int32)
        return slots.reshape(-1)

    def alloc_extend(
        self, prefix_lens: npt.ArrayLike, seq_lens: npt.ArrayLike, last_loc: npt.ArrayLike
    ) -> Slots | None:
        """Slots for the tokens by which each request of a batch grows from `prefix_lens` to `seq_lens`.

        A request first fills up the page of its last token, then takes new pages. A caller that gave tokens up without
        freeing their page (a rejected draft) extends from the last token that it kept, and gets the same slots again.

        Args:
          prefix_lens: int `[n]`, tokens that each request has slots for.
          seq_lens: int `[n]`, tokens that it is to have slots for, >= `prefix_lens`.
          last_loc: int `[n]`, slot of its token `prefix_len - 1`; not read where the prefix ends with its page.

        Returns:
          int32 `[sum(seq_lens - prefix_lens)]` in request order, the caller's own memory; or None, with nothing taken,
          where too few pages are free.

        Raises:
          TypeError: an argument that does not hold signed integers.
          ValueError: a wrong shape or length; lengths out of order; a `last_loc` that does not stand where its prefix
            ends, whose page is not in use, or whose page a prefix cache holds or another request of the call fills up
            too.
        """
        where = self._where("alloc_extend")
        return self._take(where, plan_extend(where, prefix_lens, seq_lens, last_loc, self.alloc_page_size, self.bound))

    def alloc_decode(self, seq_lens: npt.ArrayLike, last_loc: npt.ArrayLike) -> Slots | None:
        """One slot for the next token of each request.

        Args:
          seq_lens: int `[n]`, tokens of each request, the new one included.
          last_loc: int `[n]`, slot of its token `seq_len - 2`. Not read where the new token starts a page (pass -1).

        Returns:
          int32 `[n]`, the caller's own memory; or None, with nothing taken, where too few pages are free.

        Raises:
          TypeError, ValueError: as `alloc_extend`.
        """
        where = self._where("alloc_decode")
        return self._take(where, plan_decode(where, seq_lens, last_loc, self.alloc_page_size, self.bound))

    def _take(self, where: str, plan: Plan) -> Slots | None:
        # last_page 0 stands for "no page to fill up"; a last_loc on page 0 itself did not get this far.
        idle = (plan.last_page > 0) & ~self._pages.in_use(plan.last_page)
        if idle.any():
            requests = np.flatnonzero(idle)
            raise ValueError(
                f"{where}: last_loc of requests {named(requests)}: {named(plan.start[idle] - 1)} lie on pages that are "
                "not in use: the slots behind them belong to nobody, or to another request soon"
            )
        cached = (plan.partial > 0) & self._pages.claimed(plan.last_page)
        if cached.any():
            requests = np.flatnonzero(cached)
            raise ValueError(
                f"{where}: last_loc of requests {named(requests)}: {named(plan.start[cached] - 1)} lie on pages that a "
                "prefix cache holds, with its tokens in the slots behind them: take a page and copy the request's "
                "tokens there (move_kv_cache)"
            )
        needed = pages_needed(plan, self._pages.available)
        pages = None if needed is None else self._pages.take(needed)
        return None if pages is None else slots_of(plan, pages, self.alloc_page_size)

    def free(self, loc: npt.ArrayLike) -> None:
        """Gives slot ids back; inside a free group they become available when the group ends.

        The paged allocator frees whole pages: any id of a page stands for it, several ids of it in one call count once,
        and all of its ids are gone. Free a request's ids together, and never a part of a page that is still read. Pages
        that a prefix cache holds are not a request's to free.

        Args:
          loc: int `[n]`, ids in use.

        Raises:
          TypeError: `loc` does not hold signed integers.
          ValueError: ids that are out of range, on the padding page, not in use, claimed by a cache, or freed before,
            in this free group too; for `TokenToKVPoolAllocator` an id that stands twice in `loc`. They are named, and
            nothing is freed.
        """
        self._pages.give_back(self._items_of(loc, "free"))

    def _items_of(self, loc: npt.ArrayLike, operation: str, *, claimed: bool = False) -> Slots:
        where = self._where(operation)
        return self._pages.items_of(
            int_array(loc, where, "loc"),
            self.alloc_page_size,
            where,
            "loc",
            distinct=self._one_id_once,
            claimed=claimed,
        )

    def claim(self, loc: npt.ArrayLike) -> None:
        """Makes pages a prefix cache's own: in use, but neither to be freed nor to be filled up until `unclaim`.

        For caches; `RadixCache` claims what is inserted, and unclaims and frees what it evicts.

        Args:
          loc: int `[n]`, ids in use that nobody has claimed; as for `free`, any id of a page stands for it.

        Raises:
          TypeError, ValueError: as `free`. Nothing has changed.
        """
        self._pages.claim(self._items_of(loc, "claim"))

    def unclaim(self, loc: npt.ArrayLike) -> None:
        """Gives claimed pages up: they are in use as those of a request, and `free` takes them.

        For the cache that claimed them.

        Raises:
          TypeError, ValueError: as `free`, and pages that are not claimed. Nothing has changed.
        """
        self._pages.unclaim(self._items_of(loc, "unclaim", claimed=True))

    def in_use(self, loc: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether the page of each slot id is handed out now: not freed since, to an open free group neither.

        Pages that a prefix cache holds are in use too.

        Args:
          loc: int `[n]`, any ids. Those that are never handed out, out of range or on the padding page, are not in use.

        Returns:
          bool `[n]`.

        Raises:
          TypeError: `loc` does not hold signed integers.
          ValueError: `loc` is not 1-D.
        """
        return self._pages.in_use(self._pages_of(loc, "in_use"))

    def claimed(self, loc: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether a prefix cache holds the page of each slot id; else as `in_use`."""
        return self._pages.claimed(self._pages_of(loc, "claimed"))

    def _pages_of(self, loc: npt.ArrayLike, operation: str) -> npt.NDArray[np.int64]:
        ids = int_array(loc, self._where(operation), "loc")
        inside = (ids >= self.alloc_page_size) & (ids < self.bound)
        return np.where(inside, ids // self.alloc_page_size, 0)  # page 0 is reserved: neither in use nor claimed

    def free_group_begin(self) -> None:
        """Opens a free group: what is freed from now on becomes available together, at `free_group_end`.

        Raises:
          ValueError: a group is open already (which stays as it is).
        """
        if not self._pages.begin_group():
            raise ValueError(f"{self._where('free_group_begin')}: a free group is open already; groups do not nest")

    def free_group_end(self) -> None:
        """Makes what the open group holds available, and closes it. Without an open group nothing happens."""
        self._pages.end_group()

    def clear(self) -> None:
        """Back to the state after construction: every id available, no free group open.

        Raises:
          ValueError: a prefix cache holds pages, and would go on to match them. Nothing has changed.
        """
        claimed = np.flatnonzero(self._pages.claimed())
        if claimed.size:
            raise ValueError(
                f"{self._where('clear')}: a prefix cache holds {claimed.size} pages, starting at ids "
                f"{named(claimed * self.alloc_page_size)}: reset it first"
            )
        self._pages.clear()

    def backup_state(self) -> FreeListState:
        """The state, for `restore_state` to come back to (a draft may be rejected). Copies about a byte a page."""
        return self._pages.backup()

    def restore_state(self, state: FreeListState) -> None:
        """Back to `state`, exactly, as often as wanted: what was taken since is free, what was freed is in use again.

        Raises:
          ValueError: `state` does not come from this allocator's `backup_state`, or a prefix cache claimed or freed
            pages since. Nothing has changed.
        """
        self._pages.restore(state, self._where("restore_state"))

    def fingerprint(self) -> str:
        """Hex digest of the state: where it is equal in two processes, the same calls will give them the same ids."""
        return self._pages.fingerprint(self.size, self.page_size, self.dcp_size)


class TokenToKVPoolAllocator(_PageAllocator):
    """Allocates single slots: pages of one id, ids `1 ... size`.

    `alloc_extend` and `alloc_decode` work too (`last_loc` is never read), so that a scheduler can use either allocator.

    Args:
      size: tokens that can be handed out.
      dcp_size: must be 1, see below.

    Raises:
      ValueError: `dcp_size` above 1: a request must then start on rank 0, so it needs pages of `dcp_size` ids, which
        `PagedTokenToKVPoolAllocator` with `page_size=1` hands out. Or a size that is not positive or passes int32.
    """

    _one_id_once = True

    def __init__(self, size: int, dcp_size: int = 1):
        if integer(dcp_size, type(self).__name__, "dcp_size", low=1) > 1:
            raise ValueError(
                f"TokenToKVPoolAllocator: dcp_size must be 1, got {dcp_size}; use "
                f"PagedTokenToKVPoolAllocator(size={size}, page_size=1, dcp_size={dcp_size}), whose pages are "
                f"{dcp_size} ids, so that each request starts on rank 0"
            )
        super().__init__(size, 1, 1)


class PagedTokenToKVPoolAllocator(_PageAllocator):
    """Allocates pages of `page_size * dcp_size` logical slot ids; the first page is reserved.

    Args:
      size: tokens that one DCP rank can hold, a multiple of `page_size`.
      page_size: tokens of a page on one rank.
      dcp_size: ranks that share the tokens of one sequence.

    Attributes:
      alloc_page_size: ids of a page, `page_size * dcp_size`.
      capacity: ids that can be handed out, `size * dcp_size`.
      bound: ids lie below it, `(size + page_size) * dcp_size`.

    Raises:
      ValueError: a size that is not positive, no multiple of the page, or whose ids do not fit int32.
    """

    _one_id_once = False

    def __init__(self, size: int, page_size: int, dcp_size: int = 1):
        super().__init__(size, page_size, dcp_size)
