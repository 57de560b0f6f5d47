"""What becomes of the kernels on A100, H200 and B200, without any of them: compiled, read, and run on the CPU.

One process compiles all calls for a chip.
"""

import collections
import itertools
import re
from typing import Any

import emulate
import numpy as np
import ptx
import pytest
import quant_specs
import specs
from aot import CHIPS, LAYERS, Call
from compiled import Facts

from pallas_kernels import dispatch

pytestmark = pytest.mark.deviceless

MANY, FEW = 16384, 64
WHERE = ("alone", "shards", "scan", "checks")
GIB = 1 << 30

COMPILED = [
    Call("scatter_kv", "llama-3-8b"),
    Call("scatter_kv", "llama-3-8b", n=MANY),
    Call("scatter_kv", "llama-3-8b", where="shards"),
    Call("scatter_kv", "llama-3-8b", where="scan"),
    Call("scatter_kv", "llama-3-8b", where="checks"),
    Call("scatter_kv", "llama-3-8b-fp8", n=MANY),
    Call("scatter_kv", "llama-3-8b-fp8", where="scan"),
    Call("scatter_mla", "deepseek-v3"),
    Call("scatter_mla", "deepseek-v3", n=MANY),
    Call("scatter_mla", "deepseek-v3", where="shards"),
    Call("scatter_mla", "deepseek-v3", where="scan"),
    Call("scatter_mla", "deepseek-v3", where="checks"),
    Call("scatter_mla", "deepseek-v3-fp8", n=MANY),
    Call("scatter_rows", "llama-3-8b"),
    Call("scatter_rows", "deepseek-v3", where="shards", n=MANY),
    Call("scatter_rows", "deepseek-v3", where="scan"),
    Call("scatter_rows", "llama-3-8b", where="checks"),
    Call("gather_rows", "llama-3-8b"),
    Call("gather_rows", "deepseek-v3", n=MANY),
    Call("gather_rows", "deepseek-v3", where="shards"),
    Call("gather_rows", "llama-3-8b", where="scan"),
    Call("gather_rows", "llama-3-8b", where="checks"),
    Call("move_rows", "llama-3-8b", stacked=True),
    Call("move_rows", "llama-3-8b"),
    Call("move_rows", "deepseek-v3", where="shards", stacked=True),
    Call("move_rows", "llama-3-8b", where="scan", stacked=True),
    Call("move_rows", "deepseek-v3", where="checks"),
]
RUN = [
    Call("scatter_mla" if r in specs.MLA else "scatter_kv", r.name, where="shards" if i % 2 else "alone", n=40)
    for i, r in enumerate((*specs.KV, *specs.MLA))
] + [
    Call("gather_rows", "llama-3-8b", where="shards", n=40),
    Call("gather_rows", "phi-2-fp8", n=40),
    Call("gather_rows", "deepseek-v3", where="shards", n=40),
    Call("gather_rows", "deepseek-v3-fp8", n=40),
    Call("gather_rows", "odd-head-fp8", where="shards", n=40),
    Call("scatter_rows", "llama-3-8b", n=40),
    Call("scatter_rows", "deepseek-v3-fp8", where="shards", n=40),
    Call("scatter_kv", "llama-3-8b", where="shards", n=40, config=(16, 4)),
    Call("scatter_mla", "deepseek-v3-fp8", where="shards", n=40, config=(16, 4)),
    Call("scatter_kv", "llama-3-8b", where="shards", n=40, ids="int64"),
    Call("gather_rows", "deepseek-v3", n=40, ids="int64"),
]
EVERY = [Call("scatter_kv", "llama-3-8b-fp8", n=64), Call("scatter_kv", "phi-2-fp8", n=206)]  # 2**16 elements at least
MOVED = [
    Call("move_rows", "phi-2-fp8", stacked=True, n=24),
    Call("move_rows", "smollm2-135m", n=24),
    Call("move_rows", "smollm2-135m", n=24, ids="int64"),
]


def huge(op: str, rows: str, row_bytes: int, gib: float, **options: Any) -> Call:
    """A buffer (or both layers of a stacked one) of so many GiB a chip."""
    return Call(op, rows, n=18, size=int(gib * GIB) // row_bytes // (2 if options.get("stacked") else 1), **options)


HUGE = [
    huge(op, rows, row_bytes, gib)
    for gib in (1, 3, 28)
    for op, rows, row_bytes in (
        ("scatter_kv", "llama-3-8b-fp8", 1024),
        ("scatter_kv", "llama-3-8b", 2048),
        ("scatter_mla", "deepseek-v3-fp8", 576),
        ("scatter_rows", "deepseek-v3-fp8", 576),
        ("gather_rows", "deepseek-v3-fp8", 576),
        ("gather_rows", "llama-3-8b", 2048),
    )
] + [huge("move_rows", "llama-3-8b-fp8", 1024, gib, stacked=True) for gib in (3, 28)]
FAULTY = [
    huge(op, rows, row_bytes, 3, plant="32-bit offset", **options)
    for op, rows, row_bytes, options in (
        ("scatter_kv", "llama-3-8b-fp8", 1024, {}),
        ("scatter_mla", "deepseek-v3-fp8", 576, {}),
        ("scatter_rows", "deepseek-v3-fp8", 576, {}),
        ("gather_rows", "deepseek-v3-fp8", 576, {}),
        ("move_rows", "llama-3-8b-fp8", 1024, {"stacked": True}),
    )
]
REFUSED = [
    huge("scatter_kv", "gemma-2-tp4", 256, 3),  # float32 to FP8: single bytes
    huge("scatter_kv", "odd-head-fp8", 5, 3),
]

CALLS = {
    "A100": COMPILED,
    "H200": [*COMPILED, *RUN, *EVERY, *MOVED, *HUGE, *FAULTY, *REFUSED],
    "B200": [*COMPILED, *RUN[:3], *MOVED],
}


facts = Facts("aot.py", CALLS, 900)


def accesses(body: str, kind: str) -> collections.Counter[str]:
    return collections.Counter(re.findall(rf"\b{kind}\.global([\w.]*)", body))


def label(value: Any) -> str:
    return value.label if isinstance(value, Call) else str(value)


@pytest.mark.parametrize("call", COMPILED, ids=label)
@pytest.mark.parametrize("chip", CHIPS)
class TestCompiled:
    def test_buffers_are_aliased_and_temporaries_small(self, chip: str, call: Call):
        found, rows = facts(chip, call), emulate.spec_of(call)
        reads = call.op == "gather_rows"
        assert found["alias"] == (0 if reads else sum(found["buffers"]))
        moved = call.n * sum(heads * width for heads, width in rows.parts) * rows.word.itemsize
        rooms = 0
        if call.op == "move_rows":  # the rows; under DCP the sum over the ranks too
            rooms = (1 if call.stacked or call.where == "checks" else 3) * (1 if call.where == "alone" else 3)
            rooms *= LAYERS if call.stacked or call.where == "checks" else 1
        elif reads and call.where == "checks":  # the sum over the ranks
            rooms = 3
        elif reads and call.where == "scan":  # a layer's rows, before they are put with the others'
            rooms = 1
        room = 4096 + rooms * moved
        assert found["temp"] <= room

    def test_one_kernel_a_call_and_nothing_else_touches_a_buffer(self, chip: str, call: Call):
        found = facts(chip, call)
        assert len(found["kernels"]) == (2 if call.op == "move_rows" else 1)
        assert not found["whole"]
        small = re.compile(r"(loop|input|wrapped)_|sort_")  # ranks, layer numbers, probes
        assert all(small.match(name) for name in found["others"])
        if call.where in ("alone", "shards") and call.op != "move_rows":
            assert len(found["others"]) <= (call.where == "shards")  # the rank

    def test_rows_are_accessed_16_bytes_at_a_time(self, chip: str, call: Call):
        rows = emulate.spec_of(call)
        for body in facts(chip, call)["ptx"].values():
            stores, loads = accesses(body, "st"), accesses(body, "ld")
            narrow = set(stores) - {".v4.b32"}
            # An MLA row's rope is 128 bytes: one access of a warp's threads, of 4 bytes each in a decode tile.
            tail = rows in specs.MLA and call.n == FEW
            fp8_tail = rows in specs.MLA and rows.scaled
            assert narrow <= ({".b32"} if tail else {".v2.b32"} if fp8_tail else set()), stores
            assert sum(stores[kind] for kind in narrow) <= 1
            assert stores[".v4.b32"] >= 1
            assert loads[".v4.b32"] >= stores[".v4.b32"]
            assert not {kind for kind in loads if kind not in (".b32", ".v4.b32", ".v2.b32")}, loads

    def test_no_local_or_shared_memory_and_no_atomics(self, chip: str, call: Call):
        for body in facts(chip, call)["ptx"].values():
            assert not re.search(r"\.local|\.shared|\batom\.|\bred\.", body)
            assert len(re.findall(r"\bdiv\.", body)) <= 2, "a reciprocal for each scale"


@pytest.mark.parametrize(("chip", "call"), [(chip, c) for chip in CHIPS for c in CALLS[chip] if c in RUN], ids=label)
def test_the_machine_code_does_what_the_model_says(chip: str, call: Call):
    found = facts(chip, call)
    run = emulate.gather if call.op == "gather_rows" else emulate.scatter
    rows, reads = emulate.spec_of(call), call.op == "gather_rows"
    for rank in range(emulate.ranks(call))[::3]:
        traffic = run(call, found, rank)
        if reads:
            assert (traffic.loaded, traffic.stored) == (traffic.here, traffic.all)
            continue
        # Each row once. Those of other ranks are not loaded; without any, loading doesn't wait for the ids.
        assert traffic.loaded == (traffic.all if call.where == "alone" else traffic.here)
        source = rows.word if call.op == "scatter_rows" else emulate.jnp.dtype(rows.source)
        assert traffic.stored * source.itemsize == traffic.here * rows.word.itemsize


@pytest.mark.parametrize("call", EVERY, ids=label)
@pytest.mark.parametrize("scale", [1.0, 0.37, 448.0, 2.0**-23, 5e4])
def test_every_16_bit_value_is_divided_and_rounded_as_ieee_says(call: Call, scale: float):
    emulate.scatter_every_value(call, facts("H200", call), np.float32(scale))


@pytest.mark.parametrize(("chip", "call"), [(chip, c) for chip in ("H200", "B200") for c in MOVED], ids=label)
def test_the_machine_code_of_a_move_does_what_the_model_says(chip: str, call: Call):
    emulate.move(call, facts(chip, call))


@pytest.mark.parametrize("call", HUGE, ids=label)
def test_addresses_in_huge_buffers_are_right(call: Call):
    found = facts("H200", call)
    assert sum(found["buffers"]) >= call.size * 576
    assert found["temp"] <= 1 << 20
    _run_alone(call, found)


@pytest.mark.parametrize("call", FAULTY, ids=label)
def test_a_planted_32_bit_offset_is_caught(call: Call):
    found = facts("H200", call)
    with pytest.raises((ptx.Fault, AssertionError)):
        _run_alone(call, found)


def _run_alone(call: Call, found: dict[str, Any]) -> None:
    if call.op == "move_rows":
        emulate.move(call, found)
    else:
        (emulate.gather if call.op == "gather_rows" else emulate.scatter)(call, found, 0)


@pytest.mark.parametrize("call", REFUSED, ids=label)
def test_what_cannot_be_addressed_goes_to_xla(call: Call):
    found = facts("H200", call)
    assert found["kernels"] == []
    assert found["alias"] == sum(found["buffers"])


def test_the_calls_are_for_all_ops_everywhere():
    quantised = {op for rows in quant_specs.ALL for op in (rows.scatter, rows.gather)}  # those have a file of their own
    ops = {op for op, names in dispatch.IMPLEMENTATIONS.items() if "triton" in names} - quantised
    assert {(c.op, c.where) for c in COMPILED} == set(itertools.product(ops, WHERE))
    assert {c.op for c in FAULTY} == ops
