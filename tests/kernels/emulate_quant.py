"""The compiled kernels of `aot_quant` calls, run by `ptx` on the CPU, against the formulas."""

from typing import Any

import aot
import emulate
import numpy as np
import ptx
import quant_calls
import quant_specs
from emulate import Traffic
from model import place


def _inputs(
    call: aot.Call, rank: int, seed: int
) -> tuple[np.random.Generator, quant_specs.Rows, np.ndarray, list[Any]]:
    rng, rows = np.random.default_rng(seed), quant_specs.named(call.rows)
    loc = emulate.ids(call, rng)
    scalars = [np.int32([rank])] * (call.where != "alone")
    return rng, rows, loc, [ptx.Array.of(x) for x in (loc, *scalars)]


def _places(call: aot.Call, loc: np.ndarray, rank: int, skip: int | None) -> list[tuple[int, int]]:
    """Number and row of the ids that are here."""
    found = [(i, place(int(slot), call.size, emulate.ranks(call), 1, skip)) for i, slot in enumerate(loc)]
    return [(i, where[1]) for i, where in found if where is not None and where[0] == rank]


def scatter(call: aot.Call, facts: dict[str, Any], rank: int, seed: int = 0) -> Traffic:
    """Runs a write (not stacked) on one rank.

    Raises:
      AssertionError: a byte of a buffer is not what the formulas say. ptx.Fault: the kernel left an array.
    """
    rng, rows, loc, given = _inputs(call, rank, seed)
    values = [quant_calls.random_values(rng, (call.n, *part), rows.source) for part in rows.values]
    sources = [ptx.Array.of(v) for v in values]
    buffers = [ptx.Array(size) for size in facts["buffers"]]
    ptx.Kernel(facts["ptx"][call.op]).run([*given, *sources, *buffers, *buffers], facts["grids"][call.op])
    here = _places(call, loc, rank, 0)
    numbers = [i for i, _ in here]
    want = [piece[numbers] for piece in quant_calls.pieces_of(rows, values)]
    got = []
    for array, piece in zip(buffers, want, strict=True):
        width = int(np.prod(piece.shape[1:]))
        data = [array.bytes(row * width, width) for _, row in here]
        got.append(np.array(data, np.uint8).reshape(piece.shape))
        for _, row in here:
            array.put(row * width, np.zeros(width, np.uint8))
        assert not array.touched(), f"{call.label}: bytes were written outside of the rows"
    quant_calls.assert_buffers(rows, got, want, call.label)
    everything = sum(v.nbytes for v in values)
    moved = everything // call.n * len(here)
    return Traffic(moved, everything, sum(a.loaded for a in sources), sum(a.stored for a in buffers))


def gather(call: aot.Call, facts: dict[str, Any], rank: int, seed: int = 0) -> Traffic:
    """Runs a read (not stacked, to bfloat16) on one rank, of buffers with rows where the ids point."""
    rng, rows, loc, given = _inputs(call, rank, seed)
    here = _places(call, loc, rank, None)
    stored = quant_calls.random_buffers(rng, rows, (call.n,))
    buffers = [ptx.Array(size) for size in facts["buffers"]]
    numbers = [i for i, _ in here]
    for array, data in zip(buffers, stored, strict=True):
        width = int(np.prod(data.shape[1:]))
        data[np.setdiff1d(np.arange(call.n), numbers)] = 0
        for i, row in here:
            array.put(row * width, data[i].reshape(-1))
    want = quant_calls.decoded(rows, stored)
    outs = [ptx.Array(2 * w.size) for w in want]
    ptx.Kernel(facts["ptx"][call.op]).run([*given, *buffers, *outs], facts["grids"][call.op])
    for i, (out, values) in enumerate(zip(outs, want, strict=True)):
        got = out.bytes(0, out.size).view(quant_calls.jnp.bfloat16).reshape(values.shape)
        quant_calls.assert_values(got, values, "bfloat16", f"{call.label}, part {i}")
    width = sum(int(np.prod(shape)) for shape in rows.buffers)
    loaded, written = sum(a.loaded for a in buffers), sum(a.stored for a in outs)
    return Traffic(width * len(here), sum(a.size for a in outs), loaded, written)
