"""Units of rows that share a scale, between shared memory and the registers of a block, and how they lie in both."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import KernelConfig
from pallas_kernels.mosaic.launch import load, plgpu, store
from pallas_kernels.mosaic.plan import SHARED_BYTES, Columns, refusal

FLOATS = ("float32", "bfloat16", "float16")
SHARING = 16  # threads of a tile, 8 elements each
_WARPS, _LANES = 4, 32
_WORDS = {1: jnp.uint8, 4: jnp.uint32}


def block_columns(codes: int, scales: int, start: int, count: int, row_blocks: int) -> tuple[Columns, Columns]:
    """What FP4 blocks are of the rows of these two buffers, from block `start` on: words of codes, and scale bytes."""
    return Columns(codes, 2 * start, 2 * count, 2 * row_blocks, 4, 4), Columns(scales, start, count, row_blocks, 1, 1)


def memory(columns: Sequence[Columns], units: int, count: int) -> list[Any]:
    """Shared memory for the columns of so many units, `count` of which make a row."""
    return [plgpu.SMEM((units * (c.width // count),), _WORDS[c.buffer_bytes]) for c in columns]


def refusal_of_rows(row_bytes: int, config: KernelConfig | None, work: str, *operands: Any) -> str | None:
    """Why rows that take so many bytes of shared memory cannot be worked on there (`work` says how), or None."""
    config = config or KernelConfig()
    if config.stages == 0:
        return f"config.stages must be 1: rows are {work} in shared memory"
    rows = config.rows or 1
    if rows * row_bytes > SHARED_BYTES:
        return f"{rows} rows need {rows * row_bytes} bytes of shared memory, more than {SHARED_BYTES}"
    return refusal((), config, *operands)


def words_of(buffer: jax.Array, lead: int) -> jax.Array:
    """Rows of bytes, behind `lead` axes, as rows of 32-bit words: the same memory."""
    words = buffer.reshape(*buffer.shape[:lead], math.prod(buffer.shape[lead:]) // 4, 4)
    return lax.bitcast_convert_type(words, jnp.uint32)


def load_rows(ref: Any, first: Any, shape: tuple[int, ...], layout: Any, interpret: bool) -> jax.Array:
    """Rows from row `first` on of `ref`, which is one axis so that bulk copies can take it apart."""
    width = math.prod(shape[1:])
    if interpret:  # which knows no reference of another shape
        return ref[pl.ds(first * np.int32(width), shape[0] * width)].reshape(shape)
    return plgpu.load(ref.reshape(-1, *shape[1:]).at[pl.ds(first, shape[0])], layout=layout, optimized=False)


def store_rows(ref: Any, first: Any, rows: Any, interpret: bool) -> None:
    """Writes what `load_rows` reads."""
    count, *inner = rows.shape
    width = math.prod(inner)
    if interpret:
        ref[pl.ds(first * np.int32(width), count * width)] = rows.reshape(-1)
    else:
        store(ref.reshape(-1, *inner).at[pl.ds(first, count)], rows)


def send_row(source: Any, place: Any, row: Any, columns: Columns) -> None:
    """Row `place` of what lies in shared memory, to its columns of a row of a buffer."""
    first, start = place * columns.width, columns.start
    if columns.bulk:
        target = row.at[pl.ds(start, columns.width)]
        plgpu.copy_smem_to_gmem(source.at[pl.ds(first, columns.width)], target, commit_group=False)
        return
    vector = columns.vector(staged=False)
    for at, size in columns.pieces(staged=False):
        store(row.at[pl.ds(start + at, size)], load(source.at[pl.ds(first + at, size)], vector))


def spread(values: Any, shape: tuple[int, ...], layout: Any) -> Any:
    """Repeats values along the axes that `shape` has more, at the end."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, tuple(range(values.ndim))), layout)


def bytes_of(bits: Any, layout: Any) -> Any:
    """Rows that repeat the bits of a number, as its bytes: the lowest first."""
    return (digits(bits, 8, 1, layout) & 255).astype(jnp.uint8)


def digits(words: Any, bits: int, first: int, layout: Any) -> Any:
    """Words that repeat along the axes from `first` on, shifted so that digit i of so many bits is the lowest."""
    for axis in range(first, words.ndim):
        place = plgpu.broadcasted_iota(jnp.int32, words.shape, axis, layout=layout)
        words = words >> (place * np.int32(bits * math.prod(words.shape[axis + 1 :])))
    return words


def reduce(by: Any, values: Any, first: int, layout: Any) -> Any:
    """Reduces all axes from `first` on, one by one, as Mosaic wants it."""
    axes = tuple(range(first, values.ndim))
    for axis in reversed(axes):
        values = plgpu.layout_cast(by(values, axis=axis), layout.reduce(axes[axis - first :]))
    return values


# Layouts of `[rows, ..., vector]`, a vector being 16 bytes. (A last axis that is wide enough to be swizzled sends JAX
# 0.12's inference of layouts astray, and so does an axis of one.)


def row_each(shape: tuple[int, ...]) -> Any:
    """A row to each thread: it reduces without another thread."""
    tiling = plgpu.Tiling((shape, (_LANES, *shape[1:])))
    return plgpu.Layout.TILED(tiling, (-2 * len(shape),), (-len(shape),), -1)


def row_each_few(shape: tuple[int, ...]) -> Any:
    """A row to each `SHARING` threads: `[rows, ..., SHARING, vector]`; or to each of them, where `[rows, vector]`."""
    tiling, ndim = plgpu.Tiling((shape, (shape[0] // _WARPS, *shape[1:]))), len(shape)
    lanes = (-ndim, plgpu.Replicated(SHARING) if ndim == 2 else -2)
    return plgpu.Layout.TILED(tiling, (-2 * ndim,), lanes, -1)
