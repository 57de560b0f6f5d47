"""What the compiled GPU kernels are made of, without a GPU: accesses, instructions, registers and bytes in flight.

Each op is compiled for A100, H200 and B200 on this host (JAX's CUDA plugin of the same version, without its libraries:
`pip install --no-deps jax-cuda13-plugin==X jax-cuda13-pjrt==X`), at a decode and at a prefill number of rows, and its
PTX is counted. Registers need a `ptxas` (on PATH, or from `pip install --no-deps nvidia-cuda-nvcc nvidia-nvvm
nvidia-cuda-crt`); without one they are left out, and with them what follows: blocks that a multiprocessor holds, and
bytes that those have in flight.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax

from benchmarks import report

ROOT = pathlib.Path(__file__).parent.parent
CASES = [
    ("scatter_kv", "llama-3-8b"),
    ("scatter_kv", "llama-3-8b-fp8"),
    ("scatter_kv", "llama-3-70b-tp8"),
    ("scatter_mla", "deepseek-v3"),
    ("scatter_mla", "deepseek-v3-fp8"),
    ("scatter_rows", "deepseek-v3"),
    ("gather_rows", "llama-3-8b"),
    ("gather_rows", "deepseek-v3"),
    ("move_rows", "deepseek-v3"),
]
DECODE, PREFILL = 64, 16384
# Of a multiprocessor, the same on all three (NVIDIA's CUDA programming guide, compute capabilities 8.0, 9.0, 10.0).
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32


def _tool(name: str) -> Any:
    """A module of the kernels' tests, which compile and read PTX too."""
    path = ROOT / "tests" / "kernels" / f"{name}.py"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def find_ptxas() -> str | None:
    """The assembler, from NVIDIA's wheels (which are as new as JAX's PTX) or from PATH."""
    wheels = pathlib.Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/ptxas")
    return next(map(str, wheels), shutil.which("ptxas"))


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


def count(ptx: str, grid: list[int], n: int, ptxas: str | None) -> dict[str, Any]:
    """What one kernel's PTX holds. A row is a token's row in all buffers that the kernel serves, of one layer."""
    threads = int(re.findall(r"\.reqntid (\d+)", ptx)[0])
    rows = -(-n // grid[0])  # of a program
    found = {
        kind: [
            ({"": 1, ".v2": 2, ".v4": 4}[m[1] or ""] * int(m[2]) // 8)
            for m in re.finditer(rf"\b{kind}\.global(\.v\d)?\.[bu](\d+)", ptx)
        ]
        for kind in ("ld", "st")
    }
    body = ptx[ptx.index("{") :]
    instructions = len(re.findall(r"^\s+(?:@!?%p\d+ )?[a-z][\w.:]+\s[^;]*;", body, re.MULTILINE))
    wide = [size for size in found["ld"] if size == max(found["ld"])]
    in_flight = sum(wide) * threads
    out: dict[str, Any] = {
        "rows a program": rows,
        "warps": threads // 32,
        "bytes an access": max(found["st"]),
        "narrowest store": min(found["st"]),
        "warp stores a row": round(len(found["st"]) * threads / 32 / rows, 2),
        "warp loads a row": round(len(found["ld"]) * threads / 32 / rows, 2),
        "warp instructions a row": round(instructions * threads / 32 / rows, 1),
        "bytes in flight a program": in_flight,
    }
    if ptxas is not None:
        used = registers(ptx, ptxas)
        blocks = min(REGISTERS // (-(-used // 8) * 8 * threads), THREADS // threads, BLOCKS)
        out |= {"registers": used, "programs a multiprocessor": blocks}
        out |= {"occupancy": round(blocks * threads / THREADS, 2), "KiB in flight": round(blocks * in_flight / 1024)}
    return out


def measure(chips: list[str], implementations: list[str]) -> list[dict[str, Any]]:
    """One entry for each kernel that came out."""
    aot, ptxas = _tool("aot"), find_ptxas()
    results = []
    for chip in chips:
        calls = [
            aot.Call(op, rows, n=n, implementation=name, stacked=op == "move_rows")
            for op, rows in CASES
            for n in (DECODE, PREFILL)
            for name in implementations
        ]
        done = subprocess.run(
            [sys.executable, aot.__file__, chip],
            input=json.dumps([dataclasses.asdict(call) for call in calls]),
            env=aot.environment(),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"compiling for {chip}: {done.stderr[-2000:]}")
        for call, facts in zip(calls, json.loads(done.stdout), strict=True):
            case = {"chip": chip, "implementation": call.implementation, "op": call.op, "rows": call.rows, "n": call.n}
            if "error" in facts:
                results.append(case | {"error": facts["error"]})
            for name, text in facts.get("ptx", {}).items():
                results.append(case | {"kernel": name} | count(text, facts["grids"][name], call.n, ptxas))
    return results


def main() -> None:
    """Prints the tables; `--json` writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["A100", "H200", "B200"])
    parser.add_argument("--implementations", nargs="+", default=["triton"])
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    results = measure(options.chips, options.implementations)
    for chip in options.chips:
        mine = [r for r in results if r["chip"] == chip]
        keys = [k for k in next(r for r in mine if "error" not in r) if k not in ("chip", "implementation", "op")]
        rows = [[r.get(k, r.get("error", "")[:40]) for k in keys] for r in mine]
        print(report.table(f"{chip}, JAX {jax.__version__}", keys, rows))
    if options.json is not None:
        options.json.write_text(json.dumps({"jax": jax.__version__, "kernels": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
