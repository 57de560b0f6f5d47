"""Quantising N bfloat16 rows and writing them into every layer of a pool in one step, on one core.

The contenders write the same rows to the same randomly permuted slots of 8 layers, and must leave the same bytes:

  tuple    a jitted step of this library on a donated pool of one array a layer
  stacked  the same as a scan over a pool of one array
  torch    the same arithmetic in eager operations on whole tensors, then index_copy_ into uint8 buffers, layer by layer

Ratio: how many times faster than torch the better of the two layouts is.
"""

from benchmarks import report

report.one_core()  # every contender has one thread

# ruff: noqa: E402
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jkv
from benchmarks import cpu_write

LAYERS = 8
SIZE, PAGE = 8192, 64
ROW_COUNTS = (16, 256, 4096)
# The shapes of the parts in which a row comes.
PARTS = {
    "MHA-FP4 8x128": ((8, 128), (8, 128)),
    "MLA-FP4 512+64": ((1, 512), (1, 64)),
    "DSA 512+64": ((1, 512), (1, 64)),
}
BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def create(family: str, stacked: bool) -> Any:
    """A pool of the family with `LAYERS` layers."""
    common: dict[str, Any] = {"size": SIZE, "page_size": PAGE, "layer_num": LAYERS, "stacked": stacked}
    if family.startswith("MHA"):
        return jkv.MHATokenToKVPoolFP4.create(head_num=8, head_dim=128, **common)
    pool_class = jkv.DSATokenToKVPool if family.startswith("DSA") else jkv.MLATokenToKVPoolFP4
    return pool_class.create(kv_lora_rank=512, qk_rope_head_dim=64, **common)


def torch_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes `[N, heads, dim / 2]` and scale bytes `[N, heads * dim / 16]` of rows `[N, heads, dim]`."""
    blocks = x.float().view(len(x), -1, 16)
    exponent = (blocks.abs().amax(-1) / 6).clamp_min_(1e-10).log2_().ceil_()
    scaled = blocks * (-exponent).exp2_().unsqueeze(-1)  # faster than a division, and as exact
    code = (scaled < 0).view(torch.uint8) << 3
    magnitude = scaled.abs_()
    for border in BORDERS:  # four times as fast as torch.bucketize, ten times as a sum over an axis of borders
        code += magnitude >= border
    pairs = code.view(torch.int16)
    packed = (pairs | (pairs >> 4)).to(torch.uint8)
    return packed.view(*x.shape[:-1], -1), (exponent + 127).to(torch.uint8)


def torch_dsa(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Packed rows `[N, 1, 656]` of `[N, 1, 512]` and `[N, 1, 64]`; tiles of zeros are not looked after."""
    tiles = nope.float().view(len(nope), 4, 128)
    scale = tiles.abs().amax(-1, keepdim=True) / 448
    codes = (tiles / scale).to(torch.float8_e4m3fn)
    parts = (codes.view(torch.uint8), scale.view(torch.uint8), rope.view(torch.uint8))
    return torch.cat([part.reshape(len(nope), 1, -1) for part in parts], dim=-1)


def quantised(family: str, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """What goes into each buffer of a layer, in the order of the pool's."""
    if family.startswith("DSA"):
        return [torch_dsa(*parts)]
    rows = parts if family.startswith("MHA") else [torch.cat(parts, dim=-1)]
    codes, scales = zip(*map(torch_fp4, rows), strict=True)
    return [*codes, *scales]


def contenders(family: str, count: int) -> tuple[dict[str, Callable[[], object]], Callable[[], None]]:
    """All contenders for `count` rows, and what raises unless all of them left the same bytes."""
    rng = np.random.default_rng(count)
    loc = rng.permutation(np.arange(PAGE, SIZE + PAGE))[:count].astype(np.int32)
    rows = [jnp.asarray(rng.standard_normal((LAYERS, count, *s)), jnp.bfloat16) for s in PARTS[family]]
    words = [np.asarray(part.view(jnp.uint16)) for part in rows]
    by_layer = tuple(tuple(part[layer] for part in rows) for layer in range(LAYERS))

    pools = {"tuple": [create(family, False)], "stacked": [create(family, True)]}
    buffers = [[torch.from_numpy(np.array(a)) for a in arrays] for arrays in pools["tuple"][0].arrays]
    index = torch.from_numpy(loc.astype(np.int64))
    torch_rows = [torch.from_numpy(part.copy()).view(torch.bfloat16) for part in words]

    def run_torch() -> None:
        for layer in range(LAYERS):
            new = quantised(family, [part[layer] for part in torch_rows])
            for arrays, values in zip(buffers, new, strict=True):
                arrays[layer].index_copy_(0, index, values)

    def step(name: str, write: Callable[..., Any], rows: Any) -> Callable[[], None]:
        def run() -> None:
            pools[name][0] = jax.block_until_ready(write(pools[name][0], loc, rows))

        return run

    def check() -> None:
        for ours, stacked, theirs in zip(pools["tuple"][0].arrays, pools["stacked"][0].arrays, buffers, strict=True):
            for layer in range(LAYERS):
                np.testing.assert_array_equal(ours[layer], theirs[layer].numpy())
                np.testing.assert_array_equal(stacked[layer], theirs[layer].numpy())

    steps: dict[str, Callable[[], object]] = {
        "tuple": step("tuple", cpu_write.step_tuple, by_layer),
        "stacked": step("stacked", cpu_write.step_stacked, tuple(map(jnp.asarray, words))),
    }
    return steps | {"torch": run_torch}, check


def main() -> None:
    """Prints the table."""
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each line of the table (default 10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measurements: list[dict[str, Any]] = []
    for family in PARTS:
        for count in ROW_COUNTS:
            with jkv.enable_checks(False):
                calls, check = contenders(family, count)
                times = report.interleaved(calls, seconds=options.seconds, clock=options.clock)
                check()
            best = min(times["tuple"], times["stacked"])
            measurements.append({"family": family, "rows": count, **times, "torch/best": times["torch"] / best})
    names = ["tuple", "stacked", "torch"]
    lines = [
        [m["family"], m["rows"], *(report.microseconds(m[n]) for n in names), f"{m['torch/best']:.2f}"]
        for m in measurements
    ]
    title = f"N rows into {LAYERS} layers in one step, microseconds (JAX {jax.__version__}, torch {torch.__version__})"
    print(report.table(title, ["family", "N", *names, "torch/best"], lines))
    report.write_json(options.json, measurements)


if __name__ == "__main__":
    main()
