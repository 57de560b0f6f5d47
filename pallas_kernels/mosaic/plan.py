"""Which columns of which rows a kernel moves, whether it can, and in which way."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import codecs
from pallas_kernels.codecs import fp8_cast
from pallas_kernels.dispatch import KernelConfig

THREADS = 128  # of a warpgroup, which is a block
IN_FLIGHT_BYTES = 256  # of a thread, at most: 64 of its registers
_WIDE_BYTES, _NARROW_BYTES = 16, 4  # of an access
_FEW_ROWS = 256  # up to here latency counts, and not that threads repeat each other's accesses
_BLOCKS = 264  # at least, before a block takes more rows: two for each multiprocessor of an H200
_BATCH_BYTES = 16 << 10  # of a staged batch, about: some 12 blocks of a multiprocessor fit its shared memory
SHARED_BYTES = 192 << 10  # of a block, at most
MOST_ROWS = 32  # of a batch: each has an id to be read, and a barrier


@dataclasses.dataclass(frozen=True)
class Columns:
    """A dense array `[N, width]`, and which columns of a buffer's rows it holds.

    Attributes:
      buffer: index of the buffer.
      start, width: the columns, in elements. row_width: of the buffer's rows.
      dense_bytes, buffer_bytes: of an element. cast: whether elements change on their way.
    """

    buffer: int
    start: int
    width: int
    row_width: int
    dense_bytes: int
    buffer_bytes: int
    cast: bool = False

    def vector(self, staged: bool) -> int:
        """Elements of an access: 16 bytes, or fewer where a row is too narrow for all threads, but then at least 4.

        (So that threads do not repeat each other's accesses, which are then one for each thread anyway.)
        """
        if staged:
            return math.gcd(_WIDE_BYTES // self.dense_bytes, self.width)
        share = 1 << (max(1, self.width // THREADS).bit_length() - 1)
        least = max(1, _NARROW_BYTES // max(self.dense_bytes, self.buffer_bytes))
        wide = min(max(share, least), _WIDE_BYTES // min(self.dense_bytes, self.buffer_bytes))
        return math.gcd(wide, self.width, self.start, self.row_width)

    @property
    def fills(self) -> bool:
        """Whether wide accesses to a row, on both sides, share out evenly among the threads."""
        return self.width % (THREADS * _WIDE_BYTES // min(self.dense_bytes, self.buffer_bytes)) == 0

    @property
    def batch(self) -> int:
        """The fewest rows that wide accesses of all threads to the dense array share out evenly."""
        elements = THREADS * _WIDE_BYTES // self.dense_bytes
        return elements // math.gcd(elements, self.width)

    def pieces(self, staged: bool) -> Iterator[tuple[int, int]]:
        """Start and length of the parts of a row that all threads, or a power of two of them, share out evenly."""
        vector = self.vector(staged)
        start, left = 0, self.width // vector
        most = IN_FLIGHT_BYTES // 4 // (vector * self.dense_bytes) * THREADS
        while left:
            vectors = min(left // THREADS * THREADS, most) or 1 << (left.bit_length() - 1)
            yield start, vectors * vector
            start, left = start + vectors * vector, left - vectors

    @property
    def bulk(self) -> bool:
        """Whether bulk copies can move them: multiples of 16 bytes."""
        sizes = (
            self.width * self.dense_bytes,
            *(x * self.buffer_bytes for x in (self.width, self.start, self.row_width)),
        )
        return not any(size % _WIDE_BYTES for size in sizes)


@dataclasses.dataclass(frozen=True)
class Source:
    """Rows to scatter: `[N, ...]` floats (or words) that become the columns of a buffer from `start` on.

    Attributes:
      rows: the array, or a `jax.ShapeDtypeStruct`.
      buffer: index of the buffer, which holds words of `dtype` in rows of `row_width`.
      scale: None, or a float32 scalar that divides.
    """

    rows: Any
    buffer: int
    start: int
    row_width: int
    dtype: Any
    scale: Any = None

    @property
    def cast(self) -> bool:
        """Whether elements change; their bits are copied otherwise. (Infinities of e5m2 become finite.)"""
        return self.scale is not None or self.rows.dtype != jnp.dtype(self.dtype) or self.rows.dtype == jnp.float8_e5m2

    def columns(self, lead: int = 1) -> Columns:
        """What the rows are behind their first `lead` axes."""
        width = math.prod(self.rows.shape[lead:])
        sizes = self.rows.dtype.itemsize, jnp.dtype(self.dtype).itemsize
        return Columns(self.buffer, self.start, width, self.row_width, *sizes, self.cast)

    def dense(self, lead: int = 1) -> jax.Array:
        """The rows as the kernel reads them, one axis each: floats where it casts, else words."""
        return flat(self.rows if self.cast else to_words(self.rows), lead)

    def encode(self, values: Any, scale: Any, clamp: bool) -> Any:
        """What `dense` holds as words of the buffer; inside the kernel. `clamp`: as in `fp8_cast.encode`."""
        if not self.cast:
            return values
        if codecs.is_fp8(self.dtype):
            return fp8_cast.encode(values, self.dtype, scale, clamp=clamp)
        if codecs.is_fp8(values.dtype):  # which the chip converts to few types
            values = values.astype(jnp.float32)
        return lax.bitcast_convert_type(values.astype(self.dtype), codecs.word_dtype(self.dtype))


def flat(array: jax.Array, lead: int) -> jax.Array:
    """The axes behind the first `lead` as one."""
    return array.reshape(*array.shape[:lead], -1)


def to_words(array: jax.Array) -> jax.Array:
    """The same memory as unsigned words: free on CUDA, where it is a view."""
    return lax.bitcast_convert_type(array, codecs.word_dtype(array.dtype))


def refusal(columns: Sequence[Columns], config: KernelConfig | None, *operands: Any) -> str | None:
    """Why the kernels cannot move these columns of `operands` (trees of arrays, or of their stand-ins), or None."""
    config = config or KernelConfig()
    if any(_varies(x) for x in jax.tree.leaves(operands)):
        return "in a shard_map with check_vma=True JAX hands such a kernel no reference to what varies over its axes"
    if config.warps is not None:
        return "config.warps is for triton; here a block is one warpgroup"
    if config.stages not in (None, 0, 1):
        return f"config.stages must be 0 (straight to the rows) or 1 (through shared memory), got {config.stages}"
    if config.rows is not None and not 0 < config.rows <= MOST_ROWS:
        return f"config.rows must lie within 1 and {MOST_ROWS}, got {config.rows}"
    if config.stages == 1 and not all(c.bulk for c in columns):
        return f"config.stages: bulk copies move multiples of {_WIDE_BYTES} bytes, not columns like these"
    if config.stages == 1 and (config.rows or 1) * _row_bytes(columns) > SHARED_BYTES:
        return f"{config.rows or 1} rows of {_row_bytes(columns)} bytes do not fit {SHARED_BYTES} of shared memory"
    return None


def _varies(x: Any) -> bool:
    """Whether `x` is an array that varies over an axis of a shard_map that checks them."""
    return isinstance(x, jax.Array) and bool(jax.typeof(x).manual_axis_type.varying)


def refusal_of_words(array: Any) -> str | None:
    """Why the kernels cannot move the elements of `array` as unsigned words, or None."""
    dtype = jnp.dtype(array.dtype)
    info = (
        jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else None
    )
    if info is None or info(dtype).bits not in (8, 16, 32):
        return f"it moves numbers of 1, 2 or 4 bytes, not {dtype}"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Rows of a batch, and the way that they take."""

    rows: int
    way: Literal["straight", "tile", "bulk"]


def plan(columns: Sequence[Columns], n: int, config: KernelConfig, *, tile: bool) -> Plan:
    """The heuristic, where `config` leaves it open.

    Args:
      tile: whether the dense rows of a batch may be loaded as one tile: they are read, and all of them.
    """
    row_bytes, rows = _row_bytes(columns), config.rows
    staged = config.stages == 1
    if config.stages is None:
        can = all(c.bulk for c in columns) and (rows or 1) * row_bytes <= SHARED_BYTES
        staged = n > _FEW_ROWS and can and not all(c.fills for c in columns)
    spread = max(1, n // _BLOCKS)
    if not staged:
        return Plan(min(n, rows or min(spread, 4)), "straight")
    least = math.lcm(*(c.batch for c in columns))
    tile &= least <= min(spread if rows is None else rows, MOST_ROWS)
    if rows is None:
        rows = staged_rows(least if tile else 1, row_bytes, n)
    rows = min(n, rows)
    tile_bytes = rows * sum(c.width * c.dense_bytes for c in columns)
    return Plan(rows, "tile" if tile and rows % least == 0 and tile_bytes <= THREADS * IN_FLIGHT_BYTES else "bulk")


def staged_rows(least: int, row_bytes: int, n: int) -> int:
    """Rows of a batch in shared memory, of n: a multiple of `least`."""
    rows = least
    while rows * row_bytes < _BATCH_BYTES and rows * 2 <= min(max(1, n // _BLOCKS), MOST_ROWS):
        rows *= 2
    return rows


def _row_bytes(columns: Sequence[Columns]) -> int:
    """Of shared memory for a row; what is cast is there twice."""
    return sum(c.width * (c.buffer_bytes + c.cast * c.dense_bytes) for c in columns)
