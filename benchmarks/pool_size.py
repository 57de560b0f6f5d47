"""One write of 16 rows into pools of growing size, beside the write that one would first think of.

  pool   `set_mla_kv_buffer` on a donated one-layer MLA pool of 512 + 64 in bfloat16
  naive  `cache.at[loc].set(rows)` on a donated bfloat16 array of the same shape

The time of the first must not depend on the pool's size, nor must the bytes that the compiled step needs beside it.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from benchmarks import report

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


def measure(rows: int, **timing: Any) -> dict[str, Any]:
    """Times and temporary bytes for pools of `rows` rows."""
    rng = np.random.default_rng(0)
    loc = jnp.asarray(rng.permutation(np.arange(PAGE, rows))[:COUNT], jnp.int32)
    parts = [jnp.asarray(rng.standard_normal((COUNT, 1, width)), jnp.bfloat16) for width in (512, 64)]
    held = {
        "pool": jkv.MLATokenToKVPool.create(
            size=rows - PAGE,
            page_size=PAGE,
            dtype=jnp.bfloat16,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=1,
        ),
        "naive": jnp.zeros((rows, 1, 576), jnp.bfloat16),
    }
    steps = {"pool": write, "naive": naive}
    out: dict[str, Any] = {"rows": rows}
    for name, step in steps.items():
        out[f"{name} temporary bytes"] = report.memory(step.lower(held[name], loc, *parts)).temp_size_in_bytes

    def contender(name: str) -> Any:
        def run() -> None:
            held[name] = jax.block_until_ready(steps[name](held[name], loc, *parts))

        return run

    # Apart, since the one may take a thousand times as long as the other and would leave it a cold cache.
    for name in steps:
        out[name] = report.interleaved({name: contender(name)}, **timing)[name]
    return out


def main() -> None:
    """Prints the table."""
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each cell of the table (default 2)")
    options = parser.parse_args()
    with jkv.enable_checks(False):
        measurements = [measure(rows, seconds=options.seconds, clock=options.clock) for rows in ROWS.values()]
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
