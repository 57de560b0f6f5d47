"""Quantised rows of slots to dense rows of floats, read and multiplied out in one launch, a batch of rows a block.

Codes and scales of the rows that are this rank's come into shared memory, by bulk copies where they are multiples of 16
bytes, else through registers; the other rows are zeros there. The threads make floats of a chunk of units at a time, in
shared memory as well, from where each row leaves by a bulk copy.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.codecs import dsa, fp4
from pallas_kernels.dispatch import KernelConfig
from pallas_kernels.mosaic.launch import Batch, Launch, Refs, fetch, finish_copies, load, plgpu, store, zeros
from pallas_kernels.mosaic.plan import THREADS, Columns, Plan, staged_rows
from pallas_kernels.mosaic.units import (
    FLOATS,
    SHARING,
    block_columns,
    digits,
    load_rows,
    memory,
    refusal_of_rows,
    row_each,
    row_each_few,
    send_row,
    spread,
    store_rows,
)


@dataclasses.dataclass(frozen=True)
class Part:
    """Units of rows in buffers that become a dense array `[N, width]`.

    Attributes:
      taken: the columns of buffers that they are. count: units, of `unit` elements each. dtype: of the dense array.
    """

    taken: tuple[Columns, ...]
    count: int
    dtype: Any
    unit: ClassVar[int]
    chunk: ClassVar[int]  # units that the threads take at a time

    @property
    def dense(self) -> Columns:
        """The dense array's rows."""
        width, size = self.count * self.unit, jnp.dtype(self.dtype).itemsize
        return Columns(0, 0, width, width, size, size)

    @property
    def row_bytes(self) -> int:
        """Of shared memory for a row."""
        return sum(c.width * c.buffer_bytes for c in (*self.taken, self.dense))

    def shared(self, rows: int) -> tuple[list[Any], Any]:
        """Shared memory for so many rows: for what is taken, and for floats."""
        units = -(-rows * self.count // self.chunk) * self.chunk
        return memory(self.taken, units, self.count), plgpu.SMEM((units * self.unit,), self.dtype)

    def decode(self, taken: Sequence[Any], to: Any, first: Any, interpret: bool) -> None:
        """Makes floats of a chunk of units from unit `first` on."""
        raise NotImplementedError


class Blocks(Part):
    """FP4 blocks: two words of codes, and a scale byte in another buffer."""

    unit, chunk = fp4.BLOCK, THREADS

    @classmethod
    def of(cls, codes: int, scales: int, start: int, count: int, row_blocks: int, dtype: Any) -> "Blocks":
        """So many blocks from block `start` on of the rows of these buffers."""
        return cls(block_columns(codes, scales, start, count, row_blocks), count, dtype)

    def decode(self, taken: Sequence[Any], to: Any, first: Any, interpret: bool) -> None:
        """See `codecs.fp4`: a block each thread."""
        vector = 16 // jnp.dtype(self.dtype).itemsize
        shape = (THREADS, 2, 8) if vector == 8 else (THREADS, 2, 2, vector)
        layout, inner = row_each(shape), tuple(range(2, len(shape)))
        words = load_rows(taken[0], first, (THREADS, 2), layout.reduce(inner), interpret)
        scale = plgpu.load(taken[1].at[pl.ds(first, THREADS)], layout=layout.reduce((1, *inner)), optimized=False)
        words = spread(lax.bitcast_convert_type(words, jnp.int32), shape, layout)
        code = digits(words, 4, 2, layout) & 15
        values = fp4.values(code, spread(scale.astype(jnp.int32), shape, layout))
        store_rows(to, first, values.astype(self.dtype), interpret)


class Tiles(Part):
    """Tiles of an FP8 latent: 32 words of codes, and a float32 scale elsewhere in the row."""

    unit, chunk = dsa.TILE, THREADS // SHARING

    def decode(self, taken: Sequence[Any], to: Any, first: Any, interpret: bool) -> None:
        """See `codecs.dsa`: a tile each 16 threads."""
        shape = self.chunk, 2, SHARING, 4
        layout = row_each_few(shape)
        words = load_rows(taken[0], first, shape[:3], layout.reduce(3), interpret)
        code = digits(spread(lax.bitcast_convert_type(words, jnp.int32), shape, layout), 8, 3, layout) & 255
        scale = plgpu.load(taken[1].at[pl.ds(first, self.chunk)], layout=layout.reduce((1, 2, 3)), optimized=False)
        values = dsa.values(code, spread(lax.bitcast_convert_type(scale, jnp.float32), shape, layout))
        store_rows(to, first, values.astype(self.dtype), interpret)


class Rope(Part):
    """Pairs of bfloat16 elements, a word each."""

    unit, chunk = 2, THREADS

    def decode(self, taken: Sequence[Any], to: Any, first: Any, interpret: bool) -> None:
        """A pair each thread."""
        shape, layout = (THREADS, 2), row_each((THREADS, 2))
        words = plgpu.load(taken[0].at[pl.ds(first, THREADS)], layout=layout.reduce(1), optimized=False)
        words = spread(lax.bitcast_convert_type(words, jnp.int32), shape, layout)
        # The upper half of a float32.
        bits = digits(words, 16, 1, layout) << 16
        store_rows(to, first, lax.bitcast_convert_type(bits, jnp.float32).astype(self.dtype), interpret)


def gather(
    name: str,
    buffers: Sequence[jax.Array],
    parts: Sequence[Part],
    loc: jax.Array,
    *,
    layer: Any,
    config: KernelConfig,
    interpret: bool,
    **slots: Any,
) -> list[jax.Array]:
    """An array `[N, width]` for each of `parts`, in one launch; zeros for rows that this rank does not hold.

    Args:
      name: of the kernel, for profiles.
      buffers: words `[rows, width]`, or `[layers, rows, width]` with `layer`.
      layer: None, or an index that may be traced.
      slots: the keywords of `index.local_row`.
    """
    n = loc.shape[0]
    out = [jax.ShapeDtypeStruct((n, part.dense.width), part.dtype) for part in parts]
    if n == 0:
        return [jnp.zeros(o.shape, o.dtype) for o in out]
    row_bytes = sum(part.row_bytes for part in parts)
    plan = Plan(min(n, config.rows or staged_rows(1, row_bytes, n)), "bulk")
    launch = Launch(plan, loc, buffers[0], layer, **slots)
    taken_by, dense = zip(*(part.shared(plan.rows) for part in parts), strict=True)
    starts = list(itertools.accumulate((len(taken) for taken in taken_by), initial=0))
    columns = [c for part in parts for c in part.taken]
    bulk = sum(c.bulk for c in columns)

    def body(refs: Refs) -> None:
        batch = Batch(launch, refs)
        _take(refs, batch, columns)
        taken = [refs.shared["raw"][start : start + len(m)] for start, m in zip(starts, taken_by, strict=False)]
        for part, of, to in zip(parts, taken, refs.shared["packed"], strict=True):
            chunks = -(-plan.rows * part.count // part.chunk)

            def decode(chunk: Any, _: None, part=part, of=of, to=to) -> None:
                part.decode(of, to, chunk * np.int32(part.chunk), interpret)

            lax.fori_loop(np.int32(0), np.int32(chunks), decode, None)
        plgpu.commit_smem()
        for t in range(plan.rows):

            def write(t=t):
                for part, source, target in zip(parts, refs.shared["packed"], refs.dense, strict=True):
                    send_row(source, t, target.at[batch.dense(t)], part.dense)

            write() if (own := batch.own(t)) is None else pl.when(own)(write)
        finish_copies()

    shared: dict[str, Any] = {"raw": [x for taken in taken_by for x in taken], "packed": list(dense)}
    shared["arrived"] = plgpu.Barrier(num_arrivals=max(bulk, 1), num_barriers=plan.rows) if bulk else None
    return list(launch.run(name, body, buffers, (), out, shared, interpret))


def refusal_of(parts: Sequence[Part], config: KernelConfig | None, *operands: Any) -> str | None:
    """Why `gather` cannot make these parts of `operands` (trees of arrays, or of their stand-ins), or None."""
    for part in parts:
        if jnp.dtype(part.dtype).name not in FLOATS:
            return f"it reads as {', '.join(FLOATS)}, not {jnp.dtype(part.dtype)}"
    return refusal_of_rows(sum(part.row_bytes for part in parts), config, "multiplied out", *operands)


def _take(refs: Refs, batch: Batch, columns: Sequence[Columns]) -> None:
    """Brings the columns of a batch's rows into shared memory; zeros for rows that are not here."""
    raw, arrived = refs.shared["raw"], refs.shared["arrived"]
    bulk = [(to, c) for to, c in zip(raw, columns, strict=True) if c.bulk]
    rest = [(to, c) for to, c in zip(raw, columns, strict=True) if not c.bulk]
    for t, row in enumerate(batch.rows):

        @pl.when(row >= 0)
        def _start(t=t):
            for to, c in bulk:
                source = refs.buffers[c.buffer].at[(*batch.buffer(t), pl.ds(c.start, c.width))]
                fetch(source, to.at[pl.ds(t * c.width, c.width)], arrived.at[t])

    loaded = [_load(refs, batch, t, [c for _, c in rest]) for t in range(len(batch.rows))]
    for t, row in enumerate(batch.rows):

        @pl.when(row < 0)
        def _blank(t=t):
            for to, c in bulk:
                for at, size in c.pieces(staged=True):
                    store(to.at[pl.ds(t * c.width + at, size)], zeros(size, to.dtype, c.vector(staged=True)))

        for (to, c), values in zip(rest, loaded[t], strict=True):
            for (at, size), value in zip(c.pieces(staged=False), values, strict=True):
                store(to.at[pl.ds(t * c.width + at, size)], value)
    plgpu.commit_smem()
    for t, row in enumerate(batch.rows if bulk else ()):

        @pl.when(row >= 0)
        def _wait(t=t):
            plgpu.barrier_wait(arrived.at[t])


def _load(refs: Refs, batch: Batch, t: int, columns: Sequence[Columns]) -> Any:
    """The columns of row t in registers, or zeros."""

    def read():
        rows = [(refs.buffers[c.buffer].at[batch.buffer(t)], c) for c in columns]
        return [
            [load(row.at[pl.ds(c.start + at, size)], c.vector(staged=False)) for at, size in c.pieces(staged=False)]
            for row, c in rows
        ]

    def blank():
        return [
            [zeros(size, refs.buffers[c.buffer].dtype, c.vector(staged=False)) for _, size in c.pieces(staged=False)]
            for c in columns
        ]

    return lax.cond(batch.rows[t] >= 0, read, blank) if columns else []
