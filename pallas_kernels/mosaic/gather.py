"""Rows of slots to dense rows."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import KernelConfig
from pallas_kernels.mosaic import straight
from pallas_kernels.mosaic.launch import Batch, Launch, Refs, fetch, finish_copies, plgpu, store, zeros
from pallas_kernels.mosaic.plan import Columns, flat, plan


def gather(
    name: str,
    buffers: Sequence[jax.Array],
    columns: Sequence[Columns],
    loc: jax.Array,
    *,
    layer: Any = None,
    config: KernelConfig,
    interpret: bool,
    **slots: Any,
) -> tuple[jax.Array, ...]:
    """An array `[N, width]` (or `[layers, N, width]`) for each of `columns`, in one launch; see `scatter`.

    Rows that this rank does not hold are zeros.
    """
    layers = (buffers[0].shape[0],) if isinstance(layer, slice) else ()
    out = [jax.ShapeDtypeStruct((*layers, loc.shape[0], c.width), buffers[c.buffer].dtype) for c in columns]
    if any(o.size == 0 for o in out):
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    launch = Launch(plan(columns, loc.shape[0], config, tile=False), loc, buffers[0], layer, **slots)
    count, way = launch.plan.rows, launch.plan.way

    def body(refs: Refs) -> None:
        batch = Batch(launch, refs)
        if way == "straight":
            straight.move(
                columns,
                count,
                lambda t, c: (
                    refs.buffers[columns[c].buffer].at[batch.buffer(t)],
                    columns[c].start,
                    batch.rows[t] >= 0,
                ),
                lambda t, c: (refs.dense[c].at[batch.dense(t)], 0, batch.own(t)),
                lambda c, values: values,
            )
        else:
            _fetch(refs, batch, columns)
            _send(refs, batch)

    shared: dict[str, Any] = {}
    if way != "straight":
        shared["packed"] = [plgpu.SMEM((count, o.shape[-1]), o.dtype) for o in out]
        shared["arrived"] = plgpu.Barrier(num_arrivals=len(columns), num_barriers=count)
    inputs = [flat(b, 1 if layer is None else 2) for b in buffers]
    return tuple(launch.run(name, body, inputs, (), out, shared, interpret))


def _fetch(refs: Refs, batch: Batch, columns: Sequence[Columns]) -> None:
    """Bulk copies of this rank's rows into shared memory, zeros for the others; all there when this returns."""
    packed, arrived = refs.shared["packed"], refs.shared["arrived"]
    for t, row in enumerate(batch.rows):

        @pl.when(row >= 0)
        def _start(t=t):
            for rows, c in zip(packed, columns, strict=True):
                source = refs.buffers[c.buffer].at[(*batch.buffer(t), pl.ds(c.start, c.width))]
                fetch(source, rows.at[t], arrived.at[t])

    for t, row in enumerate(batch.rows):

        @pl.when(row < 0)
        def _blank(t=t):
            for rows, c in zip(packed, columns, strict=True):
                vector = c.vector(staged=True)
                for at, size in c.pieces(staged=True):
                    store(rows.at[t, pl.ds(at, size)], zeros(size, rows.dtype, vector))

    plgpu.commit_smem()
    for t, row in enumerate(batch.rows):

        @pl.when(row >= 0)
        def _wait(t=t):
            plgpu.barrier_wait(arrived.at[t])


def _send(refs: Refs, batch: Batch) -> None:
    """The packed rows to the dense ones: in one copy where all are this block's to write."""
    for packed, dense in zip(refs.shared["packed"], refs.dense, strict=True):
        for t in range(len(batch.rows)):
            if (own := batch.own(t)) is None:
                plgpu.copy_smem_to_gmem(packed, dense.at[batch.tile()], commit_group=False)
                break

            @pl.when(own)
            def _start(t=t, packed=packed, dense=dense):
                plgpu.copy_smem_to_gmem(packed.at[t], dense.at[batch.dense(t)], commit_group=False)

    finish_copies()
