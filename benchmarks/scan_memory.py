"""Temporary bytes of a scan over 32 layers that has the pool as its carry.

Each layer writes 16 rows and reads 256; only compiled, never run, so the pools may be larger than the machine. The
bytes that the program aliases must be the whole pool, and its temporary bytes must not depend on the pool.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from typing import Any

import jax
import jax.numpy as jnp

import jkv
from benchmarks import report

LAYERS, PAGE = 32, 64
SIZES = (4096, 65536, 1 << 20)
DTYPES = (jnp.bfloat16, jnp.float8_e4m3fn)


def create(family: str, size: int, dtype: Any) -> Any:
    """A stacked pool."""
    common = {"size": size, "page_size": PAGE, "dtype": dtype, "layer_num": LAYERS, "stacked": True}
    if family.startswith("MHA"):
        return jkv.MHATokenToKVPool.create(head_num=8, head_dim=128, **common)
    return jkv.MLATokenToKVPool.create(kv_lora_rank=512, qk_rope_head_dim=64, **common)


def step(pool: Any, loc: jax.Array, rows: tuple[jax.Array, ...], context: jax.Array) -> tuple[Any, jax.Array]:
    """Writes and reads in every layer."""

    def body(pool: Any, layer: jax.Array) -> tuple[Any, jax.Array]:
        write = pool.set_kv_buffer if isinstance(pool, jkv.MHATokenToKVPool) else pool.set_mla_kv_buffer
        pool = write(layer, loc, *rows)
        keys, _ = pool.get_kv(layer, context)
        return pool, keys.astype(jnp.float32).sum()

    return jax.lax.scan(body, pool, jnp.arange(LAYERS))


def measure(family: str, dtype: Any, size: int) -> dict[str, Any]:
    """Memory of the compiled step."""
    pool = jax.eval_shape(lambda: create(family, size, dtype))
    widths = ((8, 128), (8, 128)) if family.startswith("MHA") else ((1, 512), (1, 64))
    rows = tuple(jax.ShapeDtypeStruct((16, *width), jnp.bfloat16) for width in widths)
    ids = [jax.ShapeDtypeStruct((count,), jnp.int32) for count in (16, 256)]
    memory = report.memory(jax.jit(step, donate_argnums=0).lower(pool, ids[0], rows, ids[1]))
    return {
        "family": family,
        "dtype": jnp.dtype(dtype).name,
        "size": size,
        "pool bytes": pool.kv_size_bytes,
        "aliased bytes": memory.alias_size_in_bytes,
        "temporary bytes": memory.temp_size_in_bytes,
    }


def main() -> None:
    """Prints the table."""
    options = report.arguments(__doc__).parse_args()
    with jkv.enable_checks(False):
        measurements = [
            measure(family, dtype, size) for family in ("MHA 8x128", "MLA 512+64") for dtype in DTYPES for size in SIZES
        ]
    header = list(measurements[0])
    lines = [[f"{value:,}" if isinstance(value, int) else value for value in m.values()] for m in measurements]
    print(report.table(f"A scan over {LAYERS} layers with the pool as carry (JAX {jax.__version__})", header, lines))
    report.write_json(options.json, measurements)


if __name__ == "__main__":
    main()
