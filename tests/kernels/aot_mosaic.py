"""`aot` for the mosaic kernels: a pool's doors use them too, faults are planted in them, and their plans are told.

python tests/kernels/aot_mosaic.py CHIP < calls.json > facts.json
"""

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import aot


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """The library with a fault in it."""
    import jax
    import numpy as np
    from jax import lax

    from pallas_kernels.mosaic.launch import Batch

    right = Batch.buffer

    def buffer(batch: Batch, t: int) -> tuple[Any, ...]:
        """The row by way of its first byte's number, in 32 bits."""
        *lead, row = right(batch, t)
        rows = batch._refs.buffers[0]
        width = np.int32(rows.shape[-1] * rows.dtype.itemsize)
        return (*lead, lax.div(row * width, width))

    if fault not in (None, "32-bit offset"):
        raise ValueError(f"no fault {fault!r}")
    jax.clear_caches()
    Batch.buffer = right if fault is None else buffer
    try:
        yield
    finally:
        Batch.buffer = right


def main(chip: str) -> None:
    """Reads calls, prints facts. `plans`: of each kernel the way, rows of a block, blocks and shared bytes."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import dispatch
    from pallas_kernels.mosaic.launch import Launch

    door, run, read, plans = aot.Program._door, Launch.run, aot.facts, {}

    def mosaic_door(program: aot.Program) -> Any:
        with dispatch.use("mosaic"):
            return door(program)

    def planned_run(launch: Launch, name: str, *args: Any) -> Any:
        *_, shared, _ = args
        arrays = [x for key in ("packed", "raw") for x in shared.get(key, []) if x is not None]
        plans[f"{name}_mosaic_gpu_kernel"] = {
            "way": launch.plan.way,
            "rows": launch.plan.rows,
            "blocks": -(-launch.n // launch.plan.rows) * (launch.layers if launch.every else 1),
            "shared": sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays),
        }
        return run(launch, name, *args)

    def facts(*args: Any) -> dict[str, Any]:
        found = read(*args)
        made = {name: plans[name] for name in found["ptx"]}
        plans.clear()
        jax.clear_caches()  # so that the next call is planned too
        return found | {"plans": made, "grids": {name: (plan["blocks"], 1) for name, plan in made.items()}}

    Launch.run = planned_run
    aot.Program._door, aot.planted, aot.facts = mosaic_door, planted, facts
    aot.main(chip)


if __name__ == "__main__":
    main(sys.argv[1])
