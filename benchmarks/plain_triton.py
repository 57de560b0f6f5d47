"""A row scatter as PyTorch programs have it: a Triton kernel, one program a row, timed in a CUDA graph.

    python -m benchmarks.plain_triton < cases.json > seconds.json

reads a list of `{"name", "parts", "joined", "fp8", "n", "layers", "rows"}` and prints seconds of a call by name.
`parts` are `[heads, width]` of K and V, or of nope and rope which are `joined` to one row. `benchmarks.gpu_check` runs
it. `--interpret`: on the CPU, in Triton's interpreter, what it writes compared with PyTorch's `index_copy_`.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import torch
import triton
import triton.language as tl

SCALE, ROUNDS = 0.37, 5


@triton.jit
def scatter(
    k_out, v_out, loc, k, v, scale, k_stride, v_stride, width_k: tl.constexpr, width_v: tl.constexpr,
    block_k: tl.constexpr, block_v: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    """Row `program_id` of k and v to row `loc[program_id]` of the buffers."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(loc + token).to(tl.int64)
    at_k, at_v = tl.arange(0, block_k), tl.arange(0, block_v)
    new_k = tl.load(k + token * width_k + at_k, mask=at_k < width_k)
    new_v = tl.load(v + token * width_v + at_v, mask=at_v < width_v)
    if fp8:
        new_k = (new_k.to(tl.float32) / scale).to(tl.float8e4nv)
        new_v = (new_v.to(tl.float32) / scale).to(tl.float8e4nv)
    tl.store(k_out + row * k_stride + at_k, new_k, mask=at_k < width_k)
    tl.store(v_out + row * v_stride + at_v, new_v, mask=at_v < width_v)


def prepare(case: dict[str, Any], device: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Two buffers `[layers, rows, width]` (K and V, or the parts of joined rows), and a layer's new rows and ids."""
    torch.manual_seed(0)
    widths = [heads * width for heads, width in case["parts"]]
    stored = torch.float8_e4m3fn if case["fp8"] else torch.bfloat16
    layers, rows, n = case["layers"], case["rows"], case["n"]
    whole = [sum(widths)] if case["joined"] else widths
    buffers = [torch.zeros(layers, rows, width, device=device, dtype=stored) for width in whole]
    parts = [buffers[0][..., : widths[0]], buffers[0][..., widths[0] :]] if case["joined"] else buffers
    values = [[torch.randn(n, width, device=device, dtype=torch.bfloat16) for width in widths] for _ in range(layers)]
    ids = [torch.randperm(rows, device=device)[:n].to(torch.int32) for _ in range(layers)]
    return parts, values, ids


def write(case: dict[str, Any], parts: list[Any], values: list[Any], ids: list[Any]) -> None:
    """One call a layer."""
    for layer, (rows, loc) in enumerate(zip(values, ids, strict=True)):
        (k, v), (to_k, to_v) = rows, (part[layer] for part in parts)
        blocks = [triton.next_power_of_2(x.shape[1]) for x in (k, v)]
        scatter[(case["n"],)](
            to_k, to_v, loc, k, v, SCALE, to_k.stride(0), to_v.stride(0), k.shape[1], v.shape[1], *blocks, case["fp8"]
        )


def seconds(case: dict[str, Any]) -> float:
    """Of a call: the median of some replays of a graph of one call a layer."""
    parts, values, ids = prepare(case, "cuda")
    write(case, parts, values, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write(case, parts, values, ids)
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / 10 / case["layers"])
    return sorted(times)[ROUNDS // 2]


def interpreted(case: dict[str, Any]) -> None:
    """No time: it is the interpreter's. Raises AssertionError where it writes what `index_copy_` does not."""
    case = case | {"fp8": False}  # the interpreter's cast needs a GPU
    parts, values, ids = prepare(case, "cpu")
    write(case, parts, values, ids)
    for part, column in zip(parts, range(2), strict=True):
        for layer, (rows, loc) in enumerate(zip(values, ids, strict=True)):
            want = torch.zeros_like(part[layer]).index_copy_(0, loc.long(), rows[column])
            if not torch.equal(part[layer], want):
                raise AssertionError(f"{case['name']}: layer {layer}, part {column} differs")


def main() -> None:
    """Reads cases, prints seconds by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true")
    run: Callable[[dict[str, Any]], float | None] = interpreted if parser.parse_args().interpret else seconds
    json.dump({case["name"]: run(case) for case in json.load(sys.stdin)}, sys.stdout)


if __name__ == "__main__":
    main()
