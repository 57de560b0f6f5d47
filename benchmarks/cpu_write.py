"""Writing N rows into every layer of a pool in one step, on one core.

The contenders write the same bfloat16 rows to the same randomly permuted slots of 32 layers:

  tuple    a jitted step of this library on a donated pool of one array a layer; the rows of each layer are arguments
  stacked  the same as a scan over a pool of one array; the rows of all layers are one argument
  torch    an in-place index_copy_ a buffer of the same shape (pip install torch==2.13.0)
  numpy    an indexed assignment a buffer: a C loop of row copies
  memcpy   one contiguous copy of the same bytes: no slots at all

In a model the rows come out of a fusion that already writes them as the buffer's words. As arguments they cost the two
jitted steps one more pass over them, which is part of their times here.

Ratios: torch/best is how many times faster than torch the better of the two layouts is; best/memcpy and best/numpy are
how many times longer than those it takes.
"""

from benchmarks import report

report.one_core()  # every contender has one thread

# ruff: noqa: E402
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jkv

LAYERS = 32
SIZE, PAGE = 8192, 64
ROW_COUNTS = (1, 16, 256, 4096)
# Shape of a row in each buffer of a layer, and of the parts in which the rows come.
BUFFERS = {"MHA 8x128": ((8, 128), (8, 128)), "MLA 512+64": ((1, 576),)}
PARTS = {"MHA 8x128": ((8, 128), (8, 128)), "MLA 512+64": ((1, 512), (1, 64))}


def create(family: str, stacked: bool) -> Any:
    """A pool of the family with `LAYERS` layers."""
    common = {"size": SIZE, "page_size": PAGE, "dtype": jnp.bfloat16, "layer_num": LAYERS, "stacked": stacked}
    if family.startswith("MHA"):
        return jkv.MHATokenToKVPool.create(head_num=8, head_dim=128, **common)
    return jkv.MLATokenToKVPool.create(kv_lora_rank=512, qk_rope_head_dim=64, **common)


def write_layer(pool: Any, layer: Any, loc: jax.Array, rows: tuple[jax.Array, ...]) -> Any:
    """One layer's door: `rows` are (k, v) of an MHA pool, (nope, rope) of an MLA pool."""
    if isinstance(pool, jkv.MHATokenToKVPool):
        return pool.set_kv_buffer(layer, loc, *rows)
    return pool.set_mla_kv_buffer(layer, loc, *rows)


@functools.partial(jax.jit, donate_argnums=0)
def step_tuple(pool: Any, loc: jax.Array, rows: tuple[tuple[jax.Array, ...], ...]) -> Any:
    """Writes `rows[layer]` to every layer, unrolled."""
    for layer in range(pool.layer_num):
        pool = write_layer(pool, layer, loc, rows[layer])
    return pool


@functools.partial(jax.jit, donate_argnums=0)
def step_stacked(pool: Any, loc: jax.Array, words: tuple[jax.Array, ...]) -> Any:
    """The same as a scan over the layers.

    The rows come as the bits of their bfloat16 values: XLA on CPU would convert a scanned bfloat16 array to float32.
    """

    def body(pool: Any, xs: Any) -> tuple[Any, None]:
        layer, layer_words = xs
        return write_layer(pool, layer, loc, tuple(part.view(jnp.bfloat16) for part in layer_words)), None

    return jax.lax.scan(body, pool, (jnp.arange(pool.layer_num), words))[0]


def in_place(step: Callable[..., Any], pool: Any, *args: Any) -> Callable[[], None]:
    """A contender that calls `step` on its own donated pool and waits for the result."""
    held = [pool]

    def run() -> None:
        held[0] = jax.block_until_ready(step(held[0], *args))

    return run


def contenders(family: str, count: int, pools: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """All contenders for `count` rows; `pools` keeps their buffers from one row count to the next."""
    rng = np.random.default_rng(count)
    loc = rng.permutation(np.arange(PAGE, SIZE + PAGE))[:count].astype(np.int32)
    words = [rng.integers(0, 0x3F80, (LAYERS, count, *shape), dtype=np.uint16) for shape in PARTS[family]]
    whole = words if family.startswith("MHA") else [np.concatenate(words, axis=-1)]
    by_layer = tuple(tuple(jnp.asarray(part[layer]).view(jnp.bfloat16) for part in words) for layer in range(LAYERS))

    index = torch.from_numpy(loc.astype(np.int64))
    torch_rows = [torch.from_numpy(part).view(torch.bfloat16) for part in whole]
    dense = [np.empty_like(part) for part in whole]

    def run_torch() -> None:
        for buffers, part in zip(pools["torch"], torch_rows, strict=True):
            for layer in range(LAYERS):
                buffers[layer].index_copy_(0, index, part[layer])

    def run_numpy() -> None:
        for buffers, part in zip(pools["numpy"], whole, strict=True):
            for layer in range(LAYERS):
                buffers[layer][loc] = part[layer]

    def run_memcpy() -> None:
        for target, part in zip(dense, whole, strict=True):
            np.copyto(target, part)

    return {
        "tuple": in_place(step_tuple, create(family, stacked=False), jnp.asarray(loc), by_layer),
        "stacked": in_place(
            step_stacked, create(family, stacked=True), jnp.asarray(loc), tuple(map(jnp.asarray, words))
        ),
        "torch": run_torch,
        "numpy": run_numpy,
        "memcpy": run_memcpy,
    }


def main() -> None:
    """Prints the table."""
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each line of the table (default 10)")
    options = parser.parse_args()
    torch.set_num_threads(1)

    measurements: list[dict[str, Any]] = []
    for family, buffers in BUFFERS.items():
        shapes = [(SIZE + PAGE, *shape) for shape in buffers]
        pools = {
            "torch": [[torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)] for shape in shapes],
            "numpy": [[np.zeros(shape, np.uint16) for _ in range(LAYERS)] for shape in shapes],
        }
        for count in ROW_COUNTS:
            with jkv.enable_checks(False):
                times = report.interleaved(
                    contenders(family, count, pools), seconds=options.seconds, clock=options.clock
                )
            best = min(times["tuple"], times["stacked"])
            measurements.append(
                {
                    "family": family,
                    "rows": count,
                    **times,
                    "torch/best": times["torch"] / best,
                    "best/numpy": best / times["numpy"],
                    "best/memcpy": best / times["memcpy"],
                }
            )
    names = ["tuple", "stacked", "torch", "numpy", "memcpy"]
    ratios = ["torch/best", "best/numpy", "best/memcpy"]
    lines = [
        [m["family"], m["rows"], *(report.microseconds(m[n]) for n in names), *(f"{m[r]:.2f}" for r in ratios)]
        for m in measurements
    ]
    title = f"N rows into {LAYERS} layers in one step, microseconds (JAX {jax.__version__}, torch {torch.__version__})"
    print(report.table(title, ["family", "N", *names, *ratios], lines))
    report.write_json(options.json, measurements)


if __name__ == "__main__":
    main()
