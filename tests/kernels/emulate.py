"""The compiled kernels of `aot` calls, run by `ptx` on the CPU, against the NumPy model."""

import dataclasses
from typing import Any

import aot
import jax.numpy as jnp
import numpy as np
import ptx
import specs
from calls import random_rows
from model import place, words

SCALE = np.float32(0.37)


@dataclasses.dataclass
class Traffic:
    """Bytes of the rows that are here, as they are before the move, and of all rows of the call; bytes that the kernel
    loaded and stored to move them."""

    here: int
    all: int
    loaded: int
    stored: int


def spec_of(call: aot.Call) -> specs.Rows:
    return next(r for r in (*specs.KV, *specs.MLA) if r.name == call.rows)


def ids(call: aot.Call, rng: np.random.Generator) -> np.ndarray:
    """As many as the call has, of every kind, the last rows of the last rank among them; good ones distinct."""
    bound = call.size * ranks(call)
    bad = [0, -1, -bound, bound, bound + 1, 2**31 - 1, -(2**31)]
    good = [1, 2, bound - 1, bound - 2, bound // 2, bound // 2 + 1, bound // 3, bound // 5]
    more = np.unique(rng.integers(3, bound // 8, 2 * call.n))
    drawn = [*bad, *good, *rng.permutation(more[~np.isin(more, good)])][: call.n]
    return rng.permutation(np.array(drawn, call.ids))


def ranks(call: aot.Call) -> int:
    return 1 if call.where == "alone" else aot.RANKS


def scatter(call: aot.Call, facts: dict[str, Any], rank: int, seed: int = 0) -> Traffic:
    """Runs a `scatter_kv`, `scatter_mla` or `scatter_rows` (not stacked) on one rank.

    Raises:
      AssertionError: a byte of a buffer is not what the model says. ptx.Fault: the kernel left an array.
    """
    rng, rows = np.random.default_rng(seed), spec_of(call)
    loc = ids(call, rng)
    scaled, cast = rows.scaled, rows.stored if rows.source != rows.stored or rows.scaled else None
    if call.op == "scatter_rows":
        shape = call.n, sum(heads * width for heads, width in rows.parts[: 1 + (rows in specs.MLA)])
        values, scaled, cast = [rng.integers(1, 256, shape, rows.word)], False, None
        pieces = [values]
    else:
        values = [random_rows(rng, (call.n, *part), rows.source) for part in rows.parts]
        encoded = [words(v, rows.stored, SCALE if scaled else None).reshape(call.n, -1) for v in values]
        pieces = [encoded] if rows in specs.MLA else [[piece] for piece in encoded]
    buffers = [ptx.Array(size) for size in facts["buffers"]]
    scalars = [np.int32(rank)] * (call.where != "alone") + [SCALE] * (len(values) if scaled else 0)
    given = [ptx.Array.of(np.atleast_1d(x)) for x in (loc, *scalars, *values)]
    ptx.Kernel(facts["ptx"][call.op]).run([*given, *buffers, *buffers], facts["grids"][call.op])

    wanted, moved = [ptx.Array(size) for size in facts["buffers"]], 0
    for i, slot in enumerate(loc):
        where = place(int(slot), call.size, ranks(call), 1, 0)
        if where is None or where[0] != rank:
            continue
        for array, piece in zip(wanted, pieces, strict=True):
            data = np.concatenate([part[i] for part in piece]).view(np.uint8)
            array.put(where[1] * len(data), data)
        moved += sum(v[i].nbytes for v in values)
    _same_arrays(buffers, wanted, cast, call.label)
    everything = sum(v.nbytes for v in values)
    loaded = sum(a.loaded for a in given[1 + len(scalars) :])
    return Traffic(moved, everything, loaded, sum(a.stored for a in buffers))


def scatter_every_value(call: aot.Call, facts: dict[str, Any], scale: np.float32) -> None:
    """Runs a `scatter_kv` from 16 bits to FP8, not stacked, on one rank: K and V hold every value that there is."""
    rows = spec_of(call)
    every = np.resize(np.arange(1 << 16, dtype=np.uint16), (call.n, *rows.parts[0])).view(jnp.dtype(rows.source))
    loc = np.arange(1, call.n + 1, dtype=np.int32)
    buffers = [ptx.Array(size) for size in facts["buffers"]]
    given = [ptx.Array.of(np.atleast_1d(x)) for x in (loc, scale, scale, every, every)]
    ptx.Kernel(facts["ptx"][call.op]).run([*given, *buffers, *buffers], facts["grids"][call.op])
    with np.errstate(all="ignore"):
        want = words(every, rows.stored, scale).reshape(call.n, -1)
    for buffer in buffers:
        got = buffer.bytes(want.shape[1], want.size)
        _same(got, want.reshape(-1), rows.stored, f"{call.label}: scale {scale}, word")


def move(call: aot.Call, facts: dict[str, Any], seed: int = 0) -> None:
    """Runs a `move_rows` of every layer on one rank: its gather, then its scatter, of `loc + 1` to `loc`."""
    rng, rows = np.random.default_rng(seed), spec_of(call)
    loc, item = ids(call, rng), rows.word.itemsize
    source = (loc.astype(np.int64) + 1).astype(call.ids)
    parts = [heads * width * item for heads, width in rows.parts]
    widths = ([sum(parts)] if rows in specs.MLA else parts) * (1 if call.stacked else 3)
    layers = aot.LAYERS if call.stacked else 1
    before, buffers, outs = [], [], []
    for width in widths:
        array = ptx.Array(layers * call.size * width)
        for row in {int(x) for x in (*loc, *source) if 0 <= x < call.size}:
            for layer in range(layers):
                array.put((layer * call.size + row) * width, rng.integers(1, 256, width, np.uint8))
        buffers.append(array)
        before.append(array.copy())
        outs.append(ptx.Array(layers * call.n * width))
    ids_in = [ptx.Array.of(x) for x in (source, loc)]
    ptx.Kernel(facts["ptx"]["gather_rows"]).run([ids_in[0], *buffers, *outs], facts["grids"]["gather_rows"])
    kernel = ptx.Kernel(facts["ptx"]["scatter_rows"])
    kernel.run([ids_in[1], *outs, *buffers, *buffers], facts["grids"]["scatter_rows"])
    wanted = [array.copy() for array in before]
    for to, at in zip(loc, source, strict=True):
        if not 0 < to < call.size:
            continue
        for width, old, want in zip(widths, before, wanted, strict=True):
            for layer in range(layers):
                first = layer * call.size
                data = old.bytes((first + int(at)) * width, width) if 0 <= at < call.size else np.zeros(width, np.uint8)
                want.put((first + int(to)) * width, data)
    _same_arrays(buffers, wanted, None, call.label)


def gather(call: aot.Call, facts: dict[str, Any], rank: int, seed: int = 0) -> Traffic:
    """Runs a `gather_rows` (not stacked) on one rank, of buffers with random rows where the ids point."""
    rng, rows = np.random.default_rng(seed), spec_of(call)
    loc = ids(call, rng)
    item = rows.word.itemsize
    parts = [heads * width * item for heads, width in rows.parts]
    widths = [sum(parts)] if rows in specs.MLA else parts
    buffers = [ptx.Array(size) for size in facts["buffers"]]
    outs = [ptx.Array(call.n * width) for width in parts]
    wanted, moved = [np.zeros((call.n, width), np.uint8) for width in widths], 0
    for i, slot in enumerate(loc):
        where = place(int(slot), call.size, ranks(call), 1, None)
        if where is None or where[0] != rank:
            continue
        for array, want in zip(buffers, wanted, strict=True):
            want[i] = rng.integers(1, 256, want.shape[1], np.uint8)
            array.put(where[1] * want.shape[1], want[i])
            moved += want.shape[1]
    scalars = [np.int32([rank])] * (call.where != "alone")
    given = [ptx.Array.of(x) for x in (loc, *scalars)]
    ptx.Kernel(facts["ptx"][call.op]).run([*given, *buffers, *outs], facts["grids"][call.op])
    if rows in specs.MLA:
        wanted = np.split(wanted[0], np.cumsum(parts)[:-1], axis=1)
    for i, (out, want) in enumerate(zip(outs, wanted, strict=True)):
        _same(out.bytes(0, out.size), want.reshape(-1), None, f"{call.label}: result {i}")
    everything = sum(a.size for a in outs)
    return Traffic(moved, everything, sum(a.loaded for a in buffers), sum(a.stored for a in outs))


def _same_arrays(arrays: list[ptx.Array], wanted: list[ptx.Array], cast: str | None, what: str) -> None:
    for i, (got, want) in enumerate(zip(arrays, wanted, strict=True)):
        for at in sorted({*got.touched(), *want.touched()}):
            _same(got.bytes(at, ptx.PAGE), want.bytes(at, ptx.PAGE), cast, f"{what}: buffer {i}, byte {at}")


def _same(got: np.ndarray, want: np.ndarray, cast: str | None, what: str) -> None:
    differs = got != want
    if cast is not None:
        values = [x.view(jnp.dtype(cast)).astype(np.float32) for x in (got, want)]
        both = np.isnan(values[0]) & np.isnan(values[1])
        differs &= ~np.repeat(both, jnp.dtype(cast).itemsize)
    at = np.flatnonzero(differs)
    assert not len(at), f"{what} on: {len(at)} bytes differ, the first at {at[0]}: {got[at[0]]} not {want[at[0]]}"
