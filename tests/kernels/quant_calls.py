"""One call of each op that quantises, and of those that read back, and what the formulas say must come out."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import quant_model as formulas
from calls import Slots, assert_rows, loc_of, on_ranks
from model import gather, scatter
from quant_specs import Rows

import pallas_kernels
from pallas_kernels.dispatch import KernelConfig


def write(rows: Rows, buffers: Any, loc: Any, values: Any, **options: Any) -> tuple[Any, ...]:
    """The op's new buffers. `options`: layer, ranks, padding slot, implementation, config."""
    if rows.kind == "kv":
        return pallas_kernels.scatter_kv_fp4(*buffers, loc, *values, **options)
    if rows.kind == "mla":
        return pallas_kernels.scatter_mla_fp4(*buffers, loc, *values, **options)
    return (pallas_kernels.scatter_dsa(*buffers, loc, *values, kv_lora_rank=rows.parts[0][1], **options),)


def read(rows: Rows, buffers: Any, loc: Any, **options: Any) -> tuple[Any, ...]:
    """The rows of each of `rows.parts`, of a whole MLA row one array."""
    if rows.kind == "dsa":
        return pallas_kernels.gather_dsa(*buffers, loc, kv_lora_rank=rows.parts[0][1], **options)
    split = rows.parts[0][1] if rows.kind == "mla" and not rows.whole else None
    half = len(buffers) // 2
    got = pallas_kernels.gather_fp4(tuple(buffers[:half]), tuple(buffers[half:]), loc, split=split, **options)
    return got if split is None else got[0]


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Floats of which each block of 16 has a magnitude of its own.

    Among them are blocks of zeros, blocks of nothing but thresholds of the codes, and blocks (of 16, by far not of all)
    with a NaN or an infinity.
    """
    size = int(np.prod(shape))
    blocks = rng.standard_normal((size // 16, 16)) * np.exp2(rng.integers(-12, 12, (size // 16, 1)))
    exact = rng.choice(np.array([0, 0.25, 0.75, 1, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -5, -6, -0.0]), blocks.shape)
    kind = rng.random((len(blocks), 1))
    blocks = np.where(kind < 0.2, np.ldexp(exact, rng.integers(-5, 5, kind.shape)), blocks)
    blocks = np.where((kind > 0.2) & (kind < 0.23), 0, blocks)
    odd = rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0, 448, 464, 2.0**-20, 1e30]), blocks.shape)
    spots = (rng.random(blocks.shape) < 0.3) & (kind > 0.23) & (kind < 0.3)
    with np.errstate(over="ignore"):
        return np.where(spots, odd, blocks).reshape(shape).astype(jnp.dtype(dtype))


def random_buffers(rng: np.random.Generator, rows: Rows, lead: tuple[int, ...]) -> list[np.ndarray]:
    """Buffers `[*lead, ...]` of rows that an op may have written, some never: zeros."""
    never = (rng.random(lead) < 0.1).reshape(*lead, 1, 1)
    if rows.kind == "dsa":
        values = [random_values(rng, (*lead, 1, w), "bfloat16") for _, w in rows.parts]
        packed = formulas.dsa_encode(*values)
        return [np.where(never, 0, packed).astype(np.uint8)]
    count = len(rows.buffers) // 2
    codes = [np.where(never, 0, rng.integers(0, 256, (*lead, *shape))) for shape in rows.buffers[:count]]
    # What the exponents of blocks can be, and that of NaNs.
    scales = [rng.integers(94, 254, (*lead, *shape)) for shape in rows.buffers[count:]]
    scales = [np.where(never[..., 0], 0, np.where(rng.random(s.shape) < 0.02, 255, s)) for s in scales]
    return [x.astype(np.uint8) for x in (*codes, *scales)]


def pieces_of(rows: Rows, values: list[np.ndarray]) -> list[np.ndarray]:
    """What must be stored of these values, for each buffer `[N, ...]`."""
    if rows.kind == "dsa":
        r = rows.parts[0][1]
        nope, rope = (values[0][..., :r], values[0][..., r:]) if rows.whole else values
        return [formulas.dsa_encode(nope, rope)]
    if rows.kind == "mla":
        values = [np.concatenate(values, axis=-1)]
    encoded = [formulas.fp4_encode(v) for v in values]
    return [packed for packed, _ in encoded] + [
        scales.reshape(len(scales), math.prod(scales.shape[1:])) for _, scales in encoded
    ]


def decoded(rows: Rows, buffers: list[np.ndarray]) -> list[np.ndarray]:
    """float32 values of rows `[N, ...]`, for each array that `read` returns."""
    if rows.kind == "dsa":
        return list(np.split(formulas.dsa_decode(buffers[0], rows.parts[0][1]), [rows.parts[0][1]], axis=-1))
    half = len(buffers) // 2
    out = [formulas.fp4_decode(c, s) for c, s in zip(buffers[:half], buffers[half:], strict=True)]
    if rows.kind == "mla" and not rows.whole:
        out = list(np.split(out[0], [rows.parts[0][1]], axis=-1))
    return out


def open_bytes(rows: Rows, buffers: list[np.ndarray]) -> list[np.ndarray]:
    """Which bytes of the buffers belong to NaNs, of which one is as good as another."""
    if rows.kind == "dsa":
        return [formulas.dsa_open(buffers[0], rows.parts[0][1])]
    half = len(buffers) // 2
    codes = [formulas.fp4_open(s).reshape(c.shape) for c, s in zip(buffers[:half], buffers[half:], strict=True)]
    return codes + [np.zeros(s.shape, bool) for s in buffers[half:]]


def assert_buffers(rows: Rows, got: Any, want: list[np.ndarray], what: str) -> None:
    """Every byte of every row alike, but for the NaNs' own."""
    got = [np.asarray(x) for x in got]
    free = zip(open_bytes(rows, got), open_bytes(rows, want), strict=True)
    for i, (have, expected, (a, b)) in enumerate(zip(got, want, free, strict=True)):
        assert_rows(np.where(a & b, expected, have), expected, f"{rows.name}, buffer {i}, {what}")


def assert_values(got: Any, want: np.ndarray, dtype: str, what: str) -> None:
    """Every value of the same bits, and NaN where NaN is wanted."""
    word = np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    got = np.asarray(got)
    assert got.dtype == jnp.dtype(dtype), what
    with np.errstate(over="ignore"):
        want = want.astype(jnp.dtype(dtype))
    assert_rows(got.view(word), want.view(word), what, cast_to=dtype)


def check_scatter(rows: Rows, slots: Slots, config: KernelConfig | None = None, seed: int = 0) -> None:
    """What the op writes, on every rank, and that it writes nothing else."""
    rng = np.random.default_rng(seed)
    loc = loc_of(slots, rng)
    values = [random_values(rng, (len(loc), *part), rows.source) for part in rows.values]
    buffers = random_buffers(rng, rows, slots.lead)

    def call(loc, buffers, values, layer, rank):
        options = slots.plain | {"layer": layer, "dcp_rank": rank, "skip_slot": slots.skip_slot, "config": config}
        return write(rows, buffers, loc, values, **options)

    pieces, options = pieces_of(rows, values), {"layer": slots.layer, "skip_slot": slots.skip_slot} | slots.plain
    for rank, new in on_ranks(call, slots, loc, buffers, values):
        want = [scatter(b, loc, [p], rank=rank, **options) for b, p in zip(buffers, pieces, strict=True)]
        assert_buffers(rows, new, want, f"rank {rank}")


def check_gather(
    rows: Rows, slots: Slots, dtype: str = "bfloat16", config: KernelConfig | None = None, seed: int = 1
) -> None:
    """What the op reads, on every rank."""
    rng = np.random.default_rng(seed)
    loc = loc_of(slots, rng, repeat=slots.n > 10)
    buffers = random_buffers(rng, rows, slots.lead)

    def call(loc, buffers, layer, rank):
        options = slots.plain | {"layer": layer, "dcp_rank": rank, "config": config}
        return read(rows, buffers, loc, dtype=jnp.dtype(dtype), **options)

    for rank, got in on_ranks(call, slots, loc, buffers):
        taken = [gather(b, loc, rank=rank, layer=slots.layer, **slots.plain) for b in buffers]
        for i, (have, want) in enumerate(zip(got, decoded(rows, taken), strict=True)):
            assert_values(have, want, dtype, f"{rows.name}, part {i}, rank {rank}")
