"""The table from a running request and a position to the slot that holds that token, on the host."""

from typing import Any

import numpy as np
import numpy.typing as npt

from jkv.free_list import FreeList
from jkv.host_ids import INT32_MAX, int_array, integer, named


class ReqToTokenPool:
    """Rows of slot ids, one for each running request; row 0 is reserved and stays zero.

    A row is zero from its last written position on, and all zero when it is handed out: the ids of an earlier request
    cannot be read through it. No token has slot 0, so a zero means that nothing has been written there.

    Args:
      size: requests that can run at once.
      max_context_len: tokens that a request can have.

    Raises:
      ValueError: an argument that is not a positive integer.
    """

    def __init__(self, size: int, max_context_len: int):
        self.size = integer(size, "ReqToTokenPool", "size", low=1)
        self.max_context_len = integer(max_context_len, "ReqToTokenPool", "max_context_len", low=1)
        self._rows = FreeList(self.size)
        self._table: npt.NDArray[np.int32] = np.zeros((self.size + 1, self.max_context_len), np.int32)
        self._written: npt.NDArray[np.int64] = np.zeros(self.size + 1, np.int64)  # positions that may be nonzero

    def __repr__(self) -> str:
        return (
            f"ReqToTokenPool(size={self.size}, max_context_len={self.max_context_len}, "
            f"available {self.available_size()} of {self.size})"
        )

    @property
    def req_to_token(self) -> npt.NDArray[np.int32]:
        """int32 `[size + 1, max_context_len]`: the live table, read-only.

        It changes under the reader with every `write` and `free`, and a device array made of a part of it may share its
        memory. Index it with an array of rows, which copies, or use `read`.
        """
        view = self._table.view()
        view.flags.writeable = False
        return view

    def available_size(self) -> int:
        """Rows that can be handed out now."""
        return self._rows.available

    def alloc(self, n: int) -> npt.NDArray[np.int32] | None:
        """`n` rows, all zero.

        Returns:
          int32 `[n]`, the caller's own memory; or None, with nothing taken, where fewer are free.

        Raises:
          ValueError: `n` is not an integer, or negative.
        """
        rows = self._rows.take(integer(n, "alloc (ReqToTokenPool)", "n", low=0))
        return None if rows is None else rows.copy()

    def free(self, rows: npt.ArrayLike) -> None:
        """Gives rows back and sets them to zero. The slots that they name are the caller's to free.

        Args:
          rows: int `[n]`, or one row.

        Raises:
          TypeError: `rows` are not signed integers.
          ValueError: rows that are reserved, out of range, not in use, or given twice. They are named, and nothing is
            freed.
        """
        where = "free (ReqToTokenPool)"
        wanted: Any = [rows] if np.ndim(rows) == 0 else rows
        items = self._rows.items_of(int_array(wanted, where, "rows"), 1, where, "rows", distinct=True)
        self._wipe(items)
        self._rows.give_back(items)

    def clear(self) -> None:
        """All rows free and zero."""
        self._wipe(np.flatnonzero(self._written))
        self._rows.clear()

    def write(self, row: int, start: int, slots: npt.ArrayLike) -> None:
        """Sets positions `start ... start + n - 1` of a request to `slots`.

        Args:
          row: a row in use.
          start: the first position.
          slots: int `[n]`, slot ids >= 1.

        Raises:
          TypeError: `slots` are not signed integers.
          ValueError: a row that is not in use, positions outside the row, `slots` that are not 1-D, or ids that are
            no token's slot (0 is the padding slot) or that int32 would truncate. Nothing is written then.
        """
        where = "write (ReqToTokenPool)"
        ids = int_array(slots, where, "slots")
        row, start, stop = self._span(where, row, start, ids.size)
        self._check_slots(where, ids)
        self._table[row, start:stop] = ids
        self._written[row] = max(self._written[row], stop)

    def write_each(self, rows: npt.ArrayLike, positions: npt.ArrayLike, slots: npt.ArrayLike) -> None:
        """Sets one position of each of several requests: what a decode step writes, without a loop.

        Args:
          rows: int `[n]`, distinct rows in use.
          positions: int `[n]`, one in each row.
          slots: int `[n]`, slot ids >= 1.

        Raises:
          TypeError, ValueError: as `write`; also where a row stands twice in `rows`. Nothing is written then.
        """
        where = "write_each (ReqToTokenPool)"
        at = int_array(rows, where, "rows")
        columns = int_array(positions, where, "positions", length=at.size)
        ids = int_array(slots, where, "slots", length=at.size)
        self._rows.items_of(at, 1, where, "rows", distinct=True)
        bad = columns[(columns < 0) | (columns >= self.max_context_len)]
        if bad.size:
            raise ValueError(f"{where}: positions must lie in [0, {self.max_context_len}), got {named(bad)}")
        self._check_slots(where, ids)
        self._table[at, columns] = ids
        self._written[at] = np.maximum(self._written[at], columns + 1)

    def read(self, row: int, start: int, length: int) -> npt.NDArray[np.int32]:
        """Slots of the positions `start ... start + length - 1` of a request, all of which must have been written.

        Returns:
          int32 `[length]`, the caller's own memory.

        Raises:
          ValueError: a row that is not in use, positions outside the row, or a position that holds no slot yet.
        """
        where = "read (ReqToTokenPool)"
        row, start, stop = self._span(where, row, start, integer(length, where, "length", low=0))
        slots = self._table[row, start:stop].copy()
        unwritten = np.flatnonzero(slots == 0) + start
        if unwritten.size:
            raise ValueError(f"{where}: positions {named(unwritten)} of row {row} hold no slot yet")
        return slots

    def _span(self, where: str, row: int, start: int, length: int) -> tuple[int, int, int]:
        row, start = integer(row, where, "row", low=0), integer(start, where, "start", low=0)
        if row > self.size or not self._rows.in_use(np.array(row)):
            raise ValueError(f"{where}: row {row} is not in use (rows are 1 ... {self.size}, row 0 is reserved)")
        if start + length > self.max_context_len:
            raise ValueError(
                f"{where}: positions {start} ... {start + length - 1} pass max_context_len {self.max_context_len}"
            )
        return row, start, start + length

    @staticmethod
    def _check_slots(where: str, slots: npt.NDArray[np.int64]) -> None:
        bad = slots[(slots < 1) | (slots > INT32_MAX)]
        if bad.size:
            raise ValueError(
                f"{where}: slots must be ids in [1, {INT32_MAX}] (0 is the padding slot), got {named(bad)}"
            )

    def _wipe(self, rows: npt.NDArray[np.integer]) -> None:
        for row in rows:
            self._table[row, : self._written[row]] = 0
        self._written[rows] = 0
