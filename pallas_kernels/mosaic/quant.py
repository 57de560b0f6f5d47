"""Dense rows to FP4 rows of their slots: codes and scales made and written in one launch, a batch of rows a block.

The rows that are this rank's come into shared memory by bulk copies, one behind the other wherever they stand in the
batch. There they are one array of blocks of 16 elements, and each thread takes a block at a time: its largest element,
its exponent and its 16 codes need no other thread. Codes leave by a bulk copy a row where that is a multiple of 16
bytes, through registers otherwise, as scales mostly do.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.codecs import fp4
from pallas_kernels.dispatch import KernelConfig
from pallas_kernels.mosaic.launch import Batch, Launch, Refs, fetch, finish_copies, load, plgpu, store
from pallas_kernels.mosaic.plan import SHARED_BYTES, THREADS, Columns, Plan, refusal, staged_rows

_HALF = fp4.BLOCK // 2  # of a block: the codes of a 32-bit word
_SOURCES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Rows to quantise: `[N, ..., D]` floats that become blocks of a buffer's rows from block `start` on.

    Attributes:
      rows: the array, or a `jax.ShapeDtypeStruct`; D is a multiple of 16.
      buffer: index of the buffer, whose rows have `row_blocks` blocks.
    """

    rows: Any
    buffer: int
    start: int
    row_blocks: int

    @property
    def count(self) -> int:
        """Blocks of a row."""
        return math.prod(self.rows.shape[1:]) // fp4.BLOCK

    @property
    def columns(self) -> tuple[Columns, Columns]:
        """What they are of the rows of codes, in 32-bit words, and of the rows of scales, in bytes."""
        words = Columns(self.buffer, 2 * self.start, 2 * self.count, 2 * self.row_blocks, 4, 4)
        return words, Columns(self.buffer, self.start, self.count, self.row_blocks, 1, 1)

    @property
    def row_bytes(self) -> int:
        """Of shared memory for a row."""
        return self.count * (fp4.BLOCK * self.rows.dtype.itemsize + _HALF + 1)


def scatter_fp4(
    name: str,
    packed: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    parts: Sequence[Blocks],
    loc: jax.Array,
    *,
    layer: Any,
    config: KernelConfig,
    interpret: bool,
    **slots: Any,
) -> tuple[jax.Array, ...]:
    """Writes the codes and scale bytes of `parts` to the rows of their slots, in place, in one launch.

    The new `packed`, then the new `scales`.

    Args:
      name: of the kernel, for profiles.
      packed: uint8 `[rows, ...]`, or `[layers, rows, ...]` with `layer`. Together the parts are all of a row.
      scales: uint8 `[rows, row_blocks]` for each of `packed`, or with the layers in front.
      layer: None, or an index that may be traced.
      slots: the keywords of `index.local_row`.
    """
    parts = [part for part in parts if part.rows.size]
    if not parts:
        return *packed, *scales
    plan, lead = _plan(parts, loc.shape[0], config), 1 if layer is None else 2
    launch = Launch(plan, loc, packed[0], layer, **slots)
    some = slots["dcp_size"] > 1  # of a batch's rows are this rank's
    words = [_words(b, lead) for b in packed]
    columns = [part.columns[kind] for kind in (0, 1) for part in parts]
    buffers = [kind * len(packed) + part.buffer for kind in (0, 1) for part in parts]

    def body(refs: Refs) -> None:
        batch = Batch(launch, refs)
        raw, made = refs.shared["raw"], refs.shared["packed"]
        places, here = _places(batch.rows) if some else (range(plan.rows), np.int32(plan.rows))
        for t, row in enumerate(batch.rows):

            @pl.when(row >= 0)
            def _start(t=t):
                for source, target, part in zip(refs.dense, raw, parts, strict=True):
                    rows = target.at[pl.ds(places[t] * part.count, part.count)]
                    fetch(source.at[batch.dense(t)], rows, refs.shared["arrived"].at[t])

        for t, row in enumerate(batch.rows):

            @pl.when(row >= 0)
            def _wait(t=t):
                plgpu.barrier_wait(refs.shared["arrived"].at[t])

        for p, part in enumerate(parts):
            chunks = lax.div(here * np.int32(part.count) + np.int32(THREADS - 1), np.int32(THREADS))
            encode = _encode(raw[p], made[p], made[len(parts) + p], interpret)
            lax.fori_loop(np.int32(0), chunks, encode, None)
        plgpu.commit_smem()
        for t, row in enumerate(batch.rows):

            @pl.when(row >= 0)
            def _store(t=t):
                for source, column, b in zip(made, columns, buffers, strict=True):
                    _send(source, places[t], refs.buffers[b].at[batch.buffer(t)], column)

        finish_copies()

    blocks = [-(-plan.rows * part.count // THREADS) * THREADS for part in parts]
    shared = {
        "raw": [plgpu.SMEM((n, fp4.BLOCK), part.rows.dtype) for n, part in zip(blocks, parts, strict=True)],
        "packed": [
            *(plgpu.SMEM((2 * n,), jnp.uint32) for n in blocks),
            *(plgpu.SMEM((n,), jnp.uint8) for n in blocks),
        ],
        "arrived": plgpu.Barrier(num_arrivals=len(parts), num_barriers=plan.rows),
    }
    dense = [part.rows.reshape(part.rows.shape[0], part.count, fp4.BLOCK) for part in parts]
    targets = [jax.new_ref(b) for b in (*words, *scales)]
    launch.run(name, body, dense, targets, (), shared, interpret)
    new = [jax.freeze(target) for target in targets]
    return *(_bytes(w, b) for w, b in zip(new, packed, strict=False)), *new[len(packed) :]


def refusal_of_fp4(parts: Sequence[Blocks], config: KernelConfig | None, *operands: Any) -> str | None:
    """Why `scatter_fp4` cannot take these parts of `operands` (trees of arrays, or of their stand-ins), or None."""
    config = config or KernelConfig()
    for part in parts:
        if part.rows.dtype.name not in _SOURCES:
            return f"it quantises {', '.join(_SOURCES)}, not {part.rows.dtype}"
    if config.stages == 0:
        return "config.stages must be 1: rows are quantised in shared memory"
    needed = (config.rows or 1) * sum(part.row_bytes for part in parts)
    if needed > SHARED_BYTES:
        return f"{config.rows or 1} rows need {needed} bytes of shared memory, more than {SHARED_BYTES}"
    return refusal((), config, *operands)


def _plan(parts: Sequence[Blocks], n: int, config: KernelConfig) -> Plan:
    row_bytes = sum(part.row_bytes for part in parts)
    return Plan(min(n, config.rows or staged_rows(1, row_bytes, n)), "bulk")


def _words(buffer: jax.Array, lead: int) -> jax.Array:
    """Rows of bytes as rows of 32-bit words: the same memory."""
    return lax.bitcast_convert_type(buffer.reshape(*buffer.shape[:lead], -1, 4), jnp.uint32)


def _bytes(words: jax.Array, buffer: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(buffer.shape)


def _places(rows: Sequence[Any]) -> tuple[list[Any], Any]:
    """How many of this rank's rows stand before each, and how many there are."""
    places, here = [], jnp.int32(0)
    for row in rows:
        places.append(here)
        here = here + (row >= 0).astype(jnp.int32)
    return places, here


def _encode(raw: Any, words: Any, scales: Any, interpret: bool) -> Callable[[Any, None], None]:
    """What quantises a chunk of blocks, one a thread."""

    def encode(chunk: Any, _: None) -> None:
        first = chunk * np.int32(THREADS)
        at, layout = pl.ds(first, THREADS), _layout(fp4.BLOCK, 16 // raw.dtype.itemsize)
        magnitude, negative = fp4.magnitudes(plgpu.load(raw.at[at], layout=layout, optimized=False))
        amax = magnitude.max(axis=1)
        exponent = fp4.exponents(amax)
        code = fp4.codes(magnitude, negative, _spread(exponent, magnitude, layout))
        place = plgpu.broadcasted_iota(jnp.int32, code.shape, 1, layout=layout)
        code = code << ((place & 7) * np.int32(4))
        low, high = (jnp.where((place < _HALF) == low, code, 0).sum(axis=1, dtype=jnp.int32) for low in (True, False))
        layout = _layout(2, 2)
        place = plgpu.broadcasted_iota(jnp.int32, (THREADS, 2), 1, layout=layout)
        word = jnp.where(place == 0, _spread(low, place, layout), _spread(high, place, layout))
        _store_flat(words, first, lax.bitcast_convert_type(word, jnp.uint32), interpret)
        store(scales.at[at], fp4.scale_bytes(exponent).astype(jnp.uint8))

    return encode


def _spread(values: Any, like: Any, layout: Any) -> Any:
    """The number that a thread has as the elements of its row, as `like` is laid out."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, like.shape, (0,)), layout)


def _store_flat(ref: Any, first: Any, rows: Any, interpret: bool) -> None:
    """Writes rows from row `first` on of `ref`, which is one axis so that bulk copies can take it apart."""
    count, width = rows.shape
    if interpret:  # which knows no reference of another shape
        ref[pl.ds(first * np.int32(width), count * width)] = rows.reshape(-1)
    else:  # where registers have no other shape
        store(ref.reshape(-1, width).at[pl.ds(first, count)], rows)


def _send(source: Any, place: Any, row: Any, columns: Columns) -> None:
    """Row `place` of what lies in shared memory, to its columns of a row of a buffer."""
    first, start = place * columns.width, columns.start
    if columns.bulk:
        target = row.at[pl.ds(start, columns.width)]
        plgpu.copy_smem_to_gmem(source.at[pl.ds(first, columns.width)], target, commit_group=False)
        return
    vector = columns.vector(staged=False)
    for at, size in columns.pieces(staged=False):
        store(row.at[pl.ds(start + at, size)], load(source.at[pl.ds(first + at, size)], vector))


def _layout(width: int, vector: int) -> Any:
    """A row of `width` elements to each thread, in vectors of `vector`: it reduces without another thread."""
    tiles: tuple[tuple[int, ...], ...] = ((THREADS, width), (32, width))
    if vector == width:
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-4,), (-2,), -1)
    return plgpu.Layout.TILED(plgpu.Tiling((*tiles, (vector,))), (-5,), (-3,), -1)
