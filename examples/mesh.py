"""The device mesh that a model and its pool are spread over: `dcp` ranks share the tokens, `tp` ranks the heads."""

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DCP, TP = "dcp", "tp"
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


class UsageError(ValueError):
    """What was asked for cannot be served; the message says what can."""


def ensure_cpu_devices(count: int) -> None:
    """Has XLA make `count` virtual CPU devices, unless XLA_FLAGS says how many; call it before JAX is first used."""
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT_FLAG}={count}".strip()


def make_mesh(dcp: int, tp: int) -> Mesh:
    """A dcp x tp mesh: of the accelerators if there are enough, else of CPU devices.

    Raises:
        UsageError: a size below 1, or too few devices; with several processes, devices left over.
    """
    if dcp < 1 or tp < 1:
        raise UsageError(f"dcp and tp must be at least 1, got dcp {dcp}, tp {tp}")
    devices, count = jax.devices(), dcp * tp
    if len(devices) < count:
        devices = jax.devices("cpu")
    if len(devices) < count:
        hint = f"set XLA_FLAGS={DEVICE_COUNT_FLAG}={count} for virtual ones"
        raise UsageError(f"dcp {dcp} x tp {tp} needs {count} devices, this program has {len(devices)}; {hint}")
    if jax.process_count() > 1 and len(devices) != count:
        raise UsageError(
            f"dcp {dcp} x tp {tp} must use all {len(devices)} devices of the {jax.process_count()} processes"
        )
    return Mesh(np.array(devices[:count]).reshape(dcp, tp), (DCP, TP))


def put(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Spreads host arrays, which every process holds whole, over the mesh; each device gets its own part only."""

    def place(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

    return jax.tree.map(place, tree, specs)
