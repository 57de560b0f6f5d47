"""What becomes of the mosaic kernels that quantise, and of those that read back, on H200 and B200, without either."""

import functools
import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import emulate
import emulate_quant
import numpy as np
import ptx
import ptx_mosaic
import pytest
import quant_specs
from aot import Call
from compiled import Facts
from test_deviceless import GIB, MANY, WHERE, label
from test_quant_deviceless import assert_in_place, assert_one_kernel

from pallas_kernels import dispatch

if reason := dispatch.unavailable("mosaic"):
    pytest.skip(f"mosaic: {reason}", allow_module_level=True)

from test_mosaic_deviceless import resources

pytestmark = pytest.mark.deviceless

call = functools.partial(Call, implementation="mosaic")
MODELS = ("llama-3-8b", "deepseek-v3-fp4", "deepseek-v3.2")
PAIRS = [(op, rows.name) for rows in map(quant_specs.named, MODELS) for op in (rows.scatter, rows.gather)]
COMPILED = [
    *(call(op, rows, where=where) for op, rows in PAIRS for where in WHERE),
    *(call(op, rows, where=where, n=MANY) for op, rows in PAIRS for where in ("alone", "shards")),
]
BATCH = (8, None, 1)
RUN = [
    call(op, rows.name, where=where, n=40, config=BATCH)
    for rows, where in zip(
        map(
            quant_specs.named, ("phi-2", "one-block", "kimi-linear-fp4", "deepseek-v3-fp4", "deepseek-v3.2", "tiny-dsa")
        ),
        itertools.cycle(("shards", "alone")),
        strict=False,
    )
    for op in (rows.scatter, rows.gather)
    if (op, rows.name) != ("gather_fp4", "phi-2")  # which reads both codes before the scales: see `Kernel`
]


def huge(op: str, rows: str, gib: float, **options: Any) -> Call:
    """The first buffer of so many GiB a chip."""
    row = int(np.prod(quant_specs.named(rows).buffers[0]))
    return call(op, rows, n=18, size=int(gib * GIB) // row, **options)


HUGE = [huge(op, rows, gib) for gib in (3, 28) for op, rows in PAIRS]
FAULTY = [huge(op, rows, 3, plant="32-bit offset") for op, rows in PAIRS]
CALLS = {"H200": [*COMPILED, *RUN, *HUGE, *FAULTY], "B200": [c for c in COMPILED if c.where == "shards"]}


_facts = Facts("aot_mosaic_quant.py", CALLS, 900, chips=1)


def facts(chip: str, call: Call) -> dict[str, Any]:
    """What came out of a call, under the names that `emulate_quant` knows."""
    found = _facts(chip, call)
    for key in ("ptx", "grids", "plans"):
        found[key] = {name.removesuffix("_mosaic_gpu_kernel"): value for name, value in found[key].items()}
    return found


def run(call: Call, rank: int) -> emulate.Traffic:
    """The machine code of a call for H200, on the CPU."""
    found = facts("H200", call)
    return (emulate_quant.gather if call.op.startswith("gather") else emulate_quant.scatter)(call, found, rank)


@pytest.mark.parametrize(
    ("chip", "call"), [(chip, c) for chip in CALLS for c in CALLS[chip] if c in COMPILED], ids=label
)
class TestCompiled:
    def test_buffers_are_aliased_and_temporaries_small(self, chip: str, call: Call):
        assert_in_place(call, facts(chip, call))

    def test_one_kernel_a_call_and_nothing_else_touches_a_buffer(self, chip: str, call: Call):
        found = facts(chip, call)
        assert_one_kernel(call, found)
        assert found["kernels"] == ["mosaic_gpu_v2"]

    def test_rows_go_in_bulk_and_16_bytes_at_a_time_through_registers(self, chip: str, call: Call):
        reads, rows = call.op.startswith("gather"), quant_specs.named(call.rows)
        for name, body in facts(chip, call)["ptx"].items():
            if name != call.op:  # through the door packed rows are summed over the ranks, then decoded
                continue
            bulk = [re.findall(rf"cp\.async\.bulk\.{way}\.", body) for way in ("shared::cta", "global")]
            assert all(bulk)
            assert "cp.async.bulk.tensor" not in body
            # Floats are made of a word of codes: four of FP8 are eight bytes of bfloat16.
            assert re.search(r"st\.shared\.v[24]\.b32" if reads else r"ld\.shared\.v4\.b32", body)
            # In memory only ids, and the scales of a row of 36 blocks, four bytes a thread.
            stores = set(re.findall(r"\bst(?:\.global)?((?:\.v\d)?\.b\d+)", body))
            assert stores == ({".b32"} if rows.kind == "mla" and not reads else set())

    def test_no_local_memory_no_spills_and_no_atomics(self, chip: str, call: Call, tmp_path: pathlib.Path):
        for name, body in facts(chip, call)["ptx"].items():
            assert not re.search(r"\.local|\batom\.|\bred\.|\bdiv\.(full|approx)", body)
            used = resources(body, tmp_path / name)
            assert used.spilled == 0
            assert used.registers <= 128  # four blocks of a multiprocessor


class Kernel(ptx_mosaic.Kernel):
    """Its parameters are in the order of their first use: the codes and the scales of K, then those of V."""

    def run(self, arrays: Sequence[ptx.Array], grid: tuple[int, int]) -> None:
        """Runs every block. `arrays`: in the order of the op's arguments."""
        distinct = list({id(a): a for a in arrays}.values())
        reads = "gather" in self.name
        first = len(distinct) - (6 if reads else 4)
        if "scatter_kv" in self.name or ("gather_fp4" in self.name and len(self.params) >= 7):
            distinct[first + 1], distinct[first + 2] = distinct[first + 2], distinct[first + 1]
        super().run(distinct, grid)


@pytest.fixture
def _mosaic_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx, "Kernel", Kernel)


@pytest.mark.usefixtures("_mosaic_ptx")
class TestRun:
    @pytest.mark.parametrize("call", RUN, ids=label)
    def test_the_machine_code_does_what_the_formulas_say(self, call: Call):
        rows, reads = quant_specs.named(call.rows), call.op.startswith("gather")
        stored = sum(int(np.prod(shape)) for shape in rows.buffers)
        source = sum(h * w for h, w in rows.values) * np.dtype(emulate.jnp.dtype(rows.source)).itemsize
        for rank in range(emulate.ranks(call))[::3]:
            traffic = run(call, rank)
            if reads:
                assert traffic.here <= traffic.loaded
                assert traffic.stored == traffic.all
            else:
                assert traffic.loaded == traffic.here, "a row that is here is loaded once, others are not"
                assert traffic.stored * source >= traffic.here * stored

    @pytest.mark.parametrize("call", HUGE, ids=label)
    def test_addresses_in_huge_buffers_are_right(self, call: Call):
        run(call, 0)

    @pytest.mark.parametrize("call", FAULTY, ids=label)
    def test_a_planted_32_bit_offset_is_caught(self, call: Call):
        with pytest.raises((ptx.Fault, AssertionError)):
            run(call, 0)


def test_the_calls_are_for_all_ops_everywhere():
    ops = {op for rows in quant_specs.ALL for op in (rows.scatter, rows.gather)}
    assert {(c.op, c.where) for c in COMPILED} == set(itertools.product(ops, WHERE))
    assert {c.op for c in FAULTY} == ops
