"""One call of each op on random buffers, and what the model says must come out, row by row."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import specs
from model import gather, scatter, words

import pallas_kernels
from pallas_kernels import dispatch

ROWS, LAYERS = 12, 3


@dataclasses.dataclass(frozen=True)
class Slots:
    """How a call addresses: the ranks, the layer of stacked buffers (traced) or None, and which id is skipped."""

    dcp_size: int = 4
    interleave: int = 1
    skip_slot: int | None = 0
    layer: int | None = None
    ids: Any = np.int32
    n: int = 22

    @property
    def bound(self) -> int:
        return ROWS * self.dcp_size

    @property
    def lead(self) -> tuple[int, ...]:
        return (ROWS,) if self.layer is None else (LAYERS, ROWS)

    @property
    def plain(self) -> dict[str, Any]:
        return {"dcp_size": self.dcp_size, "interleave": self.interleave}


ACROSS = (
    Slots(),
    Slots(dcp_size=1, layer=1, skip_slot=None),
    Slots(interleave=2, layer=2),
    Slots(dcp_size=3, interleave=4, skip_slot=7),
)


def loc_of(slots: Slots, rng: np.random.Generator, *, repeat: bool = False) -> np.ndarray:
    """Ids of every kind, the good ones distinct unless `repeat`, in random order."""
    info = np.iinfo(slots.ids)
    bad = [-1, -2, -slots.bound, slots.bound, slots.bound + 1, 3 * slots.bound, info.min, info.max]
    good = [0, 1, slots.bound - 1, *(2 + rng.permutation(slots.bound - 3))][: max(slots.n - len(bad), 0)]
    if repeat:
        good = [good[0], *good[:-1]]
    return rng.permutation(np.array([*bad, *good][: slots.n], slots.ids))


def random_words(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.integers(1, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values of all magnitudes, and a few of what a cast must not stumble over."""
    x = rng.standard_normal(shape).astype(np.float32) * np.exp2(rng.integers(-14, 12, shape)).astype(np.float32)
    odd = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 448.0, 464.0, 465.0, 57344.0, 61440.0, 2.0**-20, 1e30])
    spots = rng.random(shape) < 0.05
    with np.errstate(over="ignore"):
        return np.where(spots, rng.choice(odd, shape), x).astype(jnp.dtype(dtype))


def assert_rows(got: Any, want: np.ndarray, what: str, cast_to: str | None = None) -> None:
    """Every word alike; where a cast made the words, a NaN is any NaN of the format."""
    got = np.asarray(got)
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    differs = got != want
    if cast_to is not None:
        values = [x.view(jnp.dtype(cast_to)).astype(np.float32) for x in (got, want)]
        differs &= ~(np.isnan(values[0]) & np.isnan(values[1]))
    at = np.argwhere(differs)
    assert not len(at), (
        f"{what}: {len(at)} words differ, first at {at[0]}: {got[tuple(at[0])]} not {want[tuple(at[0])]}"
    )


def on_ranks(fn: Any, slots: Slots, *args: Any) -> list[tuple[int, Any]]:
    """The ranks, each with `fn(*args, layer, rank)`: layer and rank traced, in one compiled program."""
    layer = None if slots.layer is None else np.int32(slots.layer)
    compiled = jax.jit(fn)
    return [(rank, compiled(*args, layer, np.int32(rank))) for rank in range(slots.dcp_size)]


def check_scatter(rows: specs.Rows, slots: Slots, config: dispatch.KernelConfig | None = None, seed: int = 0) -> None:
    """scatter_kv, or scatter_mla for rows with one head of two parts (or one)."""
    rng = np.random.default_rng(seed)
    loc = loc_of(slots, rng)
    values = [random_rows(rng, (len(loc), *part), rows.source) for part in rows.parts]
    scales = [np.float32(0.37), np.float32(3.1)] if rows.scaled else [None, None]
    mla = rows in specs.MLA
    shapes = [(1, sum(width for _, width in rows.parts))] if mla else rows.parts
    buffers = [random_words(rng, (*slots.lead, *shape), rows.word) for shape in shapes]
    skip, common = slots.skip_slot, {"dtype": jnp.dtype(rows.stored), "config": config}

    def call(loc, buffers, values, layer, rank):
        options = common | slots.plain | {"layer": layer, "dcp_rank": rank, "skip_slot": skip}
        if mla:
            return (pallas_kernels.scatter_mla(*buffers, loc, *values, scale=scales[0], **options),)
        return pallas_kernels.scatter_kv(*buffers, loc, *values, k_scale=scales[0], v_scale=scales[1], **options)

    if mla:
        pieces = [[words(v, rows.stored, scales[0]) for v in values]]
    else:
        pieces = [[words(v, rows.stored, s)] for v, s in zip(values, scales, strict=True)]
    cast = rows.stored if rows.source != rows.stored or rows.scaled else None
    for rank, new in on_ranks(call, slots, loc, buffers, values):
        for i, (buffer, piece) in enumerate(zip(buffers, pieces, strict=True)):
            want = scatter(buffer, loc, piece, rank=rank, layer=slots.layer, skip_slot=skip, **slots.plain)
            assert_rows(new[i], want, f"{rows.name}, buffer {i}, rank {rank}", cast)


def check_scatter_rows(
    shape: tuple[int, ...], dtype: str, source: str, slots: Slots, config: dispatch.KernelConfig | None = None
) -> None:
    """scatter_rows of rows of any shape and dtype."""
    rng = np.random.default_rng(1)
    loc = loc_of(slots, rng)
    cache = rng.integers(-100, 100, (ROWS, *shape)).astype(jnp.dtype(dtype))
    rows = rng.integers(-100, 100, (len(loc), *shape)).astype(jnp.dtype(source))

    def call(loc, cache, rows, layer, rank):
        del layer
        options = slots.plain | {"dcp_rank": rank, "skip_slot": slots.skip_slot, "config": config}
        return pallas_kernels.scatter_rows(cache, loc, rows, **options)

    word = np.dtype(f"uint{8 * cache.dtype.itemsize}")
    for rank, new in on_ranks(call, slots, loc, cache, rows):
        piece = [rows.astype(cache.dtype).view(word)]
        want = scatter(cache.view(word), loc, piece, rank=rank, skip_slot=slots.skip_slot, **slots.plain)
        assert_rows(np.asarray(new).view(word), want, f"{dtype}{shape}, rank {rank}")


def check_gather(
    shapes: list[tuple[int, ...]],
    word: Any,
    slots: Slots,
    split: int | None = None,
    config: dispatch.KernelConfig | None = None,
) -> None:
    """gather_rows of buffers with rows of these shapes."""
    rng = np.random.default_rng(2)
    loc = loc_of(slots, rng, repeat=slots.n > 10)
    buffers = tuple(random_words(rng, (*slots.lead, *shape), jnp.dtype(word)) for shape in shapes)

    def call(loc, buffers, layer, rank):
        options = slots.plain | {"layer": layer, "dcp_rank": rank, "split": split, "config": config}
        return pallas_kernels.gather_rows(buffers, loc, **options)

    for rank, got in on_ranks(call, slots, loc, buffers):
        for i, buffer in enumerate(buffers):
            want = gather(buffer, loc, rank=rank, layer=slots.layer, **slots.plain)
            parts = (
                [(got[i], want)] if split is None else zip(got[i], (want[..., :split], want[..., split:]), strict=True)
            )
            for have, expected in parts:
                assert_rows(have, expected, f"buffer {i}, rank {rank}")


def check_move(
    shapes: list[tuple[int, ...]], word: Any, slots: Slots, config: dispatch.KernelConfig | None = None
) -> None:
    """move_rows on one rank: overlapping, repeated and bad sources, dropped targets. Stacked where a layer is given."""
    rng = np.random.default_rng(3)
    tgt, src = loc_of(slots, rng), loc_of(slots, rng, repeat=slots.n > 10)
    buffers = [random_words(rng, (*slots.lead, *shape), jnp.dtype(word)) for shape in shapes]
    stacked, skip = slots.layer is not None, slots.skip_slot
    got = jax.jit(
        lambda *b: pallas_kernels.move_rows(
            b, tgt, src, stacked=stacked, skip_slot=skip, interleave=slots.interleave, config=config
        )
    )(*buffers)
    where = {"rank": 0, "dcp_size": 1, "interleave": slots.interleave}
    for i, buffer in enumerate(buffers):
        want = buffer
        for layer in range(LAYERS) if stacked else [None]:
            rows = gather(buffer, src, layer=layer, **where)
            want = scatter(want, tgt, [rows], layer=layer, skip_slot=skip, **where)
        assert_rows(got[i], want, f"buffer {i}")


def check_move_across(shape: tuple[int, ...], word: Any, slots: Slots) -> None:
    """move_rows between four ranks, each a device."""
    rng = np.random.default_rng(6)
    tgt, src = loc_of(slots, rng), loc_of(slots, rng, repeat=True)
    buffer = random_words(rng, (slots.dcp_size * ROWS, *shape), jnp.dtype(word))
    devices, auto = jax.devices()[: slots.dcp_size], jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((slots.dcp_size,), ("dcp",), devices=devices, axis_types=(auto,))
    spec = jax.sharding.PartitionSpec("dcp")

    def move(buffer: Any) -> Any:
        options = slots.plain | {"axis_name": "dcp", "dcp_rank": jax.lax.axis_index("dcp")}
        return pallas_kernels.move_rows((buffer,), tgt, src, skip_slot=slots.skip_slot, **options)[0]

    got = jax.jit(jax.shard_map(move, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(buffer)
    parts = np.split(buffer, slots.dcp_size)
    rows = sum(gather(part, src, rank=rank, **slots.plain) for rank, part in enumerate(parts))
    skip = {"skip_slot": slots.skip_slot} | slots.plain
    want = np.concatenate([scatter(part, tgt, [rows], rank=rank, **skip) for rank, part in enumerate(parts)])
    assert_rows(got, want, "moved")
