"""Which implementation of an op runs: one table, one rule, and the query that says why one cannot."""

import contextlib
import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax import lax

# op -> its implementations, one module `pallas_kernels.<op>.<name>` each, with a function of the op's name. A kernel's
# module also has `unsupported(*args, **options)`: why its function cannot take these arguments, or None.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "scatter_kv": ("triton", "mosaic", "xla"),
    "scatter_mla": ("triton", "mosaic", "xla"),
    "scatter_rows": ("triton", "mosaic", "xla"),
    "gather_rows": ("triton", "mosaic", "xla"),
    "move_rows": ("triton", "mosaic", "xla"),
    "scatter_kv_fp4": ("triton", "mosaic", "xla"),
    "scatter_mla_fp4": ("triton", "mosaic", "xla"),
    "scatter_dsa": ("triton", "mosaic", "xla"),
    "gather_fp4": ("triton", "mosaic", "xla"),
    "gather_dsa": ("triton", "mosaic", "xla"),
}


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How a GPU kernel splits its work; None leaves a field to the implementation's heuristic.

    Attributes:
      rows: rows that one program (a block of threads) moves.
      warps: warps of 32 threads in a program (triton only).
      stages: 0: rows go straight to their slots; 1: by way of shared memory (mosaic only).
    """

    rows: int | None = None
    warps: int | None = None
    stages: int | None = None


@dataclasses.dataclass(frozen=True)
class _Backend:
    """What a kind of GPU kernel needs: a JAX that has `module`, and a chip."""

    module: str
    oldest_jax: tuple[int, ...]
    compute_capability: int


_BACKENDS = {
    # In the order of preference for a program that is lowered for CUDA.
    "triton": _Backend("jax.experimental.pallas.triton", (0, 10), 80),
    # In JAX 0.11.0 no kernel can write to a reference.
    "mosaic": _Backend("jax.experimental.pallas.mosaic_gpu", (0, 11, 1), 90),
}

# A word of the device kind, which is what a mesh says of its chips, and the compute capability times ten.
_COMPUTE_CAPABILITIES = {
    **dict.fromkeys(("V100",), 70),
    **dict.fromkeys(("T4",), 75),
    **dict.fromkeys(("A100", "A30"), 80),
    **dict.fromkeys(("A10", "A40", "A6000"), 86),
    **dict.fromkeys(("L4", "L40", "L40S", "4090"), 89),
    **dict.fromkeys(("H100", "H200", "GH200"), 90),
    **dict.fromkeys(("B200", "GB200"), 100),
    **dict.fromkeys(("B300", "GB300"), 103),
    **dict.fromkeys(("5090",), 120),
    **dict.fromkeys(("GB10",), 121),
}


@dataclasses.dataclass(frozen=True)
class _Use:
    implementation: str | None = None
    interpret: bool = False


# Part of jit's cache key, so that a program traced under one choice is never reused under another.
_use = jax.make_user_context(_Use())


@contextlib.contextmanager
def use(implementation: str | None, *, interpret: bool = False) -> Iterator[None]:
    """In this context (and thread) ops that are not told an implementation use this one.

    Args:
      implementation: a name in the dispatch table, or None for the choice by platform.
      interpret: run its Pallas kernels in JAX's interpreter, on any device: slow, for tests of the kernels' meaning.

    Raises:
      ValueError: an unknown name, or `interpret` without the name of a Pallas implementation.
    """
    if implementation is not None and implementation not in ("xla", *_BACKENDS):
        raise ValueError(f"use: there is no implementation {implementation!r}; there is xla, {', '.join(_BACKENDS)}")
    if interpret and implementation not in _BACKENDS:
        raise ValueError(f"use: interpret is for {' and '.join(_BACKENDS)}, not for {implementation!r}")
    with _use(_Use(implementation, interpret)):
        yield


def device_kind() -> str | None:
    """The kind of GPU that the program being traced is for ("NVIDIA H200"), where the mesh in force knows it."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None and device.platform in ("gpu", "cuda") else None


def compute_capability(kind: str | None) -> int | None:
    """Ten times the compute capability: 90 for "NVIDIA H200"; None for a chip that is not known."""
    words = re.split(r"[\s-]+", kind or "")
    return next((_COMPUTE_CAPABILITIES[word] for word in words if word in _COMPUTE_CAPABILITIES), None)


def refusal(op: str, implementation: str, *args: Any, device_kind: str | None = None, **options: Any) -> str | None:
    """Why `implementation` cannot run `op` on these arguments, or None where it can.

    Args:
      op: the op's name. *args, **options: its arguments; arrays may be `jax.ShapeDtypeStruct`s.
      device_kind: the chip ("NVIDIA A100"), or None for any that the implementation is for.

    Raises:
      ValueError: `op` has no implementation of that name.
    """
    if implementation not in IMPLEMENTATIONS[op]:
        raise ValueError(f"{op} has no implementation {implementation!r}; there is {', '.join(IMPLEMENTATIONS[op])}")
    if implementation == "xla":
        return None if options.get("config") is None else "config is for the GPU kernels"
    return unavailable(implementation, device_kind) or _module(op, implementation).unsupported(*args, **options)


def unavailable(implementation: str, device_kind: str | None = None) -> str | None:
    """Why `implementation` cannot run anything with this JAX, or on that chip ("NVIDIA A100"), or None."""
    if implementation == "xla":
        return None
    backend = _BACKENDS[implementation]
    if jax.__version_info__ < backend.oldest_jax:
        return f"it needs JAX {'.'.join(map(str, backend.oldest_jax))}, this is {jax.__version__}"
    try:
        importlib.import_module(backend.module)
    except ImportError as error:
        return f"JAX {jax.__version__} does not have it ({error})"
    capability = compute_capability(device_kind)
    if capability is not None and capability < backend.compute_capability:
        return f"{device_kind} has compute capability {capability / 10}, it needs {backend.compute_capability / 10}"
    return None


def supports(op: str, implementation: str, *args: Any, device_kind: str | None = None, **options: Any) -> bool:
    """Whether `implementation` can run `op` on these arguments: `refusal` is None."""
    return refusal(op, implementation, *args, device_kind=device_kind, **options) is None


def run(op: str, implementation: str | None, *args: Any, config: KernelConfig | None = None, **options: Any) -> Any:
    """Calls `op` in the named implementation. None: the one in `use`, else by the platform that is lowered for.

    On CUDA that is the first kernel that can take the arguments; elsewhere, and where none can, it is XLA. A named one
    never falls back.

    An export for several platforms of which one is the CPU or a TPU needs `use("xla")`: JAX lowers what is chosen by
    platform for all of them, and Pallas refuses. One export a platform keeps the kernels.

    Raises:
      ValueError: `op` has no implementation of that name, or that one cannot run this; the message says why.
    """
    chosen = _use.value
    name = chosen.implementation if implementation is None else implementation
    arrays = {k: v for k, v in options.items() if isinstance(v, jax.Array | np.ndarray | np.generic)}
    static = tuple((k, v) for k, v in options.items() if k not in arrays)
    interpret = chosen.interpret and name == chosen.implementation
    return _run(op, name, config, interpret, static, args, arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _run(op, name, config, interpret, static, args, arrays):
    """`run`, as one compiled program where it is called eagerly."""
    options = {**dict(static), **arrays}
    kind = device_kind()

    def kernel(name, *args):
        return getattr(_module(op, name), op)(*args, config=config or KernelConfig(), interpret=interpret, **options)

    def xla(*args):
        return getattr(_module(op, "xla"), op)(*args, **options)

    if name is not None:
        reason = refusal(op, name, *args, device_kind=kind, config=config, **options)
        if reason is not None:
            raise ValueError(f"{op}: implementation {name!r} cannot run this: {reason}")
        return xla(*args) if name == "xla" else kernel(name, *args)
    for name in _BACKENDS:
        # Lowering knows the platform, not the chip: only triton is for every chip that is supported at all.
        if name not in IMPLEMENTATIONS[op] or (name != "triton" and compute_capability(kind) is None):
            continue
        if supports(op, name, *args, device_kind=kind, config=config, **options):
            return lax.platform_dependent(*args, cuda=functools.partial(kernel, name), default=xla)
    return xla(*args)


def _module(op: str, name: str) -> ModuleType:
    return importlib.import_module(f"pallas_kernels.{op}.{name}")


def for_gpu(kind: str = "NVIDIA A100") -> contextlib.AbstractContextManager:
    """Where no GPU is in sight, tells JAX to lower a kernel for `kind`; XLA compiles it for whichever it will be.

    JAX 0.11 and newer refuse to lower a Pallas kernel without a device kind.
    """
    if not _tells_kind() or device_kind() is not None:
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh().update(abstract_device=device))


def varying_axes(*trees: Any) -> frozenset[str]:
    """Axes of a shard_map that checks them (`check_vma`) over which any of the arrays varies: so do results of them."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(trees)))


def result_type(shape: tuple[int, ...], dtype: Any, axes: frozenset) -> Any:
    """For `pallas_call`'s out_shape: a result that varies over these axes of a shard_map; made outside of `for_gpu`.

    It keeps the mesh that is in force here, so that what follows the kernel finds its own mesh in its arguments.
    """
    varying, mesh = jax.sharding.ManualAxisType(varying=axes), jax.sharding.get_abstract_mesh()
    if not _tells_kind() or mesh.empty:
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=varying)


def _tells_kind() -> bool:
    return jax.__version_info__ >= (0, 11)
