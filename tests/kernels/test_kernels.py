"""Every implementation of every op against the NumPy model, on every row of the buffers.

Without a GPU the Pallas kernels run in JAX's interpreter; `pytest -m gpu` runs the same calls on one, and
`JKV_REQUIRE=gpu pytest -m gpu` fails where there is none.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import calls
import jax
import numpy as np
import pytest
import specs
from calls import ACROSS, Slots

from pallas_kernels import dispatch
from pallas_kernels.dispatch import KernelConfig

Use = Callable[[str, str], contextlib.AbstractContextManager]


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def use(request: pytest.FixtureRequest) -> Use:
    """`use(op, implementation)`: a context in which the op runs that way, here or on the GPU; skips where it cannot."""
    compiled = request.param == "compiled"
    if compiled and jax.default_backend() != "gpu":
        pytest.skip(f"needs a CUDA device, JAX runs on {jax.default_backend()}")

    @contextlib.contextmanager
    def using(op: str, implementation: str) -> Iterator[None]:
        kind = jax.devices()[0].device_kind if compiled else None
        if reason := dispatch.unavailable(implementation, kind):
            pytest.skip(f"{implementation}: {reason}")
        with dispatch.use(implementation, interpret=not compiled and implementation != "xla"):
            yield

    return using


def implementations(op: str) -> Any:
    return pytest.mark.parametrize("implementation", sorted(dispatch.IMPLEMENTATIONS[op]))


def across(cases: Any) -> list[Any]:
    """The cases, each with one of the ways to address, in turn."""
    return [
        pytest.param(case, ACROSS[i % len(ACROSS)], id=str(getattr(case, "name", i))) for i, case in enumerate(cases)
    ]


@implementations("scatter_kv")
@pytest.mark.parametrize(("rows", "slots"), across(specs.KV))
def test_scatter_kv_writes_the_rows_that_are_here(use: Use, implementation: str, rows: specs.Rows, slots: Slots):
    with use("scatter_kv", implementation):
        calls.check_scatter(rows, slots)


@implementations("scatter_mla")
@pytest.mark.parametrize(("rows", "slots"), across(specs.MLA))
def test_scatter_mla_writes_the_rows_that_are_here(use: Use, implementation: str, rows: specs.Rows, slots: Slots):
    with use("scatter_mla", implementation):
        calls.check_scatter(rows, slots)


ANY = [
    ((8, 128), "bfloat16", "bfloat16"),
    ((576,), "bfloat16", "float32"),
    ((3, 5), "int8", "int8"),
    ((656,), "uint8", "uint8"),
    ((2, 64), "float8_e4m3fn", "float8_e4m3fn"),
    ((7,), "float32", "float16"),
    ((24,), "int32", "int32"),
    ((6,), "int16", "float32"),
]


@implementations("scatter_rows")
@pytest.mark.parametrize(("case", "slots"), across(ANY))
def test_scatter_rows_takes_rows_of_any_shape_and_dtype(use: Use, implementation: str, case: Any, slots: Slots):
    with use("scatter_rows", implementation):
        calls.check_scatter_rows(*case, Slots(slots.dcp_size, slots.interleave, slots.skip_slot))


READ = [
    ([(8, 128), (8, 128)], "uint16", None),
    ([(1, 576)], "uint16", 512),
    ([(1, 576)], "uint8", 512),
    ([(2, 192), (2, 128)], "uint16", None),
    ([(3, 64), (3, 64)], "uint8", None),
    ([(1, 72)], "uint32", 72),
    ([(1, 656)], "uint8", None),
    ([(1, 5), (1, 3)], "uint8", None),
    ([(2, 6)], "uint16", 4),
]


@implementations("gather_rows")
@pytest.mark.parametrize(("case", "slots"), across(READ))
def test_gather_rows_reads_what_is_here_and_zeros_elsewhere(use: Use, implementation: str, case: Any, slots: Slots):
    shapes, word, split = case
    with use("gather_rows", implementation):
        calls.check_gather(shapes, word, slots, split)


@implementations("move_rows")
@pytest.mark.parametrize("layer", [None, 0], ids=["layers apart", "stacked"])
@pytest.mark.parametrize(
    ("shapes", "word"), [([(2, 64), (2, 80)] * 2, "uint16"), ([(1, 576)] * 3, "uint8"), ([(1, 5), (1, 3)], "uint8")]
)
def test_move_rows_reads_all_before_it_writes(use: Use, implementation: str, shapes: Any, word: str, layer: Any):
    with use("move_rows", implementation):
        calls.check_move(shapes, word, Slots(dcp_size=1, layer=layer, n=18))


@implementations("move_rows")
@pytest.mark.parametrize("interleave", [1, 2])
def test_move_rows_crosses_ranks(use: Use, implementation: str, interleave: int):
    if len(jax.devices()) < 4:
        pytest.skip(f"needs four devices, there are {len(jax.devices())}")
    with use("move_rows", implementation):
        calls.check_move_across((1, 128), "uint16", Slots(interleave=interleave))


@pytest.mark.parametrize("n", [0, 1, 5, 70])
@implementations("scatter_mla")
def test_any_number_of_rows(use: Use, implementation: str, n: int):
    with use("scatter_mla", implementation):
        calls.check_scatter(specs.MLA[-1], Slots(n=n))
        calls.check_gather([(1, 32)], "uint32", Slots(n=n), 24)
        calls.check_move([(1, 32)], "uint32", Slots(dcp_size=1, n=n))


@implementations("scatter_kv")
@pytest.mark.parametrize("layer", [-1, calls.LAYERS, 2**31 - 1])
def test_a_traced_layer_out_of_range_writes_nothing_and_reads_zeros(use: Use, implementation: str, layer: int):
    with use("scatter_kv", implementation):
        calls.check_scatter(specs.KV[6], Slots(layer=layer))
        calls.check_gather([(3, 64)], "uint16", Slots(layer=layer))


@implementations("scatter_kv")
def test_64_bit_ids(use: Use, implementation: str):
    with jax.enable_x64(True), use("scatter_kv", implementation):
        slots = Slots(ids=np.int64, interleave=2)
        calls.check_scatter(specs.KV[6], slots)
        calls.check_gather([(3, 64)], "uint16", slots)


@pytest.mark.parametrize(
    "config", [KernelConfig(rows=1, warps=1), KernelConfig(rows=16, warps=4), KernelConfig(rows=32)]
)
@pytest.mark.parametrize("rows", [specs.KV[2], specs.KV[8]], ids=lambda rows: rows.name)
def test_a_triton_config_changes_no_result(use: Use, rows: specs.Rows, config: KernelConfig):
    with use("scatter_kv", "triton"):
        calls.check_scatter(rows, Slots(), config)
        calls.check_gather([(3, 80)], "uint16", Slots(), config=config)
