"""What the triton kernels share that quantise rows, or read them back: blocks of elements with a scale each.

A program takes a few rows, each in runs of a power of two of blocks. A thread holds elements that lie side by side, so
that most of a block's largest element and of a word of codes is found in one thread and the rest among its neighbours;
words of codes then change hands between the threads of a warp, to be stored 16 bytes at a time. Codes are accessed in
words of 32 bits, and scale bytes in the largest words that the row is made of.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import codecs, dispatch
from pallas_kernels.codecs import dsa, fp4, fp8_cast
from pallas_kernels.dispatch import KernelConfig
from pallas_kernels.triton import launch

FLOATS = ("float32", "bfloat16", "float16")
_THREAD_ELEMENTS = 32  # of a run, at most: four words of FP4 codes
_PART_ELEMENTS = 8  # and at least where there are few rows: one such word, and one 16-byte load of 16-bit elements
_MOST_WARPS = 8
_ROW_ELEMENTS = 1 << 15  # at most of a run: what a program does for them is unrolled


@dataclasses.dataclass(frozen=True)
class Tiles:
    """In a kernel: loads and stores tiles `[rows, width]` of the rows of a program, masked as they must be.

    Attributes:
      rows: of the program.
      sources, targets: references to the arrays that are read and that are written.
      source_row, target_row: layer (or 0) and rows there.
      loaded, stored: which rows are read, and which written.
    """

    rows: int
    interpret: bool
    sources: Sequence[Any]
    targets: Sequence[Any]
    source_row: tuple[Any, Any]
    target_row: tuple[Any, Any]
    loaded: Any
    stored: Any

    def load(self, array: int, start: int, width: int) -> jax.Array:
        """Zeros where a row is not read."""
        window = launch.window(self.sources[array], *self.source_row, start, width)
        mask = jnp.broadcast_to(self.loaded[:, None], (self.rows, width))
        return plgpu.load(window, mask=mask, other=0)

    def store(self, array: int, start: int, tile: jax.Array) -> None:
        """Where a row is written."""
        window = launch.window(self.targets[array], *self.target_row, start, tile.shape[1])
        plgpu.store(window, tile, mask=jnp.broadcast_to(self.stored[:, None], tile.shape))


@dataclasses.dataclass(frozen=True)
class Run:
    """Units of a row, side by side both in a dense array and in the buffers.

    Attributes:
      dense: which dense array. at: the first of its units there.
      buffers: which buffers: codes, and scales where they have their own.
      to: the first unit there. count: how many.
    """

    dense: int
    at: int
    buffers: tuple[int, ...]
    to: int
    count: int
    unit = 1  # elements

    @property
    def elements(self) -> int:
        """Of a row."""
        return self.count * self.unit

    def split(self, most: int) -> Iterator["Run"]:
        """Runs of powers of two of units, and of `most` elements where that is a unit."""
        start = 0
        while left := self.count - start:
            count = min(1 << (left.bit_length() - 1), max(most // self.unit, 1))
            yield dataclasses.replace(self, at=self.at + start, to=self.to + start, count=count)
            start += count

    def fetch(self, tiles: Tiles) -> Any:
        """Loads elements, for `encode`."""
        return tiles.load(self.dense, self.at * self.unit, self.elements)

    def encode(self, tiles: Tiles, loaded: Any) -> None:
        """Stores what becomes of them in the buffers."""
        raise NotImplementedError

    def fetch_codes(self, tiles: Tiles) -> Any:
        """Loads from the buffers, for `decode`."""
        raise NotImplementedError

    def decode(self, tiles: Tiles, loaded: Any) -> jax.Array:
        """float32 `[rows, elements]`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FP4Run(Run):
    """Blocks of 16 elements: two words of codes and a scale byte each."""

    scale_word: int = 1  # bytes
    unit = fp4.BLOCK

    def encode(self, tiles: Tiles, loaded: Any) -> None:
        """See `codecs.fp4`."""
        magnitude, negative = fp4.magnitudes(loaded.reshape(tiles.rows, self.count, 2, 8))
        exponent = fp4.exponents(magnitude.max(axis=3).max(axis=2))
        words = _pack(fp4.codes(magnitude, negative, exponent[:, :, None, None]), 4)
        tiles.store(self.buffers[0], 2 * self.to, words.reshape(tiles.rows, -1))
        scale = fp4.scale_bytes(exponent).reshape(tiles.rows, -1, self.scale_word)
        tiles.store(self.buffers[1], self.to // self.scale_word, _pack(scale, 8))

    def fetch_codes(self, tiles: Tiles) -> Any:
        """Words of codes, and of scales."""
        scales = tiles.load(self.buffers[1], self.to // self.scale_word, self.count // self.scale_word)
        return tiles.load(self.buffers[0], 2 * self.to, 2 * self.count), scales

    def decode(self, tiles: Tiles, loaded: Any) -> jax.Array:
        """See `codecs.fp4`."""
        words, scales = loaded
        code = _unpack(words.reshape(tiles.rows, self.count, 2), 4, 8)
        scale = _unpack(scales, 8, self.scale_word).reshape(tiles.rows, self.count, 1, 1)
        return fp4.values(code, scale).reshape(tiles.rows, -1)


@dataclasses.dataclass(frozen=True)
class LatentRun(Run):
    """Tiles of 128 elements: 32 words of FP8 codes each, and a float32 scale further on in the row."""

    scales: int = 0  # where those of the row start, in words
    unit = dsa.TILE

    def encode(self, tiles: Tiles, loaded: Any) -> None:
        """See `codecs.dsa`."""
        x = loaded.reshape(tiles.rows, self.count, dsa.TILE // 4, 4)
        scale = dsa.scales(dsa.magnitudes(x).max(axis=3).max(axis=2))
        exact = codecs.exact_div if tiles.interpret else launch.divide
        code = dsa.codes(x, scale[:, :, None, None], exact if x.dtype == jnp.float32 else fp8_cast.divide)
        tiles.store(self.buffers[0], 32 * self.to, _pack(code, 8).reshape(tiles.rows, -1))
        tiles.store(self.buffers[0], self.scales + self.to, lax.bitcast_convert_type(scale, jnp.uint32))

    def fetch_codes(self, tiles: Tiles) -> Any:
        """Words of codes, and scales."""
        scales = tiles.load(self.buffers[0], self.scales + self.to, self.count)
        return tiles.load(self.buffers[0], 32 * self.to, 32 * self.count), scales

    def decode(self, tiles: Tiles, loaded: Any) -> jax.Array:
        """See `codecs.dsa`."""
        words, scales = loaded
        code = _unpack(words, 8, 4).reshape(tiles.rows, self.count, dsa.TILE)
        scale = lax.bitcast_convert_type(scales, jnp.float32)
        return dsa.values(code, scale[:, :, None]).reshape(tiles.rows, -1)


@dataclasses.dataclass(frozen=True)
class RopeRun(Run):
    """Pairs of bfloat16 elements, a word each."""

    words: int = 0  # where those of the row start
    unit = 2

    def encode(self, tiles: Tiles, loaded: Any) -> None:
        """The cast, from whatever by way of float32."""
        bits = lax.bitcast_convert_type(loaded.astype(jnp.float32).astype(jnp.bfloat16), jnp.uint16)
        tiles.store(self.buffers[0], self.words + self.to, _pack(bits.reshape(tiles.rows, -1, 2), 16))

    def fetch_codes(self, tiles: Tiles) -> Any:
        """Words of two."""
        return tiles.load(self.buffers[0], self.words + self.to, self.count)

    def decode(self, tiles: Tiles, loaded: Any) -> jax.Array:
        """Exactly."""
        bits = _unpack(loaded, 16, 2).reshape(tiles.rows, -1) << 16
        return lax.bitcast_convert_type(bits, jnp.float32)


def _pack(parts, bits: int):
    """Words of `bits` times as many bits as the last axis, which goes, has parts; the first is the lowest."""
    count = parts.shape[-1]
    if count == 1:
        words = parts.reshape(parts.shape[:-1])
    else:
        shifts = lax.iota(jnp.uint32, count) * np.uint32(bits)
        shifted = parts.astype(jnp.uint32) << shifts.reshape(*[1] * (parts.ndim - 1), count)
        words = jnp.sum(shifted, axis=-1, dtype=jnp.uint32)
    return words.astype(f"uint{max(bits * count, 8)}")


def _unpack(words, bits: int, count: int):
    """int32 parts of words, on a new last axis."""
    shifts = (lax.iota(jnp.uint32, count) * np.uint32(bits)).reshape(*[1] * words.ndim, count)
    parts = (words.astype(jnp.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return parts.astype(jnp.int32)


def fp4_runs(widths: Sequence[int], to: Sequence[tuple[int, int]], scale_rows: Sequence[int]) -> list[FP4Run]:
    """The runs of dense arrays whose rows have these elements.

    Args:
      to: for each of them which buffer, and the first block there.
      scale_rows: scale bytes of a row of each of the buffers; these come after the buffers of codes.
    """
    runs = []
    for i, (width, (buffer, start)) in enumerate(zip(widths, to, strict=True)):
        edges = [s for (b, s) in to if b == buffer]
        word = math.gcd(4, scale_rows[buffer], *edges)
        runs.append(FP4Run(i, 0, (buffer, len(scale_rows) + buffer), start, width // fp4.BLOCK, word))
    return runs


def dsa_runs(kv_lora_rank: int, rope: int, whole: bool) -> list[Run]:
    """The runs of a packed row; `whole`: whether one dense array has all of it."""
    scales = kv_lora_rank // 4
    words = scales + kv_lora_rank // dsa.TILE
    at = (0, kv_lora_rank // 2) if whole else (1, 0)
    return [
        LatentRun(0, 0, (0,), 0, kv_lora_rank // dsa.TILE, scales),
        RopeRun(*at, (0,), 0, rope // 2, words),
    ]


def refusal(
    buffers: Sequence[Any],
    words: Sequence[int],
    runs: Sequence[Run],
    floats: Sequence[Any],
    config: KernelConfig | None,
) -> str | None:
    """Why the kernels cannot do it, or None.

    Args:
      words: bytes of the words that each buffer is accessed by.
      runs: what they would take.
      floats: dtypes of the dense arrays, or of the results.
    """
    unknown = [str(dtype) for dtype in floats if jnp.dtype(dtype).name not in FLOATS]
    if unknown:
        return f"it quantises from and to {', '.join(FLOATS)}, not {unknown[0]}"
    longest = max(run.elements for run in runs)
    if longest > _ROW_ELEMENTS:
        return f"rows of {longest} elements pass {_ROW_ELEMENTS}"
    return launch.refusal_of_config(config) or launch.refusal_of_words(buffers, words)


def refusal_of_dsa(kv_buffer: Any, kv_lora_rank: int, floats: Sequence[Any], config: KernelConfig | None) -> str | None:
    """`refusal` for packed rows of sparse MLA."""
    p = dsa.rope_dim(kv_buffer.shape[-1], kv_lora_rank, "a packed row")
    if p % 2:
        return f"it moves rope elements in pairs, not {p}"
    return refusal([kv_buffer], [4], dsa_runs(kv_lora_rank, p, False), floats, config)


def plan(runs: Sequence[Run], n: int, config: KernelConfig) -> tuple[int, int]:
    """Rows and warps of a program: the heuristic, where `config` does not say.

    A thread has `_THREAD_ELEMENTS` of the longest run where there are rows enough, which makes for stores of 16 bytes;
    else fewer, down to `_PART_ELEMENTS`, so that more threads share the work.
    """
    longest = 1 << (max(run.elements for run in runs).bit_length() - 1)
    cores = launch.multiprocessors()
    each = _THREAD_ELEMENTS
    while each > _PART_ELEMENTS and n * longest < cores * 1024 * each:
        each //= 2
    # With two warps the compiler is sparing with registers, so that a multiprocessor holds as many threads as it can.
    rows = config.rows or max((64 if each == _THREAD_ELEMENTS else 32) * each // longest, 1)
    warps = config.warps or min(max(rows * longest // (32 * each), 1), _MOST_WARPS)
    return rows, warps


def scatter(
    name: str,
    buffers: Sequence[jax.Array],
    words: Sequence[int],
    loc,
    runs: Sequence[Run],
    dense: Sequence[jax.Array],
    **options: Any,
) -> tuple[jax.Array, ...]:
    """In one launch, quantises row i of the `dense` arrays to slot `loc[i]` of the buffers, in place.

    Args:
      words: bytes of the words that each buffer is accessed by.
      options: those of `gather`.

    Returns:
      The new buffers.
    """
    return _launch(name, buffers, words, loc, runs, dense, None, **options)


def gather(
    name: str,
    buffers: Sequence[jax.Array],
    words: Sequence[int],
    loc,
    runs: Sequence[Run],
    widths: Sequence[int],
    **options: Any,
) -> tuple[jax.Array, ...]:
    """In one launch, the values of the buffers' rows at slots `loc`, zeros where no row is here.

    Args:
      words: bytes of the words that each buffer is accessed by.
      widths: of the results.
      options: `dtype` (of the results), `layer`, `slots` (options of `index.local_row`), `config`, `interpret`.

    Returns:
      `[N, width]` for each of the widths.
    """
    return _launch(name, buffers, words, loc, runs, None, widths, **options)


def _launch(name, buffers, words, loc, runs, dense, widths, *, layer, slots, config, interpret, dtype=None):
    scattering, n = dense is not None, loc.shape[0]
    layers, count = (1, *buffers[0].shape)[:2] if layer is None else buffers[0].shape[:2]
    scalars = {"layer": layer, "rank": slots["dcp_rank"]}
    traced = {k: jnp.reshape(v, 1) for k, v in scalars.items() if isinstance(v, jax.Array)}
    axes = dispatch.varying_axes(buffers, loc, dense, list(traced.values()))
    if n == 0:  # a launch of no programs is an error
        nothing = buffers if scattering else [jnp.zeros((0, width), dtype) for width in widths]
        return tuple(launch.vary(x, axes) for x in nothing)
    views = [launch.vary(launch.to_words(b, (layers, count, -1), w), axes) for b, w in zip(buffers, words, strict=True)]
    if scattering:
        arrays = [d.reshape(1, n, -1) for d in dense]
        out = [dispatch.result_type(v.shape, v.dtype, axes) for v in views]
    else:
        arrays, out = [], [dispatch.result_type((1, n, width), dtype, axes) for width in widths]
    operands = [loc, *traced.values(), *arrays, *views]
    rows, warps = plan(runs, n, config)
    batches = list(_batches(runs, rows, warps))

    def kernel(loc_ref, *refs):
        ends = np.cumsum([0, len(traced), len(arrays), len(views), len(out)])
        given, dense_in, views_in, results = (refs[a:b] for a, b in itertools.pairwise(ends))
        zero = pl.program_id(0) * 0  # the interpreter knows no literal indices
        values = scalars | {k: plgpu.load(ref.at[zero]) for k, ref in zip(traced, given, strict=True)}
        ids = slots | {"dcp_rank": values["rank"]}
        token, live, row, here, at = launch.locate(loc_ref, rows, n, values["layer"], layers, count, ids)
        there, places = (zero, token), (at, row)
        if scattering:
            # Without other ranks nearly every row is here: not to wait for the ids saves a round trip to memory.
            read = live if slots["dcp_size"] == 1 else here
            tiles = Tiles(rows, interpret, dense_in, results, there, places, read, here)
        else:
            tiles = Tiles(rows, interpret, views_in, results, places, there, here, live)
        for batch in batches:
            loaded = [run.fetch(tiles) if scattering else run.fetch_codes(tiles) for run in batch]
            for run, tile in zip(batch, loaded, strict=True):
                if scattering:
                    run.encode(tiles, tile)
                else:
                    tiles.store(run.dense, run.at * run.unit, run.decode(tiles, tile).astype(dtype))

    grid = (pl.cdiv(n, rows),)
    aliased = len(views) if scattering else 0
    results = launch.call(name, kernel, operands, out, grid, warps, aliased=aliased, interpret=interpret)
    if scattering:
        return tuple(launch.from_words(r, b.shape, b.dtype) for r, b in zip(results, buffers, strict=True))
    return tuple(r.reshape(n, -1) for r in results)


def _batches(runs: Sequence[Run], rows: int, warps: int) -> Iterator[list[Run]]:
    """Runs short enough for the threads of a program, in batches of which all are loaded before any is stored."""
    most = max(32 * warps * _THREAD_ELEMENTS // rows, 1)
    batch: list[Run] = []
    for run in itertools.chain.from_iterable(run.split(most) for run in runs):
        if batch and sum(r.elements for r in [*batch, run]) > 2 * most:
            yield batch
            batch = []
        batch.append(run)
    yield batch
