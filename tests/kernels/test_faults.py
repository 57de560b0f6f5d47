"""Faults planted in the index rules of the kernels: the numeric suite catches each, in each op and implementation.

Those of mosaic are in test_mosaic, where its interpreter is reset after each.
"""

from collections.abc import Iterator
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
import specs
from calls import Slots
from jax import lax

import pallas_kernels
from pallas_kernels import dispatch, index

LOCAL_ROW = index.local_row


def missing_divide(loc, rows: int, *, dcp_size: int, **options: Any):
    here = LOCAL_ROW(loc, rows, dcp_size=dcp_size, **options) >= 0
    return jnp.where(here & (loc < rows), loc, -1)


def missing_filter(loc, rows: int, *, dcp_size: int, interleave: int, dcp_rank: Any, skip_slot: int | None = None):
    here = (loc >= 0) & (loc < rows * dcp_size) & (loc != (-1 if skip_slot is None else skip_slot))
    return jnp.where(here, index.row(jnp.where(here, loc, 0), dcp_size, interleave), -1)


def physical_bound(loc, rows: int, **options: Any):
    return jnp.where(loc < rows, LOCAL_ROW(loc, rows, **options), -1)


def unguarded_negative(loc, rows: int, *, dcp_size: int, **options: Any):
    bound = rows * dcp_size
    wrapped = jnp.where((loc < 0) & (loc >= -bound), loc + bound, loc)
    return LOCAL_ROW(wrapped, rows, dcp_size=dcp_size, **options)


def written_padding(loc, rows: int, *, skip_slot: int | None = None, **options: Any):
    del skip_slot
    return LOCAL_ROW(loc, rows, **options)


FAULTS = [missing_divide, missing_filter, physical_bound, unguarded_negative, written_padding]
KV, MLA = (next(r for r in (*specs.KV, *specs.MLA) if r.name == n) for n in ("llama-3-70b-tp8", "tiny-mla-f32"))
CHECKS = {
    "scatter_kv": lambda: calls.check_scatter(KV, Slots()),
    "scatter_mla": lambda: calls.check_scatter(MLA, Slots()),
    "scatter_rows": lambda: calls.check_scatter_rows((128,), "int32", "int32", Slots()),
    "gather_rows": lambda: calls.check_gather([(1, 128)], "uint16", Slots()),
    "move_rows": lambda: calls.check_move_across((1, 128), "uint16", Slots()),
}


@pytest.fixture(autouse=True)
def nothing_is_compiled_before_or_after() -> Iterator[None]:
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("op", CHECKS)
def test_every_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch, op: str, implementation: str):
    with dispatch.use(implementation, interpret=implementation != "xla"):
        for fault in FAULTS:
            if op == "gather_rows" and fault is written_padding:
                continue  # it reads the padding slot, as it should
            monkeypatch.setattr(index, "local_row", fault)
            jax.clear_caches()
            with pytest.raises(AssertionError, match="words differ"):
                CHECKS[op]()
            monkeypatch.undo()


# A kernel's 32-bit offset is caught where its machine code runs: test_deviceless, test_mosaic_deviceless. XLA's own
# index is one a dimension; the rule that makes it could still be an offset.
WIDTH = 576
MANY_ROWS = 2**31 // WIDTH + 100
FAR = (MANY_ROWS - 1, MANY_ROWS - 2)  # beyond 2**31 elements


def written_far(op: str) -> dict[Any, int]:
    """What the op leaves in rows of a buffer of more than 2**31 bytes where all was 0 but row 2, or what it reads."""
    loc = jnp.array([3, *FAR], jnp.int32)
    ones = jnp.ones((3, 1, WIDTH), "float8_e4m3fn")  # words of 56

    def step(buffer: jax.Array) -> jax.Array:
        if op == "scatter_kv":
            narrow = jnp.zeros((MANY_ROWS, 1, 1), jnp.uint8)
            return pallas_kernels.scatter_kv(buffer, narrow, loc, ones, ones[..., :1], dtype="float8_e4m3fn")[0]
        if op == "scatter_mla":
            return pallas_kernels.scatter_mla(buffer, loc, ones[..., :512], ones[..., 512:], dtype="float8_e4m3fn")
        if op == "scatter_rows":
            return pallas_kernels.scatter_rows(buffer, loc, jnp.full_like(ones, 56, jnp.uint8))
        if op == "move_rows":
            return pallas_kernels.move_rows((buffer,), loc, jnp.full_like(loc, 2))[0]
        return pallas_kernels.gather_rows(buffer, loc)

    buffer = jnp.zeros((MANY_ROWS, 1, WIDTH), jnp.uint8)
    filled = [2, *FAR] if op == "gather_rows" else [2]
    buffer = jax.jit(lambda b: b.at[jnp.array(filled)].set(56), donate_argnums=0)(buffer)
    with dispatch.use("xla"):
        new = jax.jit(step, donate_argnums=() if op == "gather_rows" else 0)(buffer)
    if op == "gather_rows":
        return {int(slot): int(row.min()) for slot, row in zip(loc, new, strict=True)}
    return {row: int(new[row].min()) for row in (2, 3, *FAR)} | {"sum": int(jnp.count_nonzero(new))}


@pytest.mark.slow  # 2 GiB
@pytest.mark.parametrize("op", CHECKS)
def test_xla_reaches_beyond_31_bits_and_a_32_bit_offset_would_be_seen(monkeypatch: pytest.MonkeyPatch, op: str):
    gathered = {3: 0} | dict.fromkeys(FAR, 56)
    want = gathered if op == "gather_rows" else dict.fromkeys((2, 3, *FAR), 56) | {"sum": 4 * WIDTH}
    assert written_far(op) == want
    for name in ("set_rows", "take_rows"):
        right = getattr(index, name)

        def through_offset(buffer: jax.Array, row: jax.Array, *args: Any, right: Any = right, **options: Any) -> Any:
            return right(buffer, lax.div(row * jnp.int32(WIDTH), jnp.int32(WIDTH)), *args, **options)

        monkeypatch.setattr(index, name, through_offset)
    jax.clear_caches()
    assert written_far(op) != want
