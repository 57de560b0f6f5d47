"""Which implementation of an op runs: one table."""

import importlib

# op -> implementations, in order of preference. Each is the function of the op's name in `pallas_kernels.<op>.<name>`.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "scatter_kv": ("xla",),
    "scatter_mla": ("xla",),
    "scatter_rows": ("xla",),
    "gather_rows": ("xla",),
    "move_rows": ("xla",),
}


def run(op: str, implementation: str | None, *args, **options):
    """Calls `op` in the named implementation, or in the preferred one (None). A named one never falls back.

    Raises:
      ValueError: `op` has no implementation of that name.
    """
    known = IMPLEMENTATIONS[op]
    name = known[0] if implementation is None else implementation
    if name not in known:
        raise ValueError(f"{op} has no implementation {name!r}; there is {', '.join(known)}")
    return getattr(importlib.import_module(f"pallas_kernels.{op}.{name}"), op)(*args, **options)
