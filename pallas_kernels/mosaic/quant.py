"""Dense rows to quantised rows of their slots: codes and scales made and written in one launch, a batch a block.

The rows that are this rank's come into shared memory by bulk copies, one behind the other wherever they stand in the
batch. There they are one array of units that share a scale, and the threads take a chunk of units at a time: an FP4
block of 16 elements is one thread's, which needs no other to find its exponent and to pack its codes; a tile of 128 is
16 threads'. What they make lies in shared memory in rows as well, and leaves by a bulk copy a row where that is a
multiple of 16 bytes, through registers otherwise, as most rows of FP4 scales do.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.codecs import dsa, fp4, fp8_cast
from pallas_kernels.dispatch import KernelConfig
from pallas_kernels.mosaic.launch import Batch, Launch, Refs, fetch, finish_copies, plgpu, store
from pallas_kernels.mosaic.plan import THREADS, Columns, Plan, flat, staged_rows
from pallas_kernels.mosaic.units import (
    FLOATS,
    SHARING,
    block_columns,
    bytes_of,
    load_rows,
    memory,
    reduce,
    refusal_of_rows,
    row_each,
    row_each_few,
    send_row,
    spread,
    store_rows,
    words_of,
)


@dataclasses.dataclass(frozen=True)
class Part:
    """Units of rows to quantise, and what becomes of them.

    Attributes:
      rows: the array `[N, ...]` of floats, or a `jax.ShapeDtypeStruct`.
      at: the first element of a row. count: units, of `unit` elements each.
      made: the columns of buffers that are made of them.
    """

    rows: Any
    at: int
    count: int
    made: tuple[Columns, ...]
    unit: ClassVar[int]
    chunk: ClassVar[int]  # units that the threads take at a time
    direct: ClassVar[bool] = False  # whether their bytes go as they are

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.count * self.unit

    def dense(self) -> jax.Array:
        """The rows as the kernel reads them, one axis each."""
        return flat(self.rows, 1)

    def taken(self, row: Any) -> tuple[Any, Any]:
        """Where a row of theirs is: in a row of `dense`, and as row number `row` of those in shared memory."""
        words = self.rows.dtype.itemsize if self.direct else 1
        width = self.width * words
        return pl.ds(self.at * words, width), pl.ds(row * width, width)

    @property
    def row_bytes(self) -> int:
        """Of shared memory for a row."""
        raw = 0 if self.direct else self.width * self.rows.dtype.itemsize
        return raw + sum(c.width * c.buffer_bytes for c in self.made)

    def units(self, rows: int) -> int:
        """Units in shared memory for so many rows: whole chunks."""
        return -(-rows * self.count // self.chunk) * self.chunk

    def shared(self, rows: int) -> tuple[Any, list[Any]]:
        """Shared memory for so many rows: for what comes, None where that is what is made, and for what is made."""
        units = self.units(rows)
        raw = None if self.direct else plgpu.SMEM((units * self.unit,), self.rows.dtype)
        return raw, memory(self.made, units, self.count)

    def encode(self, raw: Any, made: Sequence[Any], first: Any, interpret: bool) -> None:
        """Makes of a chunk of units, from unit `first` on, what `made` holds."""
        raise NotImplementedError


class Blocks(Part):
    """FP4 blocks: two words of codes, and a scale byte in another buffer."""

    unit, chunk = fp4.BLOCK, THREADS

    @classmethod
    def of(cls, rows: Any, codes: int, scales: int, start: int, row_blocks: int) -> "Blocks":
        """All of `rows`, to the blocks from `start` on of the rows of these buffers."""
        count = math.prod(rows.shape[1:]) // fp4.BLOCK
        return cls(rows, 0, count, block_columns(codes, scales, start, count, row_blocks))

    def encode(self, raw: Any, made: Sequence[Any], first: Any, interpret: bool) -> None:
        """See `codecs.fp4`: a block each thread."""
        vector = 16 // raw.dtype.itemsize
        shape = (THREADS, 2, 8) if vector == 8 else (THREADS, 2, 2, vector)
        layout = row_each(shape)
        magnitude, negative = fp4.magnitudes(load_rows(raw, first, shape, layout, interpret))
        exponent = fp4.exponents(reduce(jnp.max, magnitude, 1, layout))
        code = fp4.codes(magnitude, negative, spread(exponent, shape, layout))
        for axis in range(2, len(shape)):
            place = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
            code = code << (place * np.int32(4 * math.prod(shape[axis + 1 :])))
        words = reduce(functools.partial(jnp.sum, dtype=jnp.int32), code, 2, layout)
        store_rows(made[0], first, lax.bitcast_convert_type(words, jnp.uint32), interpret)
        store(made[1].at[pl.ds(first, THREADS)], fp4.scale_bytes(exponent).astype(jnp.uint8))


class Tiles(Part):
    """Tiles of an FP8 latent: 128 codes, and a float32 scale elsewhere in the row."""

    unit, chunk = dsa.TILE, THREADS // SHARING

    def encode(self, raw: Any, made: Sequence[Any], first: Any, interpret: bool) -> None:
        """See `codecs.dsa`: a tile each 16 threads."""
        vector = 16 // raw.dtype.itemsize
        shape = (self.chunk, SHARING, 8) if vector == 8 else (self.chunk, 2, SHARING, vector)
        layout = row_each_few(shape)
        x = load_rows(raw, first, shape, layout, interpret)
        scale = dsa.scales(reduce(jnp.max, dsa.magnitudes(x), 1, layout))
        cast = functools.partial(fp8_cast.encode, clamp=interpret)  # the chip saturates
        code = dsa.codes(x, spread(scale, shape, layout), fp8_cast.divide, cast)
        store_rows(made[0], first, code, interpret)
        layout = row_each_few((self.chunk, 4))
        bits = spread(lax.bitcast_convert_type(scale, jnp.int32), (self.chunk, 4), layout)
        store_rows(made[1], first, bytes_of(bits, layout), interpret)


class Rope(Part):
    """Elements of a rope, cast to bfloat16: two bytes each."""

    unit, chunk = 1, THREADS

    def encode(self, raw: Any, made: Sequence[Any], first: Any, interpret: bool) -> None:
        """An element each thread."""
        layout = row_each((THREADS, 2))
        x = plgpu.load(raw.at[pl.ds(first, THREADS)], layout=layout.reduce(1), optimized=False)
        bits = lax.bitcast_convert_type(x.astype(jnp.float32).astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32)
        store_rows(made[0], first, bytes_of(spread(bits, (THREADS, 2), layout), layout), interpret)


class Bytes(Part):
    """Elements whose bytes go as they are."""

    unit, chunk, direct = 1, 1, True

    def dense(self) -> jax.Array:
        """Bytes."""
        return flat(lax.bitcast_convert_type(flat(self.rows, 1), jnp.uint8), 1)


def scatter(
    name: str,
    buffers: Sequence[jax.Array],
    parts: Sequence[Part],
    loc: jax.Array,
    *,
    layer: Any,
    config: KernelConfig,
    interpret: bool,
    **slots: Any,
) -> tuple[jax.Array, ...]:
    """Writes what is made of `parts` to the rows of their slots, in place, in one launch.

    Args:
      name: of the kernel, for profiles.
      buffers: words `[rows, width]`, or `[layers, rows, width]` with `layer`. Together the parts are all of a row.
      layer: None, or an index that may be traced.
      slots: the keywords of `index.local_row`.
    """
    parts = [part for part in parts if part.count]
    if not parts or not loc.size:
        return tuple(buffers)
    row_bytes = sum(part.row_bytes for part in parts)
    plan = Plan(min(loc.shape[0], config.rows or staged_rows(1, row_bytes, loc.shape[0])), "bulk")
    launch = Launch(plan, loc, buffers[0], layer, **slots)
    some = slots["dcp_size"] > 1  # of a batch's rows are this rank's
    raws, made_by = zip(*(part.shared(plan.rows) for part in parts), strict=True)
    starts = list(itertools.accumulate((len(made) for made in made_by), initial=0))

    def body(refs: Refs) -> None:
        batch = Batch(launch, refs)
        made = [refs.shared["packed"][start : start + len(m)] for start, m in zip(starts, made_by, strict=False)]
        raws = [m[0] if raw is None else raw for raw, m in zip(refs.shared["raw"], made, strict=True)]
        places, here = _places(batch.rows) if some else (range(plan.rows), np.int32(plan.rows))
        for t, row in enumerate(batch.rows):

            @pl.when(row >= 0)
            def _start(t=t):
                for source, raw, part in zip(refs.dense, raws, parts, strict=True):
                    of, to = part.taken(places[t])
                    fetch(source.at[(*batch.dense(t), of)], raw.at[to], refs.shared["arrived"].at[t])

        for t, row in enumerate(batch.rows):

            @pl.when(row >= 0)
            def _wait(t=t):
                plgpu.barrier_wait(refs.shared["arrived"].at[t])

        for part, raw, to in zip(parts, raws, made, strict=True):
            if not part.direct:
                chunks = lax.div(here * np.int32(part.count) + np.int32(part.chunk - 1), np.int32(part.chunk))

                def encode(chunk: Any, _: None, part=part, raw=raw, to=to) -> None:
                    part.encode(raw, to, chunk * np.int32(part.chunk), interpret)

                lax.fori_loop(np.int32(0), chunks, encode, None)
        plgpu.commit_smem()
        for t, row in enumerate(batch.rows):

            @pl.when(row >= 0)
            def _store_row(t=t):
                for part, to in zip(parts, made, strict=True):
                    for source, columns in zip(to, part.made, strict=True):
                        send_row(source, places[t], refs.buffers[columns.buffer].at[batch.buffer(t)], columns)

        finish_copies()

    shared = {
        "raw": list(raws),
        "packed": [x for made in made_by for x in made],
        "arrived": plgpu.Barrier(num_arrivals=len(parts), num_barriers=plan.rows),
    }
    targets = [jax.new_ref(buffer) for buffer in buffers]
    launch.run(name, body, [part.dense() for part in parts], targets, (), shared, interpret)
    return tuple(jax.freeze(target) for target in targets)


def scatter_fp4(
    name: str,
    packed: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    parts: Sequence[Part],
    loc: jax.Array,
    *,
    layer: Any,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """`scatter` to buffers of codes `[rows, heads, dim / 2]` and then those of scales, all of uint8."""
    lead = 1 if layer is None else 2
    buffers = [*(words_of(b, lead) for b in packed), *scales]
    new = scatter(name, buffers, parts, loc, layer=layer, **options)
    codes = zip(new, packed, strict=False)
    return *(lax.bitcast_convert_type(w, jnp.uint8).reshape(b.shape) for w, b in codes), *new[len(packed) :]


def refusal_of(parts: Sequence[Part], config: KernelConfig | None, *operands: Any) -> str | None:
    """Why `scatter` cannot take these parts of `operands` (trees of arrays, or of their stand-ins), or None."""
    for part in parts:
        if part.rows.dtype.name not in FLOATS:
            return f"it quantises {', '.join(FLOATS)}, not {part.rows.dtype}"
        if any(x * part.rows.dtype.itemsize % 16 for x in (part.at, part.width, math.prod(part.rows.shape[1:]))):
            return f"bulk copies move multiples of 16 bytes, not {part.width} elements of {part.rows.dtype} rows"
    return refusal_of_rows(sum(part.row_bytes for part in parts), config, "quantised", *operands)


def _places(rows: Sequence[Any]) -> tuple[list[Any], Any]:
    """How many of this rank's rows stand before each, and how many there are."""
    places, here = [], jnp.int32(0)
    for row in rows:
        places.append(here)
        here = here + (row >= 0).astype(jnp.int32)
    return places, here
