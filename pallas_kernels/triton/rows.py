"""Rows between dense arrays and buffers, as tiles of Pallas' Triton backend, cast where they differ.

A program moves a few rows. It loads their slot ids, finds which of the rows are here, loads all their words and then
stores them, every access masked by that test. A tile is `[rows, words]` with a power of two of words, so that a row of
576 is two tiles, 512 and 64: every word is stored once, and nothing beside the row is touched.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import codecs, dispatch
from pallas_kernels.codecs import fp8, fp8_cast
from pallas_kernels.dispatch import KernelConfig
from pallas_kernels.triton import launch
from pallas_kernels.triton.launch import (
    MOST_ROWS,
    MOST_WARPS,
    as_dtype,
    call,
    divide,
    from_words,
    multiprocessors,
    refusal_of_config,
    refusal_of_words,
    to_words,
    uint,
    vary,
    window,
)

_WARP_BYTES = 32 * 16  # of one instruction: 16 for each lane, the widest access
_PROGRAM_BYTES = 16 << 10  # loaded by a program where there are rows enough: 128 bytes for each of 128 threads
_THREAD_BYTES = 256  # at most loaded by a thread before it stores; beyond, registers run out
_TILE_BYTES = 128  # at most a thread's part of a tile
_ROW_BYTES = 128 << 10  # at most of one range of a row
_UNMOVED = ("bool", "complex", "int2", "uint2", "int4", "uint4", "float4", "float6")


@dataclasses.dataclass(frozen=True)
class Columns:
    """A range of the rows of a buffer, and the dense array `[N, ...]` that holds it.

    Attributes:
      buffer: which buffer.
      start, width: elements of the row.
      dense: dtype of the dense array.
      stored: dtype of the row's elements; where it differs from `dense` they are cast as `codecs.to_words` does.
      scale: what divides before the cast; a scalar, possibly traced, or None.
      raw: whether they are bits, whatever the dtypes mean.
    """

    buffer: int
    start: int
    width: int
    dense: np.dtype
    stored: np.dtype
    scale: Any = None
    raw: bool = False

    @property
    def copied(self) -> bool:
        """Whether the bits go as they are. The cast of e5m2 to itself does not: infinities become the largest value."""
        same = self.dense == self.stored and self.scale is None
        return self.raw or (same and self.dense.name != "float8_e5m2")


def whole_rows(buffers: Sequence[Any], lead: int) -> list[Columns]:
    """The columns of arrays of the buffers' own dtypes, a whole row each. `lead`: axes of a buffer before a row's."""
    rows = [(math.prod(b.shape[lead:]), jnp.dtype(b.dtype)) for b in buffers]
    return [Columns(i, 0, width, dtype, dtype, raw=True) for i, (width, dtype) in enumerate(rows)]


def refusal(
    buffers: Sequence[Any], columns: Sequence[Columns], n: int, lead: int, config: KernelConfig | None
) -> str | None:
    """Why the kernels cannot move `n` rows of these columns, or None."""
    if reason := refusal_of_config(config):
        return reason
    for c in columns:
        unmoved = [d.name for d in (c.dense, c.stored) if d.name.startswith(_UNMOVED)]
        if unmoved or (codecs.is_fp8(c.dense) and not c.copied):
            return f"it does not move {unmoved[0]}" if unmoved else f"it does not cast {c.dense}"
        if c.width * max(c.dense.itemsize, c.stored.itemsize) > _ROW_BYTES:
            return f"rows of {c.width} {c.dense} pass {_ROW_BYTES} bytes"
    return refusal_of_words(buffers, _word_bytes(buffers, columns, lead))


def _word_bytes(buffers: Sequence[Any], columns: Sequence[Columns], lead: int) -> list[int]:
    """Bytes of the words that each buffer is accessed by: its elements', and of single bytes a larger word's.

    In larger words a buffer of single bytes is reached twice or four times as far by a 32-bit offset. To FP8, two
    sources of 16 bits make a word of 16.
    """

    def word(i: int, buffer: Any) -> int:
        own = [c for c in columns if c.buffer == i]
        if buffer.dtype.itemsize > 1:
            return min(buffer.dtype.itemsize, 4)
        size = 4 if all(c.copied for c in own) else 2 if all(c.copied or c.dense.itemsize == 2 for c in own) else 1
        edges = [math.prod(buffer.shape[lead:]), *(e for c in own for e in (c.start, c.width))]
        return math.gcd(size, *edges)

    return [word(i, buffer) for i, buffer in enumerate(buffers)]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """`Columns` in the words that the kernel loads and stores."""

    buffer: int
    start: int
    width: int
    dense_bytes: int  # of what becomes one word
    word_bytes: int
    encode: Callable[..., jax.Array] | None  # (tile, scale or None, divide) -> tile of words; None copies bits

    @classmethod
    def of(cls, c: Columns, word: int) -> "_Piece":
        start, width = (x * c.stored.itemsize // word for x in (c.start, c.width))
        if c.copied:
            return cls(c.buffer, start, width, word, word, None)
        pair = word > c.stored.itemsize
        return cls(
            c.buffer, start, width, c.dense.itemsize * (1 + pair), word, _pair_encoder(c) if pair else _encoder(c)
        )

    @property
    def loaded_bytes(self) -> int:
        """Of a row."""
        return self.width * self.dense_bytes

    def tiles(self, most: int = 1 << 30) -> Iterator[tuple[int, int]]:
        """Start and width of the tiles: powers of two, none wider than `most` words."""
        start = 0
        while left := self.width - start:
            width = min(1 << (left.bit_length() - 1), most)
            yield start, width
            start += width


def _encoder(c: Columns) -> Callable[..., jax.Array]:
    return lambda tile, scale, divide: codecs.to_words(as_dtype(tile, c.dense), c.stored, scale, divide)


def _pair_encoder(c: Columns) -> Callable[..., jax.Array]:
    """Of 32-bit words with two 16-bit floats each: 16-bit words with two FP8 codes."""

    def encode(tile, scale, divide):
        del divide  # these sources need no full one
        halves = (as_dtype(half.astype(jnp.uint16), c.dense) for half in (tile, tile >> 16))
        floats = (x.astype(jnp.float32) if scale is None else fp8_cast.divide(x, scale) for x in halves)
        low, high = (fp8.codes(x, c.stored) for x in floats)
        return (low | (high << 8)).astype(jnp.uint16)

    return encode


def plan(pieces: Sequence[_Piece], n: int, apart: bool, copies: int, config: KernelConfig) -> tuple[int, int]:
    """Rows and warps of a program: the heuristic, where `config` does not say.

    Few rows are spread over as many programs as there are, with one access a thread; many so that a program loads
    `_PROGRAM_BYTES`, as long as there are a few programs for each multiprocessor.

    Args:
      apart: whether a program moves one piece, not all.
      copies: programs for the same rows.
    """
    row = (max if apart else sum)(p.loaded_bytes for p in pieces)
    # What fills a warp is the narrower side of a tile. A tail of less than 64 bytes is not worth fewer threads.
    tiles = [width * min(p.dense_bytes, p.word_bytes) for p in pieces for _, width in p.tiles()]
    narrowest, widest = min((b for b in tiles if b >= 64), default=max(tiles)), max(tiles)
    rows, warps = config.rows, config.warps
    if rows is None:
        cores = multiprocessors()
        fewest = min(1 << ((_WARP_BYTES - 1) // widest).bit_length(), 32)
        most = max(1 << max(round(math.log2(_PROGRAM_BYTES / row)), 0), fewest)
        spread = max(n * copies // (4 * cores), 1)
        rows = min(max(1 << (spread.bit_length() - 1), fewest), most, MOST_ROWS)
    if warps is None:
        warps = min(1 << (max(rows * narrowest // _WARP_BYTES, 1).bit_length() - 1), 4)
        while rows * row > _THREAD_BYTES * 32 * warps and warps < MOST_WARPS:
            warps *= 2
    return rows, warps


def _batches(
    pieces: Sequence[_Piece], some: Sequence[int], rows: int, warps: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Piece, start and width of the tiles, in batches that the registers of a program hold."""
    batch: list[tuple[int, int, int]] = []
    room = limit = 32 * warps * _THREAD_BYTES // rows
    for i in some:
        most = max(32 * warps * _TILE_BYTES // (rows * max(pieces[i].dense_bytes, pieces[i].word_bytes)), 1)
        for start, width in pieces[i].tiles(1 << (most.bit_length() - 1)):
            need = width * pieces[i].dense_bytes
            if batch and need > room:
                yield batch
                batch, room = [], limit
            batch.append((i, start, width))
            room -= need
    yield batch


@dataclasses.dataclass(frozen=True)
class _Launch:
    """One kernel: what is known of it when it is built."""

    pieces: Sequence[_Piece]
    n: int
    layers: int
    count: int  # rows of a layer
    scattering: bool
    over: str | None
    rows: int  # of a program
    warps: int
    slots: dict[str, Any]
    scalars: dict[Any, Any]  # layer, rank and each piece's scale: a number, None, or traced and then an operand
    divide: Callable[..., jax.Array]

    def kernel(
        self, loc_ref, scalar_refs: dict[Any, Any], dense_refs: Sequence[Any], buffer_refs: Sequence[Any]
    ) -> None:
        zero = pl.program_id(0) * 0  # the interpreter knows no literal indices
        values = self.scalars | {name: plgpu.load(ref.at[zero]) for name, ref in scalar_refs.items()}
        group = pl.program_id(1) if self.over == "layers" else zero
        slots, layer = self.slots | {"dcp_rank": values["rank"]}, values["layer"]
        token, live, row, here, layer = launch.locate(loc_ref, self.rows, self.n, layer, self.layers, self.count, slots)
        layer = group if self.over == "layers" else layer

        def in_dense(i: int, start: int, width: int):
            return window(dense_refs[i], group, token, start, width)

        def in_buffer(i: int, start: int, width: int):
            piece = self.pieces[i]
            return window(buffer_refs[piece.buffer], layer, row, piece.start + start, width)

        def mask(test, width: int):
            return jnp.broadcast_to(test[:, None], (self.rows, width))

        if self.scattering:
            # Without other ranks nearly every row is here: not to wait for the ids saves a round trip to memory.
            load_from, loaded = in_dense, live if self.slots["dcp_size"] == 1 else here
            store_to, stored = in_buffer, here
        else:
            load_from, loaded, store_to, stored = in_buffer, here, in_dense, live

        def run(some: Sequence[int]) -> None:
            for batch in _batches(self.pieces, some, self.rows, self.warps):
                tiles = [plgpu.load(load_from(*tile), mask=mask(loaded, tile[2]), other=0) for tile in batch]
                for (i, start, width), tile in zip(batch, tiles, strict=True):
                    encode = self.pieces[i].encode
                    if self.scattering and encode is not None:
                        tile = encode(tile, values[i], self.divide)
                    plgpu.store(store_to(i, start, width), tile, mask=mask(stored, width))

        if self.over != "columns":
            return run(range(len(self.pieces)))
        for i in range(len(self.pieces)):
            pl.when(pl.program_id(1) == i)(functools.partial(run, [i]))


def move(
    name: str,
    buffers: Sequence[jax.Array],
    loc,
    columns: Sequence[Columns],
    dense: Sequence[jax.Array] | None,
    *,
    layer: Any = None,
    over: str | None = None,
    slots: dict[str, Any],
    config: KernelConfig,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """In one launch, row i of the `dense` arrays to slot `loc[i]` of the buffers, in place; without them the other way.

    Args:
      columns: for each dense array where it lies.
      layer: the layer of buffers that are stacked, or None.
      over: None; "layers": every layer of stacked buffers, dense arrays being `[layers, N, ...]`; "columns": a program
        moves one of the columns, so that those of many buffers move side by side.
      slots: options of `index.local_row`; the rank may be traced.

    Returns:
      The new buffers; or for each of the columns `[N, width]`, or `[layers, N, width]`, zeros where no row is here.
    """
    every, scattering = over == "layers", dense is not None
    stacked = every or layer is not None
    layers, count = buffers[0].shape[:2] if stacked else (1, buffers[0].shape[0])
    n, groups = loc.shape[0], layers if every else 1
    scalars = {"layer": layer, "rank": slots["dcp_rank"]} | {i: c.scale for i, c in enumerate(columns)}
    traced = {k: jnp.reshape(v, 1) for k, v in scalars.items() if isinstance(v, jax.Array)}
    axes = dispatch.varying_axes(buffers, loc, dense, list(traced.values()))
    shapes = [(layers, n, c.width) if every else (n, c.width) for c in columns]
    if n == 0 or not all(c.width for c in columns):  # a launch of no programs is an error
        nothing = buffers if scattering else [jnp.zeros(s, c.stored) for s, c in zip(shapes, columns, strict=True)]
        return tuple(vary(x, axes) for x in nothing)

    words = _word_bytes(buffers, columns, 1 + stacked)
    pieces = [_Piece.of(c, words[c.buffer]) for c in columns]
    views = [vary(to_words(b, (layers, count, -1), w), axes) for b, w in zip(buffers, words, strict=True)]
    arrays, out = [], [dispatch.result_type((groups, n, p.width), uint(p.word_bytes), axes) for p in pieces]
    if dense is not None:
        out = [dispatch.result_type(v.shape, v.dtype, axes) for v in views]
        arrays = [to_words(d, (groups, n, -1), p.dense_bytes) for d, p in zip(dense, pieces, strict=True)]
    operands = [loc, *traced.values(), *arrays, *views]
    copies = len(pieces) if over == "columns" else groups
    rows, warps = plan(pieces, n, over == "columns", copies, config)
    exact = codecs.exact_div if interpret else divide
    kernels = _Launch(pieces, n, layers, count, scattering, over, rows, warps, slots, scalars, exact)

    def kernel(loc_ref, *refs):
        ends = np.cumsum([0, len(traced), len(arrays), len(views), len(out)])
        given, arrays_in, views_in, results = (refs[a:b] for a, b in itertools.pairwise(ends))
        sides = (arrays_in, results) if scattering else (results, views_in)
        kernels.kernel(loc_ref, dict(zip(traced, given, strict=True)), *sides)

    grid = pl.cdiv(n, rows), copies
    results = call(
        name, kernel, operands, out, grid, warps, aliased=len(views) if scattering else 0, interpret=interpret
    )
    if scattering:
        return tuple(from_words(r, b.shape, b.dtype) for r, b in zip(results, buffers, strict=True))
    return tuple(from_words(r, s, c.stored) for r, s, c in zip(results, shapes, columns, strict=True))
