"""One write of 16 rows into pools of growing size, beside the write that one would first think of.

  pool   `set_mla_kv_buffer` on a donated one-layer MLA pool of 512 + 64 in bfloat16
  naive  `cache.at[loc].set(rows)` on a donated bfloat16 array of the same shape

The time of the first must not depend on the pool's size, nor must the bytes that the compiled step needs beside it.
"""

from benchmarks import report

report.one_core()

# ruff: noqa: E402
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv

ROWS = {"4k": 4 << 10, "64k": 64 << 10, "1M": 1 << 20}
PAGE, COUNT = 64, 16


@functools.partial(jax.jit, donate_argnums=0)
def write(pool: Any, loc: jax.Array, nope: jax.Array, rope: jax.Array) -> Any:
    """The pool's door."""
    return pool.set_mla_kv_buffer(0, loc, nope, rope)


@functools.partial(jax.jit, donate_argnums=0)
def naive(cache: jax.Array, loc: jax.Array, nope: jax.Array, rope: jax.Array) -> jax.Array:
    """Plain JAX on a bfloat16 array."""
    return cache.at[loc].set(jnp.concatenate([nope, rope], axis=-1))


def contender(step: Any, state: Any, rows: int) -> tuple[Callable[[], None], int]:
    """A call of `step` that writes to random rows of its donated `state`, and the step's temporary bytes."""
    rng = np.random.default_rng(0)
    loc = jnp.asarray(rng.permutation(np.arange(PAGE, rows))[:COUNT], jnp.int32)
    parts = [jnp.asarray(rng.standard_normal((COUNT, 1, width)), jnp.bfloat16) for width in (512, 64)]
    held = [state]

    def run() -> None:
        held[0] = jax.block_until_ready(step(held[0], loc, *parts))

    return run, report.memory(step.lower(state, loc, *parts)).temp_size_in_bytes


def measure(**timing: Any) -> list[dict[str, Any]]:
    """Times and temporary bytes for each size. The naive ones run alone: one may take seconds and empty every cache."""
    pools, naives = {}, {}
    for name, rows in ROWS.items():
        pool = jkv.MLATokenToKVPool.create(
            size=rows - PAGE,
            page_size=PAGE,
            dtype=jnp.bfloat16,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=1,
        )
        pools[name] = contender(write, pool, rows)
        naives[name] = contender(naive, jnp.zeros((rows, 1, 576), jnp.bfloat16), rows)
    times = report.interleaved({name: run for name, (run, _) in pools.items()}, **timing)
    return [
        {
            "rows": rows,
            "pool": times[name],
            "pool temporary bytes": pools[name][1],
            "naive": report.interleaved({name: naives[name][0]}, rounds=3, **timing)[name],
            "naive temporary bytes": naives[name][1],
        }
        for name, rows in ROWS.items()
    ]


def main() -> None:
    """Prints the table."""
    parser = report.arguments(__doc__)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="time for the pools, and for each naive write (default 5)"
    )
    options = parser.parse_args()
    with jkv.enable_checks(False):
        measurements = measure(seconds=options.seconds, clock=options.clock)
    lines = [
        [
            name,
            report.microseconds(m["pool"]),
            f"{m['pool temporary bytes']:,}",
            report.microseconds(m["naive"]),
            f"{m['naive temporary bytes']:,}",
            f"{m['naive'] / m['pool']:,.1f}",
        ]
        for name, m in zip(ROWS, measurements, strict=True)
    ]
    header = ["rows", "pool, us", "temporary bytes", "naive, us", "temporary bytes", "naive/pool"]
    print(report.table(f"One write of {COUNT} rows (JAX {jax.__version__})", header, lines))
    report.write_json(options.json, measurements)


if __name__ == "__main__":
    main()
