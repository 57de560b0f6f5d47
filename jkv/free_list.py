"""Which of the items 1, 2, ... `count` are free: the one bookkeeping under both allocators and the request table.

Every operation costs what it moves, not what the pool holds: items are handed out from the front of an ascending array
by advancing a position, and given-back ones are collected in a second array. Only when the front runs short are the two
merged and sorted, so that long-lived pools keep handing out ascending runs (the scheme of SGLang's page allocator).
"""

import dataclasses
import hashlib

import numpy as np
import numpy.typing as npt

from jkv.host_ids import named

_FREE, _HELD, _RESERVED, _USED, _CLAIMED = range(5)  # the last two are in use
# Sorting n items takes about as long as scanning this many times n states (measured at a million).
_SCAN_INSTEAD_OF_SORT = 64


def _first_of_runs(values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    first = np.ones(values.size, bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FreeListState:
    """A copy of a `FreeList`'s state, for `FreeList.restore` of the same list, any number of times."""

    owner: "FreeList"
    front: npt.NDArray[np.int32]
    taken: int
    returned: npt.NDArray[np.int32]
    states: npt.NDArray[np.uint8]
    held: tuple[npt.NDArray[np.int32], ...] | None
    claims: int

    def __repr__(self) -> str:
        return f"FreeListState(free {self.front.size - self.taken + self.returned.size})"


class FreeList:
    """Items `1 ... count`, all free at first; item 0 is reserved for good. Not thread safe.

    Args:
      count: number of items.
    """

    def __init__(self, count: int):
        self.count = count
        self._returned: npt.NDArray[np.int32] = np.empty(count, np.int32)
        self._claims = 0  # how often items were claimed or unclaimed; never set back
        self.clear()

    def clear(self) -> None:
        """All items free again, no group open. Claimed items too: whoever claimed them has to forget them."""
        # Never written to in place: a state of `backup` shares it.
        self._front: npt.NDArray[np.int32] = np.arange(1, self.count + 1, dtype=np.int32)
        self._taken = 0
        self._num_returned = 0
        self._states: npt.NDArray[np.uint8] = np.full(self.count + 1, _FREE, np.uint8)
        self._states[0] = _RESERVED
        self._held: list[npt.NDArray[np.int32]] | None = None

    @property
    def available(self) -> int:
        """Items that `take` can hand out now; those held by an open group are not among them."""
        return self._front.size - self._taken + self._num_returned

    def take(self, n: int) -> npt.NDArray[np.int32] | None:
        """The next `n` items, or None, with nothing changed, where fewer are free.

        Returns:
          int32 `[n]`, a view of internal memory: for the caller to compute from, not to keep or to change.
        """
        if n > self.available:
            return None
        if n > self._front.size - self._taken:
            self._merge()
        items = self._front[self._taken : self._taken + n]
        self._taken += n
        self._states[items] = _USED
        return items

    def _merge(self) -> None:
        if self.available * _SCAN_INSTEAD_OF_SORT > self.count:
            self._front = np.flatnonzero(self._states == _FREE).astype(np.int32)
        else:
            self._front = np.concatenate([self._front[self._taken :], self._returned[: self._num_returned]])
            self._front.sort()
        self._taken = self._num_returned = 0

    def in_use(self, items: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """For each of `items` (all in `[0, count]`): is it handed out, and not yet given back (to a group neither)?"""
        return self._states[items] >= _USED

    def claimed(self, items: npt.NDArray[np.integer] | slice = slice(None)) -> npt.NDArray[np.bool_]:
        """For each of `items` (all in `[0, count]`; by default these, in order): is it in use and claimed?"""
        return self._states[items] == _CLAIMED

    def claim(self, items: npt.NDArray[np.int32]) -> None:
        """Marks `items`, which must be in use and not claimed, as those of an owner that alone gives them back."""
        self._states[items] = _CLAIMED
        self._claims += 1

    def unclaim(self, items: npt.NDArray[np.int32]) -> None:
        """Takes the mark off `items`, which must be claimed: they are in use as any others."""
        self._states[items] = _USED
        self._claims += 1

    def items_of(
        self, ids: npt.NDArray[np.int64], page: int, where: str, name: str, *, distinct: bool, claimed: bool = False
    ) -> npt.NDArray[np.int32]:
        """The distinct items that `ids` belong to (`page` consecutive ids each), all in use, and all claimed or none.

        Args:
          distinct: refuse an id that occurs twice; otherwise several ids of one item stand for that item.
          claimed: whether the items must be claimed, or must not be.

        Raises:
          ValueError: ids of no such item; all of them are named, by what is wrong with them.
        """
        if not ids.size:
            return ids.astype(np.int32)
        low, high = page, (self.count + 1) * page
        if ids.min() >= low and ids.max() < high:
            items = _first_of_runs((ids // page).astype(np.int32))  # ids of a page stand together: little left to sort
            if (items[1:] <= items[:-1]).any():
                items.sort()
                items = _first_of_runs(items)
            right = self._states[items] == (_CLAIMED if claimed else _USED)
            if right.all() and (items.size == ids.size or not distinct):
                return items
        inside = (ids >= low) & (ids < high)
        states = self._states[np.where(inside, ids // page, 0)]
        ordered = np.sort(ids[inside])
        wrong = {
            f"outside [{low}, {high}), which is what can be handed out": ids[~inside],
            "not in use (never handed out, or freed before)": ids[inside & (states == _FREE)],
            "freed before in this free group": ids[states == _HELD],
            "in use, but claimed by no cache": ids[(states == _USED) & claimed],
            "a prefix cache holds them: its evict or reset frees them": ids[(states == _CLAIMED) & (not claimed)],
            "given twice": np.unique(ordered[1:][ordered[1:] == ordered[:-1]]) if distinct else ids[:0],
        }
        found = "; ".join(f"{named(bad)} ({why})" for why, bad in wrong.items() if bad.size)
        raise ValueError(f"{where}: {name} holds {found}")

    def give_back(self, items: npt.NDArray[np.int32]) -> None:
        """Frees `items`: in use, not claimed and distinct; with a group open they are held until it ends."""
        if self._held is None:
            self._release(items)
        else:
            self._states[items] = _HELD
            self._held.append(items)

    def _release(self, items: npt.NDArray[np.int32]) -> None:
        end = self._num_returned + items.size
        self._returned[self._num_returned : end] = items
        self._num_returned = end
        self._states[items] = _FREE

    def begin_group(self) -> bool:
        """Opens a group. False, with nothing changed, where one is open: its held items would be lost."""
        if self._held is not None:
            return False
        self._held = []
        return True

    def end_group(self) -> None:
        """Frees what the open group holds and closes it. Without an open group nothing happens."""
        held, self._held = self._held, None
        for items in held or ():
            self._release(items)

    def backup(self) -> FreeListState:
        """The state, an open group included. Copies a byte an item, and the items given back since the last merge."""
        held = None if self._held is None else tuple(self._held)
        returned = self._returned[: self._num_returned].copy()
        return FreeListState(self, self._front, self._taken, returned, self._states.copy(), held, self._claims)

    def restore(self, state: FreeListState, where: str) -> None:
        """Back to `state`, exactly: the same later calls hand out the same items as they would have then.

        Raises:
          ValueError: `state` is not one of this list's, or items were claimed or unclaimed since: their owner would
            not know. Nothing has changed.
        """
        if not isinstance(state, FreeListState):
            raise ValueError(f"{where}: expected what backup_state returned, got {type(state).__name__}")
        if state.owner is not self:
            raise ValueError(f"{where}: the state was taken from another allocator")
        if state.claims != self._claims:
            raise ValueError(
                f"{where}: a prefix cache took over or freed pages since the state was taken, and would not know: "
                "free what was allocated since instead"
            )
        self._front, self._taken = state.front, state.taken
        self._num_returned = state.returned.size
        self._returned[: state.returned.size] = state.returned
        self._states[:] = state.states
        self._held = None if state.held is None else list(state.held)

    def fingerprint(self, *geometry: int) -> str:
        """Hex digest of `geometry` and of all that future calls depend on. O(count)."""
        held = np.flatnonzero(self._states == _HELD)
        returned: npt.NDArray[np.int32] = np.sort(self._returned[: self._num_returned])
        claimed = np.flatnonzero(self.claimed())
        parts = [self._front[self._taken :], returned, held.astype(np.int32), claimed.astype(np.int32)]
        sizes = [*geometry, self.count, self._held is None, *(part.size for part in parts)]
        return hashlib.blake2b(np.concatenate([sizes, *parts]).astype("<i8").tobytes(), digest_size=16).hexdigest()
