"""The slot space: which rank and row a logical slot id means."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import index

SlotIds: TypeAlias = jax.Array | np.ndarray | Sequence[int]
"""`[N]` signed integers: slot ids."""

LayerId: TypeAlias = int | jax.Array
"""A layer number of the model; a traced one needs a stacked pool."""


def positive_int(value: Any, where: str, name: str, least: int = 1, of: int = 1) -> int:
    """`value` as an int; ValueError that names `where` and `name` unless it is at least 1, or 0, a multiple `of`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{where}: {name} must be a {'positive' if least else 'non-negative'} integer, got {value!r}")
    if number % of:
        raise ValueError(f"{where}: {name} must be a multiple of {of}, got {value!r}")
    return number


def _wide(x: Any, bound: int) -> Any:
    """Integers in a width that ids below `bound` fit: int32 at least. Signed, as -1 is an answer."""
    if isinstance(x, int):
        return x
    if not isinstance(x, jax.Array):
        x = np.asarray(x) if np.size(x) else np.asarray(x, np.int32)
    if not jnp.issubdtype(x.dtype, jnp.signedinteger):
        raise TypeError(f"SlotSpace: expected signed integers (int32), got {x.dtype}")
    width = np.int64 if bound > index.INT32_MAX else np.int32
    return x.astype(width) if x.dtype.itemsize < np.dtype(width).itemsize else x


@dataclasses.dataclass(frozen=True)
class SlotSpace:
    """The ids of a pool whose tokens are striped over `dcp_size` ranks (decode context parallelism).

    A logical slot id `loc` in `[0, bound)` is stored on rank `owner(loc)` at row `row(loc)`. Page 0 (ids
    `[0, alloc_page_size)`) is the padding page and is never handed out. Arrays may be numpy or jax; so is the answer.

    Args:
      size: tokens that one rank holds, without the padding page; a multiple of `page_size`.
      page_size: tokens of a page on one rank.
      dcp_size: ranks that share the tokens of one sequence.
      interleave: consecutive ids that stay on one rank; divides `page_size`.

    Raises:
      ValueError: sizes that are not positive, do not divide, or whose ids do not fit int32 (unless x64 is on).
    """

    size: int
    page_size: int
    dcp_size: int = 1
    interleave: int = 1

    def __post_init__(self):
        for name in ("size", "page_size", "dcp_size", "interleave"):
            object.__setattr__(self, name, positive_int(getattr(self, name), "SlotSpace", name))
        if self.size % self.page_size:
            raise ValueError(f"SlotSpace: size {self.size} must be a multiple of page_size {self.page_size}")
        if self.page_size % self.interleave:
            raise ValueError(f"SlotSpace: interleave {self.interleave} must divide page_size {self.page_size}")
        if self.bound > index.INT32_MAX and jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
            raise ValueError(f"SlotSpace: slot ids up to {self.explain()} = {self.bound} do not fit int32; enable x64")

    @property
    def rows(self) -> int:
        """Rows of each layer's buffer on one rank, the padding page included."""
        return self.size + self.page_size

    @property
    def bound(self) -> int:
        """One past the highest slot id."""
        return self.rows * self.dcp_size

    @property
    def capacity(self) -> int:
        """Tokens that can be handed out, over all ranks."""
        return self.size * self.dcp_size

    @property
    def alloc_page_size(self) -> int:
        """Ids of one page of the allocator: a page on every rank."""
        return self.page_size * self.dcp_size

    def explain(self) -> str:
        """How `bound` comes about, for messages."""
        return f"(size {self.size} + page_size {self.page_size}) * dcp_size {self.dcp_size}"

    def owner(self, loc: Any) -> Any:
        """Rank that stores each id (`loc >= 0`): `(loc // interleave) % dcp_size`."""
        return index.owner(_wide(loc, self.bound), self.dcp_size, self.interleave)

    def row(self, loc: Any) -> Any:
        """Row of each id (`loc >= 0`) in its owner's buffers."""
        return index.row(_wide(loc, self.bound), self.dcp_size, self.interleave)

    def slot(self, row: Any, rank: Any) -> Any:
        """The id stored at `row` of `rank`: the inverse of `owner` and `row`."""
        return index.slot(_wide(row, self.bound), _wide(rank, self.bound), self.dcp_size, self.interleave)

    def localize(self, loc: Any, rank: Any) -> Any:
        """Row of each id on `rank`; -1 where another rank owns it or it is out of range. `loc` has any shape."""
        return index.local_row(
            _wide(loc, self.bound), self.rows, dcp_size=self.dcp_size, dcp_rank=rank, interleave=self.interleave
        )

    def localize_compact(self, loc: Any, rank: Any) -> Any:
        """As `localize`, the owned rows moved to the front of the last axis in their order, -1 behind them."""
        rows = self.localize(loc, rank)
        xp = jnp if isinstance(rows, jax.Array) else np
        order = xp.argsort(rows < 0, axis=-1, stable=True)
        return xp.take_along_axis(rows, order, axis=-1)

    def local_lens(self, lens: Any, rank: Any, start: Any = None) -> Any:
        """How many of the positions `[start, start + lens)` of a sequence `rank` stores; `start` is 0 when None.

        A sequence starts at a page boundary, so that position p lies on the rank of id p.
        """
        start = None if start is None else _wide(start, self.bound)
        return index.local_lens(
            _wide(lens, self.bound),
            _wide(rank, self.bound),
            dcp_size=self.dcp_size,
            interleave=self.interleave,
            start=start,
        )


def pad_slots(loc: SlotIds, length: int, padding_slot: int = 0) -> jax.Array | np.ndarray:
    """Pads slot ids `[N]` with `padding_slot` to `[length]`, so that a step is traced for one shape.

    Args:
      loc: `[N]` signed integers, numpy, a list, or jax; the result is of the same kind.
      length: N at most.
      padding_slot: the pool's padding id: 0 or -1.

    Raises:
      TypeError: `loc` is not of signed integers. ValueError: more ids than `length`, or another padding id.
    """
    ids = index.as_slot_ids(loc, "pad_slots")
    if ids.shape[0] > length:
        raise ValueError(f"pad_slots: {ids.shape[0]} ids do not fit length {length}")
    check_padding_slot(padding_slot, "pad_slots")
    xp: Any = jnp if isinstance(ids, jax.Array) else np
    return xp.pad(ids, (0, length - ids.shape[0]), constant_values=padding_slot)


def check_padding_slot(padding_slot: int, where: str) -> None:
    """Raises ValueError unless `padding_slot` is the int 0 or -1."""
    if type(padding_slot) is not int or padding_slot not in (0, -1):
        raise ValueError(f"{where}: padding_slot must be 0 or -1, got {padding_slot!r}")
