"""Faults planted in the index rules of the kernels: the numeric suite catches each, in each op and implementation."""

from collections.abc import Iterator
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
import specs
from calls import Slots

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
