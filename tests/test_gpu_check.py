"""`benchmarks.gpu_check` without a GPU: in the interpreter it does all that it does on one."""

import functools
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_cases, gpu_check, kernel_tools
from benchmarks.gpu_cases import WIDE, Case, Size
from pallas_kernels import dispatch

ROOT = pathlib.Path(__file__).parent.parent
PLAIN = {"scatter_kv", "scatter_mla", "scatter_rows", "gather_rows", "move_rows"}
KERNELS = {op for op, names in dispatch.IMPLEMENTATIONS.items() if len(names) > 1}
SMALL = (
    Case("scatter_kv", "smollm2-135m", (1,)),
    Case("scatter_mla", "tiny-mla-f32", (1, 4)),
    Case("scatter_rows", "smollm2-135m"),
    Case("gather_rows", "tiny-mla-f32", (1,)),
    Case("move_rows", "tiny-mla-f32", (1,)),
    Case("scatter_kv_fp4", "one-block", (1,)),
    Case("scatter_mla_fp4", "tiny-mla-fp4", (1,)),
    Case("scatter_dsa", "tiny-dsa", (1,)),
    Case("gather_fp4", "tiny-mla-fp4", (1,)),
    Case("gather_dsa", "tiny-dsa", (1,)),
)


def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, *options: str
) -> tuple[int, dict[str, Any], list[Any]]:
    """Exit status, the header and the rows of its JSON."""
    monkeypatch.setattr(gpu_check, "CASES", SMALL)
    file = tmp_path / "gpu.json"
    status = gpu_check.main(["--interpret", "--json", str(file), *options])
    header, *rows = json.loads(file.read_text())["measurements"]
    return status, header, rows


def test_every_op_is_compared_and_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any):
    status, header, rows = run(monkeypatch, tmp_path, "--ops", *PLAIN)
    assert status == 0
    assert {r["case"].split()[0] for r in rows if r["result"].startswith("equal")} == PLAIN
    timed = [r for r in rows if r["result"] == "timed"]
    assert {(r["case"], r["N"]) for r in timed} == {(c.name, n) for c in SMALL for n in c.timed if c.op in PLAIN}
    assert {r["implementation"] for r in timed} == {"triton", "xla", WIDE}
    for r in timed:
        work = next(c for c in SMALL if c.name == r["case"]).build(Size(r["N"], 2, 32))
        assert r["GB/s"] * r["us"] * 1e3 == pytest.approx(work.nbytes)
        assert r["% of copy"] == pytest.approx(100 * r["GB/s"] / header["copy GB/s"])
        assert r["times XLA"] <= 1 or r["implementation"] == "triton"
    printed = capsys.readouterr().out
    assert printed.count("equal (") == len(rows) - len(timed) == len(PLAIN)
    assert f"{len(rows)} rows, 0 failed" in printed
    if isinstance(header["plain Triton"], str):
        assert f"plain Triton was not measured: {header['plain Triton']}" in printed


def test_the_ops_that_quantise_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    """By XLA: the interpreter takes long to compile their kernels, which the numeric suite compares."""
    status, _, rows = run(monkeypatch, tmp_path, "--implementations", "xla", "--ops", *sorted(KERNELS - PLAIN))
    assert status == 0
    assert {(r["case"].split()[0], r["implementation"], r["result"]) for r in rows} == {
        (op, "xla", "timed") for op in KERNELS - PLAIN
    }


@pytest.mark.parametrize(
    ("fault", "check", "lap"),
    [
        ("raises", "FAILED RuntimeError: no such instruction", "FAILED RuntimeError: no such instruction"),
        ("writes one word more", "FAILED AssertionError: 1 words differ from XLA's, 1 ranks", "timed"),
    ],
)
def test_what_fails_is_its_row_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any, fault: str, check: str, lap: str
):
    module = importlib.import_module("pallas_kernels.scatter_mla.triton")
    right = module.scatter_mla

    def wrong(*args: Any, **options: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("no such instruction\nand more")
        return right(*args, **options).at[0, 0, 0, 0].add(1)

    monkeypatch.setattr(module, "scatter_mla", wrong)
    monkeypatch.setattr(gpu_check, "plain_triton", lambda *args: "not asked for")
    jax.clear_caches()
    status, _, rows = run(monkeypatch, tmp_path, "--ops", "scatter_mla")
    jax.clear_caches()
    assert status == 1
    results = {(r["case"], r["N"], r["implementation"]): r["result"] for r in rows}
    assert results["scatter_mla tiny-mla-f32", 20, "triton"] == check
    for n in (1, 4):
        assert results["scatter_mla tiny-mla-f32", n, "triton"] == lap
        assert results["scatter_mla tiny-mla-f32", n, "xla"] == results["scatter_mla tiny-mla-f32", n, WIDE] == "timed"
    assert "no such instruction" in capsys.readouterr().out or fault != "raises"


def test_what_is_not_run_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    monkeypatch.setattr(gpu_check, "plain_triton", lambda *args: {"scatter_mla tiny-mla-f32 4": 1.0})
    status, _, rows = run(monkeypatch, tmp_path, "--ops", "scatter_mla", "--seconds", "0")
    assert status == 0
    assert {r["result"] for r in rows} == {"not run: the time is up"}
    monkeypatch.setitem(dispatch._BACKENDS, "triton", dispatch._Backend("jax", (99, 1), 80))
    status, _, rows = run(monkeypatch, tmp_path, "--ops", "scatter_mla")
    assert {r["result"] for r in rows if r["implementation"] == "triton"} == {
        f"not run: it needs JAX 99.1, this is {jax.__version__}"
    }
    (wide,) = (r for r in rows if (r["N"], r["implementation"]) == (4, WIDE) and "us" in r)
    assert wide["times plain Triton"] == pytest.approx(1e6 / wide["us"])


def test_without_a_gpu_it_says_so_in_one_line():
    command = [sys.executable, "-m", "benchmarks.gpu_check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu_check: JAX finds no CUDA device here; --interpret runs it in tiny sizes on the CPU\n"


@pytest.mark.parametrize("case", gpu_cases.CASES, ids=lambda case: case.name)
def test_every_case_fits_at_full_size(case: Case):
    for n in (gpu_check.GPU.check.n, *case.timed):
        size = gpu_check.GPU.check if n == gpu_check.GPU.check.n else gpu_check.GPU.of(n)
        for name in {"xla", *case.implementations} & {"xla", WIDE}:

            def step(size: Size = size, name: str = name) -> tuple[Any, Any]:
                work = case.build(size, name)
                state = work.make()
                return state, work.call(state, jnp.zeros(size.n, jnp.int32), work.values[0], 0, jnp.int32(0))

            before, after = jax.eval_shape(step)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(
                lambda x: (x.shape, x.dtype), after
            )
            assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(before)) < 8 << 30


def test_xlas_other_form_writes_the_same_bytes():
    for case in (Case("scatter_kv", "phi-2-fp8"), Case("scatter_mla", "deepseek-v3")):
        results = []
        for name in ("xla", WIDE):
            work = case.build(Size(5, 2, 32), name)
            loc = jnp.array([3, 0, 31, 7, -1], jnp.int32)
            new = work.call(tuple(jnp.zeros_like(b) for b in work.make()), loc, work.values[1], 1, jnp.int32(1))
            results.append([np.asarray(b).reshape(64, -1).view(np.uint8) for b in new])
        for plain, wide in zip(*results, strict=True):
            np.testing.assert_array_equal(plain, wide)
            assert np.flatnonzero(plain.any(axis=1)).tolist() == [35, 39, 63]


def test_the_cases_are_for_all_ops():
    assert {c.op for c in gpu_cases.CASES} == set(gpu_cases.BUILDERS) == KERNELS
    asked = functools.reduce(set.union, ({(c.op, c.spec.scaled)} for c in gpu_cases.CASES if c.timed == gpu_cases.ALL))
    assert asked == {("scatter_kv", False), ("scatter_mla", False), ("scatter_kv", True)}
    assert gpu_cases.ALL == (1, 16, 128, 1024, 16384, 65536)


def test_the_gpu_marker_selects_every_op_and_implementation_and_skips_without_a_gpu():
    def run(**environment: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-m", "gpu", "tests/kernels"]
        env = {k: v for k, v in os.environ.items() if k != "JKV_REQUIRE"} | {"JAX_PLATFORMS": "cpu"} | environment
        # As on a machine with one GPU.
        env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout

    status, text = run()
    assert status == 0
    assert "needs a CUDA device, JAX runs on cpu" in text
    assert not re.search(r"\b(passed|failed|error)", text.splitlines()[-1])
    ids = re.findall(r"^(\S+::\w+\[compiled.*\]) SKIPPED", text, re.MULTILINE)
    assert len(ids) == len(re.findall(r"^\S+::", text, re.MULTILINE))
    for op in KERNELS:
        quantised = [r.name for r in kernel_tools.tool("quant_specs").ALL if op in (r.scatter, r.gather)]
        tests = [f"::test_{op}_", *(f"{name}-" for name in quantised)]
        for implementation in dispatch.IMPLEMENTATIONS[op]:
            mine = [name for name in ids if any(test in name for test in tests)]
            assert any(name.endswith(f"{implementation}]") or f"-{implementation}-" in name for name in mine), op
    status, text = run(JKV_REQUIRE="gpu")
    assert status == 1
    assert "skipped, but JKV_REQUIRE asks for gpu" in text
