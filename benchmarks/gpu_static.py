"""What the compiled GPU kernels are made of, without a GPU: accesses, instructions, registers and bytes in flight.

Each op is compiled on this host for the GPUs that an implementation is for, at a decode and a prefill number of rows,
and its PTX is counted. Needs JAX's CUDA plugin of the same version, without its libraries, and NVIDIA's assembler:
`pip install --no-deps jax-cuda13-plugin==X jax-cuda13-pjrt==X nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt`.

A row is a token's row in all buffers that the kernel serves, of one layer. An access is one instruction of a warp: 512
bytes where each thread takes 16; a bulk copy is one of a thread. In flight is what the blocks of a multiprocessor have
under way. Instructions are counted as they stand: those of a loop once.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # of libraries that are not needed here

import jax
import jax.numpy as jnp

from benchmarks import kernel_tools, report
from pallas_kernels import dispatch

CASES = [
    ("scatter_kv", "llama-3-8b"),
    ("scatter_kv", "llama-3-8b-fp8"),
    ("scatter_kv", "llama-3-70b-tp8"),
    ("scatter_mla", "deepseek-v3"),
    ("scatter_mla", "deepseek-v3-fp8"),
    ("scatter_mla", "deepseek-v3, 4 ranks"),
    ("scatter_rows", "deepseek-v3"),
    ("gather_rows", "llama-3-8b"),
    ("gather_rows", "deepseek-v3"),
    ("gather_rows", "deepseek-v3, 4 ranks"),
    ("move_rows", "deepseek-v3"),
]
QUANTISED = [
    ("scatter_kv_fp4", "llama-3-8b"),
    ("scatter_mla_fp4", "deepseek-v3-fp4"),
    ("scatter_dsa", "deepseek-v3.2"),
    ("gather_fp4", "llama-3-8b"),
    ("gather_fp4", "deepseek-v3-fp4"),
    ("gather_dsa", "deepseek-v3.2"),
]
DECODE, PREFILL = 64, 16384
CHIPS = {"triton": ("A100", "H200", "B200"), "mosaic": ("H200", "B200")}
# What compiles the calls, and which.
PROGRAMS = {
    "triton": (("aot.py", CASES), ("aot_quant.py", QUANTISED)),
    "mosaic": (("aot_mosaic.py", CASES), ("aot_mosaic_quant.py", QUANTISED)),
}
# Of a multiprocessor, the same on all three (NVIDIA's CUDA programming guide, compute capabilities 8.0, 9.0, 10.0); the
# last for blocks, of 8.0 and of the others.
REGISTERS, THREADS, BLOCKS, SHARED = 65536, 2048, 32, {"A100": 163 << 10, "H200": 227 << 10, "B200": 227 << 10}
COLUMNS = (
    "op", "rows", "implementation", "rows a block", "bytes a load", "bytes a store", "loads a row", "stores a row",
    "instructions a row", "KiB in flight", "registers", "occupancy",
)  # fmt: skip


def find_ptxas() -> str:
    """The assembler, from NVIDIA's wheels (which are as new as JAX's PTX) or from PATH. Raises FileNotFoundError."""
    wheels = pathlib.Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/ptxas")
    found = next(map(str, wheels), shutil.which("ptxas"))
    if found is None:
        raise FileNotFoundError("no ptxas: pip install --no-deps nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt")
    return found


def registers(ptx: str, ptxas: str) -> int:
    """Registers of a thread. Raises RuntimeError where the assembler fails, or spills."""
    chip = re.search(r"\.target (\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        arch = f"-arch={chip[1] if chip else ''}"
        done = subprocess.run([ptxas, "-v", arch, str(source), "-o", f"{folder}/out"], capture_output=True, text=True)
    used, spilt = re.search(r"Used (\d+) registers", done.stderr), re.search(r"(\d+) bytes spill", done.stderr)
    if done.returncode or used is None or spilt is None or int(spilt[1]):
        raise RuntimeError(f"ptxas: {done.stderr.strip()}")
    return int(used[1])


def count(ptx: str, plan: dict[str, Any], row_bytes: int, chip: str, ptxas: str) -> dict[str, Any]:
    """What one kernel's PTX holds.

    Args:
      plan: "way", "rows" of a block, and "shared" memory of one, in bytes.
      row_bytes: of a row, as it is loaded.
    """
    threads, rows = int(re.findall(r"\.(?:req|max)ntid (\d+)", ptx)[0]), plan["rows"]
    words = {
        kind: [
            int(m[1] or 1) * int(m[2]) // 8
            for m in re.finditer(rf"\b{kind}(?:\.global)?(?:\.v(\d))?\.[bu](\d+)\s+[{{\[%]", ptx)
        ]
        for kind in ("ld", "st")
    }
    bulk = {"ld": ptx.count("cp.async.bulk.shared::cta."), "st": ptx.count("cp.async.bulk.global.")}
    body = ptx[ptx.index("{") :]
    instructions = len(re.findall(r"^\s+(?:@!?%p\d+ )?[a-z][\w.:]+\s[^;]*;", body, re.MULTILINE))
    used, warps = registers(ptx, ptxas), threads / 32
    blocks = min(
        REGISTERS // (-(-used // 8) * 8 * threads), THREADS // threads, BLOCKS, SHARED[chip] // (plan["shared"] + 1024)
    )

    def size(kind: str) -> str:
        """The widest of loads, of which narrow ones (and on B200 those of 32 bytes) are of ids; all of stores."""
        if bulk[kind]:
            return "bulk"
        if kind == "ld":
            return str(max(size for size in words[kind] if size <= 16))
        return ", ".join(map(str, sorted(set(words[kind]), reverse=True)))

    def accesses(kind: str) -> str:
        """A bulk copy is of one thread. Where there are any, the other loads are of ids."""
        return f"{(bulk[kind] or len(words[kind]) * warps) / rows:.3g}"

    return {
        "way": plan["way"],
        "rows a block": rows,
        "bytes a load": size("ld"),
        "bytes a store": size("st"),
        "loads a row": accesses("ld"),
        "stores a row": accesses("st"),
        "instructions a row": round(instructions * warps / rows),
        "KiB in flight": round(blocks * rows * row_bytes / 1024),
        "registers": used,
        "occupancy": f"{blocks * threads / THREADS:.0%}",
    }


def loaded_bytes(call: Any) -> int:
    """Of a row."""
    if (call.op, call.rows) in QUANTISED:
        rows = kernel_tools.tool("quant_specs").named(call.rows)
        if call.op == rows.gather:
            return sum(math.prod(shape) for shape in rows.buffers)
        return rows.width * jnp.dtype(rows.source).itemsize
    specs = kernel_tools.tool("specs")
    rows = next(r for r in (*specs.KV, *specs.MLA) if r.name == call.rows)
    item = jnp.dtype(rows.source if call.op in ("scatter_kv", "scatter_mla") else rows.word).itemsize
    return sum(heads * width for heads, width in rows.parts) * item


def measure(chips: Sequence[str], implementations: Sequence[str]) -> list[dict[str, Any]]:
    """One entry for each kernel that came out. Raises RuntimeError where one does not compile."""
    aot, ptxas = kernel_tools.tool("aot"), find_ptxas()
    results = []
    runs = ((i, c, *program) for i in implementations for c in CHIPS[i] if c in chips for program in PROGRAMS[i])
    for implementation, chip, program, cases in runs:
        calls = [
            aot.Call(
                op,
                rows.removesuffix(", 4 ranks"),
                n=n,
                implementation=implementation,
                stacked=op == "move_rows",
                where="shards" if rows.endswith(", 4 ranks") else "alone",
            )
            for op, rows in cases
            for n in (DECODE, PREFILL)
        ]
        done = subprocess.run(
            [sys.executable, str(kernel_tools.FOLDER / program), chip],
            input=json.dumps([dataclasses.asdict(call) for call in calls]),
            env=aot.environment(),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"compiling for {chip}: {done.stderr[-2000:]}")
        for call, facts in zip(calls, json.loads(done.stdout), strict=True):
            if "error" in facts:
                raise RuntimeError(f"{chip}, {call.label}: {facts['error']}")
            ranks = ", 4 ranks" if call.where == "shards" else ""
            for name, text in facts["ptx"].items():
                plan = facts.get("plans", {}).get(name) or {
                    "way": "tiles", "rows": -(-call.n // facts["grids"][name][0]), "shared": 0,
                }  # fmt: skip
                kernel = re.sub(r"^move_rows_|_mosaic_gpu_kernel$", "", name).removesuffix("_rows")
                case = {"chip": chip, "implementation": implementation, "N": call.n, "rows": f"{call.rows}{ranks}"}
                op = {"op": f"{call.op}: {kernel}" if call.op == "move_rows" else call.op}
                results.append(case | op | count(text, plan, loaded_bytes(call), chip, ptxas))
    return results


def paired(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the two numbers of rows as one, "decode / prefill" where they differ."""
    kernels: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for r in results:
        kernels.setdefault((r["op"], r["rows"], r["implementation"]), []).append(r)
    return [{k: r[k] if r[k] == many[k] else f"{r[k]} / {many[k]}" for k in COLUMNS} for r, many in kernels.values()]


def main() -> None:
    """Prints a table for each chip; `--json` writes all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS["triton"], default=CHIPS["triton"])
    parser.add_argument("--implementations", nargs="+", choices=list(CHIPS))
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    here = [name for name in CHIPS if dispatch.unavailable(name) is None]
    results = measure(options.chips, options.implementations or here)
    report.write_json(options.json, results)
    results.sort(key=lambda r: [*CASES, *QUANTISED].index((r["op"].split(":")[0], r["rows"])))
    for chip in options.chips:
        rows = [list(r.values()) for r in paired([r for r in results if r["chip"] == chip])]
        title = f"{chip}, JAX {jax.__version__}; {DECODE} / {PREFILL} rows"
        print(report.table(title, COLUMNS, rows))


if __name__ == "__main__":
    main()
