"""`aot` for the mosaic kernels: a pool's doors use them too, and faults are planted in them.

python tests/kernels/aot_mosaic.py CHIP < calls.json > facts.json
"""

import contextlib
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
        """The row by way of its first element's number, in 32 bits."""
        *lead, row = right(batch, t)
        width = np.int32(batch._refs.buffers[0].shape[-1])
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
    """Reads calls, prints facts."""
    from pallas_kernels import dispatch

    door = aot.Program._door

    def mosaic_door(program: aot.Program) -> Any:
        with dispatch.use("mosaic"):
            return door(program)

    aot.Program._door, aot.planted = mosaic_door, planted
    aot.main(chip)


if __name__ == "__main__":
    main(sys.argv[1])
