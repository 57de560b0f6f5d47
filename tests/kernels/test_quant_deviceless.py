"""What becomes of the kernels that quantise, and of those that read back, on A100, H200 and B200, without any of them.

One process compiles all calls for a chip. XLA is told to fail where a register would be spilt.
"""

import itertools
import re
from typing import Any

import emulate
import emulate_quant
import numpy as np
import ptx
import pytest
import quant_specs
from aot import CHIPS, Call
from compiled import Facts
from test_deviceless import GIB, MANY, WHERE, accesses, label

pytestmark = pytest.mark.deviceless

MODELS = ("llama-3-8b", "deepseek-v3-fp4", "deepseek-v3.2")
PAIRS = [(op, rows.name) for rows in map(quant_specs.named, MODELS) for op in (rows.scatter, rows.gather)]
COMPILED = [
    *(Call(op, rows, where=where) for op, rows in PAIRS for where in WHERE),
    *(Call(op, rows, n=MANY) for op, rows in PAIRS),
]
RUN = [
    Call(op, rows.name, where="shards" if i % 2 else "alone", n=40)
    for i, rows in enumerate(quant_specs.ALL)
    for op in (rows.scatter, rows.gather)
]
# As where there are many rows, and more than one way of the threads to change words among them.
WIDE = [
    Call(op, rows, where="shards", n=40, config=config)
    for rows, config in (
        ("llama-3-8b", (1, 1)),
        ("llama-3-8b", (2, 2)),
        ("phi-2", (4, 4)),
        ("deepseek-v3-fp4", (2, 1)),
        ("deepseek-v3-fp4", (4, 2)),
        ("deepseek-v3.2", (2, 1)),
        ("deepseek-v3.2", (4, 2)),
        ("deepseek-v3.2-f32", (2, 1)),
        ("tiny-dsa", (8, 1)),
    )
    for op in (quant_specs.named(rows).scatter, quant_specs.named(rows).gather)
]


def huge(op: str, rows: str, gib: float, **options: Any) -> Call:
    """The first buffer of so many GiB a chip."""
    row = int(np.prod(quant_specs.named(rows).buffers[0]))
    return Call(op, rows, n=18, size=int(gib * GIB) // row, **options)


HUGE = [huge(op, rows, gib) for gib in (1, 3, 28) for op, rows in PAIRS]
FAULTY = [huge(op, rows, 3, plant="32-bit offset") for op, rows in PAIRS]
REFUSED = [huge("scatter_mla_fp4", "tiny-mla-fp4", 24), huge("gather_fp4", "tiny-mla-fp4", 24)]  # 3 GiB of scale bytes
CALLS = {
    "A100": [*COMPILED, *WIDE],
    "H200": [*COMPILED, *RUN, *WIDE, *HUGE, *FAULTY, *REFUSED],
    "B200": [*COMPILED, *WIDE],
}


facts = Facts("aot_quant.py", CALLS, 900)


def run(call: Call, found: dict[str, Any], rank: int) -> emulate.Traffic:
    """The machine code of a call, on the CPU."""
    return (emulate_quant.gather if call.op.startswith("gather") else emulate_quant.scatter)(call, found, rank)


def assert_in_place(call: Call, found: dict[str, Any]) -> None:
    """A write aliases all buffers, and no call needs room that is not its rows'."""
    reads = call.op.startswith("gather")
    assert found["alias"] == (0 if reads else sum(found["buffers"]))
    values = 2 * call.n * quant_specs.named(call.rows).width
    # Of a read in a scan a layer's values before they are put with the others', through the door the words of all
    # ranks before they are values.
    rooms = {"scan": 1, "checks": 3}.get(call.where, 0) if reads else 0
    assert found["temp"] <= 4096 + rooms * values


def assert_one_kernel(call: Call, found: dict[str, Any]) -> None:
    """One kernel, and beside it nothing of a buffer's size."""
    assert not found["whole"]
    small = re.compile(r"(loop|input|wrapped)_|sort_")  # ranks, layer numbers, probes
    assert all(small.match(name) for name in found["others"])
    assert len(found["kernels"]) == 1
    if call.where in ("alone", "shards"):
        assert len(found["others"]) <= (call.where == "shards")  # the rank


@pytest.mark.parametrize("call", COMPILED, ids=label)
@pytest.mark.parametrize("chip", CHIPS)
class TestCompiled:
    def test_buffers_are_aliased_and_temporaries_small(self, chip: str, call: Call):
        assert_in_place(call, facts(chip, call))

    def test_one_kernel_a_call_and_nothing_else_touches_a_buffer(self, chip: str, call: Call):
        assert_one_kernel(call, facts(chip, call))

    def test_rows_are_accessed_16_bytes_at_a_time(self, chip: str, call: Call):
        reads, compiled = call.op.startswith("gather"), facts(chip, call)["ptx"]
        if reads and call.where == "checks":  # through the door packed rows are summed over the ranks, then decoded
            assert set(compiled) == {"gather_rows"}
            return
        for body in compiled.values():
            stores, loads = accesses(body, "st"), accesses(body, "ld")
            elements, words = (stores, loads) if reads else (loads, stores)
            # A 64-element rope is one access of a warp's threads, of 4 to 8 bytes each.
            narrow = sum(elements.values()) - elements[".v4.b32"]
            ids = 0 if reads else 9  # the rank, the layer and ids, once for each layout of threads
            assert elements[".v4.b32"] >= (4 if call.n == MANY else 1)
            assert narrow <= ids + (quant_specs.named(call.rows).kind != "kv"), elements
            # With few rows a thread has one word of codes: 128 bytes of a warp's threads, side by side.
            assert words[".v4.b32"] >= (call.n == MANY), words

    def test_no_local_memory_and_no_atomics(self, chip: str, call: Call):
        for body in facts(chip, call)["ptx"].values():
            assert not re.search(r"\.local|\batom\.|\bred\.", body)
            assert len(re.findall(r"\bdiv\.", body)) <= 4, "a reciprocal for each tile of a thread"


@pytest.mark.parametrize(
    ("chip", "call"), [(chip, c) for chip in CHIPS for c in CALLS[chip] if c in RUN or c in WIDE], ids=label
)
def test_the_machine_code_does_what_the_formulas_say(chip: str, call: Call):
    found, reads = facts(chip, call), call.op.startswith("gather")
    rows = quant_specs.named(call.rows)
    stored = sum(int(np.prod(shape)) for shape in rows.buffers)
    source = sum(h * w for h, w in rows.values) * np.dtype(emulate.jnp.dtype(rows.source)).itemsize
    for rank in range(emulate.ranks(call))[::3]:
        traffic = run(call, found, rank)
        if reads:
            # A scale may be loaded by several warps.
            assert traffic.here <= traffic.loaded <= 1.2 * traffic.here
            assert traffic.stored == traffic.all
            continue
        # Each row once. Those of other ranks are not loaded; without any, loading doesn't wait for the ids.
        assert traffic.loaded == (traffic.all if call.where == "alone" else traffic.here)
        assert traffic.stored * source == traffic.here * stored


@pytest.mark.parametrize("call", HUGE, ids=label)
def test_addresses_in_huge_buffers_are_right(call: Call):
    found = facts("H200", call)
    assert found["buffers"][0] > 0.99 * GIB
    assert found["temp"] <= 4096
    run(call, found, 0)


@pytest.mark.parametrize("call", FAULTY, ids=label)
def test_a_planted_32_bit_offset_is_caught(call: Call):
    with pytest.raises((ptx.Fault, AssertionError)):
        run(call, facts("H200", call), 0)


@pytest.mark.parametrize("call", REFUSED, ids=label)
def test_what_cannot_be_addressed_goes_to_xla(call: Call):
    found = facts("H200", call)
    assert found["kernels"] == []
    assert found["alias"] == (0 if call.op == "gather_fp4" else sum(found["buffers"]))


def test_the_calls_are_for_all_ops_everywhere():
    ops = {op for rows in quant_specs.ALL for op in (rows.scatter, rows.gather)}
    assert {(c.op, c.where) for c in COMPILED} == set(itertools.product(ops, WHERE))
    assert {c.op for c in FAULTY} == ops
