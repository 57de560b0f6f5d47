"""One launch of a kernel: its operands, the rows of each block, and how registers meet memory."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels import dispatch, index
from pallas_kernels.mosaic.plan import THREADS, Plan

plgpu: Any = mosaic_gpu  # whose signatures differ between the supported versions of JAX
_LANES = 32  # of a warp


class Refs(NamedTuple):
    """What the body of a kernel works on: operands in memory, and a block's own in shared memory."""

    loc: Any
    scalars: Sequence[Any]
    dense: Sequence[Any]
    buffers: Sequence[Any]
    shared: dict[str, Any]


class Batch:
    """The rows of the block that runs this.

    Attributes:
      start: the first dense row.
      rows: for each the row of the buffers, or -1 where there is nothing to move.
    """

    def __init__(self, launch: "Launch", refs: Refs) -> None:
        self._launch, self._refs, count = launch, refs, launch.plan.rows
        block, blocks = lax.axis_index("block"), pl.cdiv(launch.n, count)
        if launch.every:
            layer, block = lax.div(block, np.int32(blocks)), lax.rem(block, np.int32(blocks))
        # The last batch ends with the last row; the rows that it shares with the one before are not its own.
        self._first = block * count
        self.start = jnp.minimum(self._first, launch.n - count)
        ids = [refs.loc[self.start + t] for t in range(count)]  # all in flight before anything else
        self._rank, self._inside = launch.rank(refs), None
        if not launch.every:
            layer = launch.layer(refs)
        if layer is not None and not launch.every:
            self._inside = (layer >= 0) & (layer < launch.layers)
            layer = jnp.where(self._inside, layer, 0)
        self._buffer_lead = () if layer is None else (layer,)
        self._dense_lead = self._buffer_lead if launch.every else ()
        self.rows = [self._row(t, loc) for t, loc in enumerate(ids)]

    def row(self, t: Any) -> Any:
        """`rows[t]` for a `t` that is traced."""
        return self._row(t, self._refs.loc[self.start + t])

    def _row(self, t: Any, loc: Any) -> Any:
        row = self._launch.local_row(loc, dcp_rank=self._rank).astype(jnp.int32)
        for condition in (self._inside, self.own(t)):
            row = row if condition is None else jnp.where(condition, row, -1)
        return row

    def own(self, t: Any) -> Any:
        """Whether this block writes row t, or None where that is known."""
        return None if self._launch.n % self._launch.plan.rows == 0 else self.start + t >= self._first

    def dense(self, t: Any) -> tuple[Any, ...]:
        """Index of row t in dense arrays."""
        return (*self._dense_lead, self.start + t)

    def tile(self) -> tuple[Any, ...]:
        """Index of all rows in dense arrays."""
        return (*self._dense_lead, pl.ds(self.start, self._launch.plan.rows))

    def buffer(self, t: int) -> tuple[Any, ...]:
        """Index of row t in buffers."""
        return (*self._buffer_lead, self.rows[t])


class Launch:
    """The geometry of a launch, and the scalars that the kernel reads from memory because they are traced.

    (They are handed over one by one: bringing them together would be a kernel of its own.)
    """

    def __init__(
        self,
        plan: Plan,
        loc: jax.Array,
        buffer: jax.Array,
        layer: Any,
        *,
        dcp_rank: Any,
        **slots: Any,
    ) -> None:
        self.plan, self.loc, self.n = plan, loc, loc.shape[0]
        self.every = isinstance(layer, slice)
        self.layers = 1 if layer is None else buffer.shape[0]
        self.local_row: Callable[..., Any] = functools.partial(
            index.local_row, rows=index.rows_of(buffer, layer), **slots
        )
        self._scalars: list[jax.Array] = []
        self.rank = self.scalar(dcp_rank, jnp.int32)
        self.layer = self.scalar(None if self.every else layer, jnp.int32)

    def scalar(self, value: Any, dtype: Any) -> Callable[[Refs], Any]:
        """What reads `value` inside the kernel."""
        if value is None or isinstance(value, int):
            return lambda refs: value
        self._scalars.append(jnp.asarray(value).astype(dtype).reshape(1))
        place = len(self._scalars) - 1
        return lambda refs: refs.scalars[place][0]

    def run(
        self,
        name: str,
        body: Callable[[Refs], None],
        inputs: Sequence[jax.Array],
        targets: Sequence[Any],
        out: Sequence[jax.ShapeDtypeStruct],
        shared: dict[str, Any],
        interpret: bool,
    ) -> Sequence[jax.Array]:
        """Runs `body` in each block; `targets` are references that it writes, `out` the types of new arrays."""

        def kernel(loc: Any, *refs: Any, **shared: Any) -> None:
            if not interpret:  # the interpreter does not know it
                plgpu.griddepcontrol_wait()
            cuts = list(itertools.accumulate((len(self._scalars), len(inputs))))
            scalars, sources, written = refs[: cuts[0]], refs[cuts[0] : cuts[1]], refs[cuts[1] :]
            dense, buffers = (written, sources) if out else (sources, written)
            body(Refs(loc, scalars, dense, buffers, shared))

        call = plgpu.kernel(
            kernel,
            out_type=tuple(out),
            grid=(pl.cdiv(self.n, self.plan.rows) * (self.layers if self.every else 1),),
            grid_names=("block",),
            scratch_types=shared,
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
            kernel_name=name,
            interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        )
        with contextlib.nullcontext() if interpret else dispatch.for_gpu("NVIDIA H200"):
            return call(self.loc, *self._scalars, *inputs, *targets)


def load(ref: Any, vector: int) -> jax.Array:
    """The whole of `ref`, in accesses of `vector` elements."""
    return plgpu.load(ref, layout=_layout(ref.shape, vector), optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Writes the whole of `ref`, in accesses as `value` was loaded with."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # JAX 0.11, where an assignment means the same
        ref[...] = value


def zeros(size: int, dtype: Any, vector: int) -> jax.Array:
    """What `load` gives for a reference that holds zeros."""
    return plgpu.layout_cast(jnp.zeros(size, dtype), _layout((size,), vector))


def fetch(source: Any, target: Any, arrived: Any) -> None:
    """Starts a bulk copy of consecutive memory into shared memory; `arrived` counts it when it is there."""
    plgpu.copy_gmem_to_smem(source, target, arrived, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def finish_copies() -> None:
    """Waits until the bulk copies have left shared memory, which a block owes before it ends."""
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@functools.cache
def _layout(shape: tuple[int, ...], vector: int) -> Any:
    """How elements lie in the registers of a block; where there are fewer vectors than threads, they repeat."""
    vectors = math.prod(shape) // vector
    if vectors % THREADS == 0:
        return plgpu.Layout.WG_STRIDED(shape, vector)
    (length,) = shape
    if vectors > _LANES:
        tiling = plgpu.Tiling(((length,), (_LANES * vector,), (vector,)))
        return plgpu.Layout.TILED(tiling, (-3, plgpu.Replicated(THREADS // vectors)), (-2,), -1)
    lanes: tuple[Any, ...] = () if vectors == 1 else (-2,)
    lanes += () if vectors == _LANES else (plgpu.Replicated(_LANES // vectors),)
    tiling = plgpu.Tiling(((length,),) if vectors == 1 else ((length,), (vector,)))
    return plgpu.Layout.TILED(tiling, (plgpu.Replicated(THREADS // _LANES),), lanes, -1)
