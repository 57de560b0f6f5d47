"""Dense rows to the rows of their slots."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import KernelConfig
from pallas_kernels.mosaic import straight
from pallas_kernels.mosaic.launch import Batch, Launch, Refs, fetch, finish_copies, load, plgpu, store
from pallas_kernels.mosaic.plan import Columns, Source, flat, plan


def scatter(
    name: str,
    buffers: Sequence[jax.Array],
    sources: Sequence[Source],
    loc: jax.Array,
    *,
    layer: Any = None,
    config: KernelConfig,
    interpret: bool,
    **slots: Any,
) -> tuple[jax.Array, ...]:
    """Writes the rows of `sources` to the rows of their slots, in place, in one launch.

    Args:
      name: of the kernel, for profiles.
      buffers: words `[rows, ...]`, or `[layers, rows, ...]` with `layer`. Together the sources are all of a row.
      layer: None, an index that may be traced, or a slice for all: then the sources' rows are `[layers, N, ...]`.
      slots: the keywords of `index.local_row`.
    """
    lead = 2 if isinstance(layer, slice) else 1
    sources = [source for source in sources if source.rows.size]
    if not sources:
        return tuple(buffers)
    columns = [source.columns(lead) for source in sources]
    some = slots["dcp_size"] > 1  # of a batch's rows are this rank's
    launch = Launch(plan(columns, loc.shape[0], config, tile=not some), loc, buffers[0], layer, **slots)
    scales = [launch.scalar(source.scale, jnp.float32) for source in sources]
    count, way = launch.plan.rows, launch.plan.way

    def body(refs: Refs) -> None:
        batch = Batch(launch, refs)
        scale = [read(refs) for read in scales]

        def encode(c: int, values: Any) -> Any:
            return sources[c].encode(values, scale[c], clamp=interpret)  # the chip saturates

        if way == "straight":
            straight.move(
                columns,
                count,
                lambda t, c: (refs.dense[c].at[batch.dense(t)], 0, batch.rows[t] >= 0 if some else None),
                lambda t, c: (
                    refs.buffers[columns[c].buffer].at[batch.buffer(t)],
                    columns[c].start,
                    batch.rows[t] >= 0,
                ),
                encode,
            )
        elif way == "tile":
            _pack_tiles(refs, batch, columns, encode)
            _send(refs, batch)
        else:
            _fetch(refs, batch, columns)
            if any(source.cast for source in sources):
                _pack_rows(refs, batch, columns, encode, count)
                _send(refs, batch)
            else:
                _send(refs, batch, refs.shared["arrived"])

    targets = [jax.new_ref(flat(b, 1 if layer is None else 2)) for b in buffers]
    shared: dict[str, Any] = {}
    if way != "straight":
        shared["packed"] = [plgpu.SMEM((count, target.shape[-1]), target.dtype) for target in targets]
    if way == "bulk":
        shared["raw"] = [
            plgpu.SMEM((count, c.width), s.rows.dtype) if s.cast else None
            for s, c in zip(sources, columns, strict=True)
        ]
        shared["arrived"] = plgpu.Barrier(num_arrivals=len(sources), num_barriers=count)
    launch.run(name, body, [source.dense(lead) for source in sources], targets, (), shared, interpret)
    return tuple(jax.freeze(target).reshape(b.shape) for target, b in zip(targets, buffers, strict=True))


def _pack_tiles(refs: Refs, batch: Batch, columns: Sequence[Columns], encode: Callable[[int, Any], Any]) -> None:
    """The batch by way of registers, all of it in flight, into the packed rows."""
    tiles = [load(ref.at[batch.tile()], c.vector(staged=True)) for ref, c in zip(refs.dense, columns, strict=True)]
    for c, (tile, column) in enumerate(zip(tiles, columns, strict=True)):
        store(refs.shared["packed"][column.buffer].at[:, pl.ds(column.start, column.width)], encode(c, tile))
    plgpu.commit_smem()


def _fetch(refs: Refs, batch: Batch, columns: Sequence[Columns]) -> None:
    """Starts bulk copies of this rank's rows: into the packed rows, or apart where they are still to be cast."""
    for t, row in enumerate(batch.rows):

        @pl.when(row >= 0)
        def _start(t=t):
            for ref, raw, c in zip(refs.dense, refs.shared["raw"], columns, strict=True):
                packed = refs.shared["packed"][c.buffer].at[t, pl.ds(c.start, c.width)]
                fetch(ref.at[batch.dense(t)], packed if raw is None else raw.at[t], refs.shared["arrived"].at[t])


def _pack_rows(
    refs: Refs, batch: Batch, columns: Sequence[Columns], encode: Callable[[int, Any], Any], count: int
) -> None:
    """Casts the fetched rows into the packed ones; one at a time, since each takes many instructions."""

    def pack(t: Any, _: None) -> None:
        @pl.when(batch.row(t) >= 0)
        def _cast():
            plgpu.barrier_wait(refs.shared["arrived"].at[t])
            for c, (raw, column) in enumerate(zip(refs.shared["raw"], columns, strict=True)):
                packed = refs.shared["packed"][column.buffer]
                for at, size in column.pieces(staged=True) if raw is not None else ():
                    values = load(raw.at[t, pl.ds(at, size)], column.vector(staged=True))
                    store(packed.at[t, pl.ds(column.start + at, size)], encode(c, values))

    lax.fori_loop(0, count, pack, None)
    plgpu.commit_smem()


def _send(refs: Refs, batch: Batch, arrived: Any = None) -> None:
    """Bulk copies of the packed rows to their slots, of each as soon as it has arrived."""
    for t, row in enumerate(batch.rows):

        @pl.when(row >= 0)
        def _start(t=t):
            if arrived is not None:
                plgpu.barrier_wait(arrived.at[t])
            for packed, buffer in zip(refs.shared["packed"], refs.buffers, strict=True):
                plgpu.copy_smem_to_gmem(packed.at[t], buffer.at[batch.buffer(t)], commit_group=False)

    finish_copies()
