"""What becomes of the mosaic kernels on H200 and B200, without either: compiled, read, and their PTX run on the CPU."""

import dataclasses
import functools
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
from typing import Any

import emulate
import jax
import jax.numpy as jnp
import ptx
import ptx_mosaic
import pytest
import quant_specs
import specs
from aot import LAYERS, Call
from compiled import Facts
from test_deviceless import GIB, WHERE, label

import pallas_kernels
from pallas_kernels import dispatch

if reason := dispatch.unavailable("mosaic"):
    pytest.skip(f"mosaic: {reason}", allow_module_level=True)

pytestmark = pytest.mark.deviceless

MANY, FEW = 16384, 64
STRAIGHT, STAGED = (3, None, 0), (16, None, 1)
call = functools.partial(Call, implementation="mosaic")

COMPILED = [
    call(op, rows, n=n, where=where, stacked=op == "move_rows")
    for where, n in (("alone", FEW), ("alone", MANY), ("shards", MANY), ("scan", MANY), ("checks", FEW))
    for op, rows in (
        ("scatter_kv", "llama-3-8b"),
        ("scatter_kv", "llama-3-8b-fp8"),
        ("scatter_mla", "deepseek-v3"),
        ("scatter_mla", "deepseek-v3-fp8"),
        ("scatter_rows", "deepseek-v3"),
        ("gather_rows", "deepseek-v3"),
        ("move_rows", "deepseek-v3"),
    )
    if not (rows == "llama-3-8b-fp8" and where in ("scan", "checks"))
    if not (rows == "deepseek-v3-fp8" and where == "checks")
]
RUN = [
    call("scatter_mla" if r in specs.MLA else "scatter_kv", r.name, where=where, n=40, config=config)
    for i, r in enumerate((*specs.KV, *specs.MLA))
    for where, config in (("shards" if i % 2 else "alone", STRAIGHT), ("alone" if i % 2 else "shards", STAGED))
    if config is STRAIGHT or not r.name.startswith("odd")
]
RUN += [
    call(op, rows, where=where, n=40, config=config)
    for op, rows in (("gather_rows", "deepseek-v3"), ("gather_rows", "phi-2-fp8"), ("scatter_rows", "llama-3-8b"))
    for where, config in (("alone", STAGED), ("shards", STAGED), ("shards", STRAIGHT))
]
RUN += [
    call("scatter_kv", "llama-3-8b", where="shards", n=40, config=STRAIGHT, ids="int64"),
    call("scatter_mla", "deepseek-v3", n=40, config=STAGED, ids="int64"),
    call("gather_rows", "deepseek-v3", where="shards", n=40, config=STAGED, ids="int64"),
]
MOVED = [call("move_rows", "phi-2-fp8", stacked=True, n=24, config=config) for config in (STRAIGHT, STAGED)]
MOVED += [call("move_rows", "phi-2-fp8", stacked=True, n=24, config=STAGED, ids="int64")]


def huge(op: str, rows: str, row_bytes: int, gib: float, **options: Any) -> Call:
    """A buffer (or each layer of a stacked one) of so many GiB a chip."""
    return call(op, rows, n=18, size=int(gib * GIB) // row_bytes, **options)


OF_BYTES = (
    ("scatter_kv", "llama-3-8b-fp8", 1024, {"config": STRAIGHT}),
    ("scatter_mla", "deepseek-v3-fp8", 576, {"config": STAGED}),
    ("scatter_rows", "deepseek-v3-fp8", 576, {"config": STRAIGHT}),
    ("gather_rows", "deepseek-v3-fp8", 576, {"config": STAGED}),
    ("move_rows", "llama-3-8b-fp8", 1024, {"stacked": True}),
)
HUGE = [huge(*args, gib, **options) for gib in (1, 3, 28) for *args, options in OF_BYTES]
FAULTY = [huge(*args, 3, plant="32-bit offset", **options) for *args, options in OF_BYTES]
CALLS = {"H200": [*COMPILED, *RUN, *MOVED, *HUGE, *FAULTY], "B200": [*COMPILED, *RUN[:4], *MOVED]}


_facts = Facts("aot_mosaic.py", CALLS, 1800, chips=1)


def facts(chip: str, call: Call) -> dict[str, Any]:
    """What came out of a call, under the names that `emulate` knows."""
    found = _facts(chip, call)
    short = {"move_rows_gather": "gather_rows", "move_rows_scatter": "scatter_rows"}
    for key in ("ptx", "grids", "plans"):
        plain = {name.removesuffix("_mosaic_gpu_kernel"): value for name, value in found[key].items()}
        found[key] = {short.get(name, name): value for name, value in plain.items()}
    return found


@pytest.mark.parametrize("call", COMPILED, ids=label)
@pytest.mark.parametrize("chip", CALLS)
class TestCompiled:
    def test_buffers_are_aliased_and_temporaries_small(self, chip: str, call: Call):
        found, rows = facts(chip, call), emulate.spec_of(call)
        assert found["alias"] == (0 if call.op == "gather_rows" else sum(found["buffers"]))
        moved = call.n * sum(heads * width for heads, width in rows.parts) * rows.word.itemsize
        rooms = {"move_rows": 3 * LAYERS, "gather_rows": 3 if call.where in ("scan", "checks") else 0}.get(call.op, 0)
        ids = (
            4 * call.n if (call.op, call.where) == ("scatter_rows", "scan") else 0
        )  # in the layer's part of the buffer
        assert found["temp"] <= 4096 + rooms * moved + ids

    def test_one_kernel_a_call_and_nothing_else_touches_a_buffer(self, chip: str, call: Call):
        found = facts(chip, call)
        assert found["kernels"] == ["mosaic_gpu_v2"] * (2 if call.op == "move_rows" else 1)
        assert not found["whole"]
        small = re.compile(r"(loop|input|wrapped)_|sort_")  # ranks, layer numbers, probes
        assert all(small.match(name) for name in found["others"])
        if call.where in ("alone", "shards") and call.op != "move_rows":
            assert len(found["others"]) <= (call.where == "shards")  # the rank

    def test_rows_go_16_bytes_at_a_time_or_in_bulk(self, chip: str, call: Call):
        rows, ids = emulate.spec_of(call), {".b32", ".v2.b32", ".v8.b32"}  # of several rows together
        for body in facts(chip, call)["ptx"].values():
            stores = set(re.findall(r"\bst(?:\.global)?((?:\.v\d)?\.b\d+)", body))
            loads = set(re.findall(r"\bld(?:\.global)?((?:\.v\d)?\.b\d+)", body))
            bulk = re.findall(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", body)
            assert "cp.async.bulk.tensor" not in body
            assert bool(bulk) == (call.n == MANY and (rows in specs.MLA or rows.scaled))
            if bulk:
                assert not stores
                assert loads <= {".v4.b32", *ids}
            elif rows in specs.MLA:  # few rows, too narrow for all threads to take 16 bytes
                assert stores <= {".v2.b32", ".b32", ".v2.b8"}
                assert loads <= {".v4.b16", ".v2.b16", *ids}
            else:
                assert stores == {".v2.b32" if rows.scaled else ".v4.b32"}
                assert loads <= {".v4.b32", *ids}

    def test_no_local_memory_no_spills_no_atomics_and_exact_division(
        self, chip: str, call: Call, tmp_path: pathlib.Path
    ):
        for name, body in facts(chip, call)["ptx"].items():
            assert not re.search(r"\.local|\batom\.|\bred\.|div\.(full|approx)", body)
            assert ("e4m3x2" in body) == ("cvt.rn.satfinite.e4m3x2" in body) == emulate.spec_of(call).scaled
            used = resources(body, tmp_path / name)
            assert used.spilled == 0
            assert used.registers <= 96  # five blocks of a multiprocessor, and more where they are small


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel."""

    registers: int
    spilled: int


def resources(body: str, scratch: pathlib.Path) -> Resources:
    ptxas = shutil.which("ptxas") or next(
        iter(pathlib.Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/ptxas")), None
    )
    assert ptxas is not None, "Mosaic compiled without a ptxas?"
    scratch.write_text(body)
    target = re.search(r"\.target (\w+)", body)[1]
    command = [str(ptxas), "-v", f"-arch={target}", str(scratch), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    spilled = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", done.stderr)
    return Resources(int(re.search(r"Used (\d+) registers", done.stderr)[1]), sum(map(int, spilled)))


@pytest.fixture
def _mosaic_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate.ptx, "Kernel", ptx_mosaic.Kernel)


@pytest.mark.usefixtures("_mosaic_ptx")
class TestRun:
    @pytest.mark.parametrize(
        ("chip", "call"), [(chip, c) for chip in CALLS for c in CALLS[chip] if c in RUN], ids=label
    )
    def test_the_machine_code_does_what_the_model_says(self, chip: str, call: Call):
        found, rows = facts(chip, call), emulate.spec_of(call)
        run = emulate.gather if call.op == "gather_rows" else emulate.scatter
        for rank in range(emulate.ranks(call))[::3]:
            traffic = run(call, found, rank)
            if call.config == STAGED and (call.where == "shards" or call.op == "gather_rows"):
                assert traffic.loaded == traffic.here, "a row that is here is loaded once, others are not"
            if call.config == STAGED and call.op != "gather_rows":
                source = rows.word if call.op == "scatter_rows" else rows.source
                assert traffic.stored * jnp.dtype(source).itemsize == traffic.here * rows.word.itemsize

    @pytest.mark.parametrize(("chip", "call"), [(chip, c) for chip in CALLS for c in MOVED], ids=label)
    def test_the_machine_code_of_a_move_does_what_the_model_says(self, chip: str, call: Call):
        emulate.move(call, facts(chip, call))

    @pytest.mark.parametrize("call", HUGE, ids=label)
    def test_addresses_in_huge_buffers_are_right(self, call: Call):
        _run_alone(call)

    @pytest.mark.parametrize("call", FAULTY, ids=label)
    def test_a_planted_32_bit_offset_is_caught(self, call: Call):
        with pytest.raises((ptx.Fault, AssertionError)):
            _run_alone(call)


def _run_alone(call: Call) -> None:
    found = facts("H200", call)
    if call.op == "move_rows":
        emulate.move(call, found)
    else:
        (emulate.gather if call.op == "gather_rows" else emulate.scatter)(call, found, 0)


def test_an_export_for_cuda_needs_no_disabled_checks():
    def write(cache: jax.Array, loc: jax.Array, rows: jax.Array) -> jax.Array:
        return pallas_kernels.scatter_rows(cache, loc, rows, implementation="mosaic")

    shapes = [((4096, 576), jnp.uint16), ((16,), jnp.int32), ((16, 576), jnp.uint16)]
    exported = jax.export.export(jax.jit(write), platforms=["cuda"])(*[jax.ShapeDtypeStruct(*s) for s in shapes])
    again = jax.export.deserialize(exported.serialize())
    assert again.mlir_module().count("@mosaic_gpu_v2") == 1


def test_the_calls_are_for_all_ops_everywhere():
    ops = {op for op, names in dispatch.IMPLEMENTATIONS.items() if "mosaic" in names}
    ops -= {rows.scatter for rows in quant_specs.ALL} | {rows.gather for rows in quant_specs.ALL}  # elsewhere
    assert {(c.op, c.where) for c in COMPILED} == set(itertools.product(ops, WHERE))
    assert {c.op for c in FAULTY} == ops
