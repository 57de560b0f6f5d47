"""The table that ends a run."""

import jax

from examples.engine import Phase, Stats
from examples.kv import Pool


def table(stats: Stats, pool: Pool) -> str:
    """Tokens, tokens a second, and what of the pool was in use; several lines."""
    slots = pool.slots
    total = pool.kv_size_bytes
    devices = jax.tree.leaves(pool)[0].sharding.device_set
    used = ", ".join(f"{100 * rows / slots.size:.1f}%" for rows in stats.rank_rows)
    stored = pool.dtype if pool.takes_scales else pool.label
    rows = {
        "prompt tokens": rate(stats.prefill),
        "new tokens": rate(stats.decode),
        "compilation": f"{stats.compile_seconds:.1f} s, not counted above",
        "running at once": f"{stats.running}",
        "pool": f"{slots.size} tokens on each of {slots.dcp_size} ranks, {slots.capacity} in all",
        "rows in use at most": f"{', '.join(map(str, stats.rank_rows))} by rank ({used})",
        "pool bytes": f"{mib(total)} as {stored}, {mib(total / len(devices))} on each device",
        "devices": f"{len(devices)} x {next(iter(devices)).device_kind}",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def rate(phase: Phase) -> str:
    """Tokens, steps and tokens a second."""
    speed = f", {phase.tokens / phase.seconds:.1f} tokens/s" if phase.seconds else ""
    return f"{phase.tokens} in {phase.steps} steps{speed}"


def mib(count: float) -> str:
    """A number of bytes, readable."""
    return f"{count / (1 << 20):.1f} MiB"
