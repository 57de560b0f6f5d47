"""What the compiled mosaic kernels are made of, without a GPU: ways, copies, instructions, registers, shared memory.

As `benchmarks.gpu_static`, for H200 and B200 and with bulk copies; needs the same wheels, and Mosaic a `ptxas` itself.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax

from benchmarks import gpu_static, report

SHARED_BYTES = 227 << 10  # of a multiprocessor, for blocks
DECODE, PREFILL = 64, 16384
CASES = [*gpu_static.CASES, ("scatter_mla", "deepseek-v3 among 4 ranks"), ("gather_rows", "deepseek-v3 among 4 ranks")]


def count(ptx: str, plan: dict[str, Any], row_bytes: int, ptxas: str) -> dict[str, Any]:
    """What one kernel's PTX holds. A row is a token's row in all buffers that the kernel serves, of one layer."""
    threads, rows = int(re.findall(r"\.maxntid (\d+)", ptx)[0]), plan["rows"]
    bulk = {way: len(re.findall(rf"cp\.async\.bulk\.{way}\.", ptx)) for way in ("shared::cta", "global")}
    words = {
        kind: [
            int(m[1] or 1) * int(m[2]) // 8
            for m in re.finditer(rf"\b{kind}(?:\.global)?(?:\.v(\d))?\.b(\d+)\s+[{{\[]", ptx)
        ]
        for kind in ("ld", "st")
    }
    body = ptx[ptx.index("{") :]
    instructions = len(re.findall(r"^\s+(?:@!?%p\d+ )?[a-z][\w.:]+\s[^;]*;", body, re.MULTILINE))
    used = gpu_static.registers(ptx, ptxas)
    blocks = min(
        gpu_static.REGISTERS // (-(-used // 8) * 8 * threads),
        gpu_static.THREADS // threads,
        gpu_static.BLOCKS,
        SHARED_BYTES // (plan["shared"] + 1024),
    )
    return {
        "way": plan["way"],
        "rows a block": rows,
        "blocks": plan["blocks"],
        "bulk loads a row": round(bulk["shared::cta"] / rows, 2),
        "bulk stores a row": round(bulk["global"] / rows, 2),
        "bytes a store": "bulk" if bulk["global"] else max(words["st"]),
        "warp instructions a row": round(instructions * threads / 32 / rows),
        "registers": used,
        "shared KiB": round(plan["shared"] / 1024, 1),
        "blocks a multiprocessor": blocks,
        "KiB in flight": round(blocks * rows * row_bytes / 1024),
    }


def measure(chips: list[str]) -> list[dict[str, Any]]:
    """One entry for each kernel that came out."""
    ptxas = gpu_static.find_ptxas()
    if ptxas is None:
        raise RuntimeError("no ptxas: pip install --no-deps nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt")
    aot, specs = gpu_static._tool("aot"), gpu_static._tool("specs")
    known = {r.name: r for r in (*specs.KV, *specs.MLA)}
    cases = [(op, *rows.split(" among "), n) for op, rows in CASES for n in (DECODE, PREFILL)]
    calls = [
        aot.Call(
            op, name, n=n, implementation="mosaic", stacked=op == "move_rows", where="shards" if among else "alone"
        )
        for op, name, *among, n in cases
    ]
    results = []
    for chip in chips:
        done = subprocess.run(
            [sys.executable, str(pathlib.Path(aot.__file__).with_name("aot_mosaic.py")), chip],
            input=json.dumps([dataclasses.asdict(call) for call in calls]),
            env=aot.environment(),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"compiling for {chip}: {done.stderr[-2000:]}")
        for call, facts in zip(calls, json.loads(done.stdout), strict=True):
            if "error" in facts:
                raise RuntimeError(f"{call.label}: {facts['error']}")
            rows = known[call.rows]
            item = jax.numpy.dtype(rows.source if call.op in ("scatter_kv", "scatter_mla") else rows.word).itemsize
            row_bytes = sum(heads * width for heads, width in rows.parts) * item
            case = {"chip": chip, "op": call.op, "rows": call.rows, "ranks": 4 if call.where == "shards" else 1}
            for name, text in facts["ptx"].items():
                kernel = {"kernel": name.removesuffix("_mosaic_gpu_kernel"), "n": call.n}
                results.append(case | kernel | count(text, facts["plans"][name], row_bytes, ptxas))
    return results


def main() -> None:
    """Prints the tables; `--json` writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["H200", "B200"])
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    results = measure(options.chips)
    for chip in options.chips:
        mine = [r for r in results if r["chip"] == chip]
        keys = [k for k in mine[0] if k not in ("chip", "op")]
        print(report.table(f"{chip}, JAX {jax.__version__}", keys, [[r[k] for k in keys] for r in mine]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
