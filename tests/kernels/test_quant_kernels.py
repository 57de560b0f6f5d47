"""Every implementation of the ops that quantise against the formulas in NumPy, on every row of the buffers.

Without a GPU the Pallas kernels run in JAX's interpreter; `pytest -m gpu` runs the same calls on one.
"""

from typing import Any

import calls
import jax
import numpy as np
import pytest
import quant_calls
import quant_specs as specs
import test_kernels
from calls import ACROSS, Slots
from test_kernels import Use

from pallas_kernels import dispatch

use = test_kernels.use  # the fixture

DTYPES = ("bfloat16", "float32", "float16")


def each(cases: Any, op: str) -> list[Any]:
    """The cases, each with one of the ways to address, in turn, and in every implementation of its op."""
    return [
        pytest.param(rows, ACROSS[i % len(ACROSS)], name, id=f"{rows.name}-{name}")
        for i, rows in enumerate(cases)
        for name in sorted(dispatch.IMPLEMENTATIONS[getattr(rows, op)])
    ]


@pytest.mark.parametrize(("rows", "slots", "implementation"), each(specs.ALL, "scatter"))
def test_rows_are_quantised_and_written_where_they_are_here(
    use: Use, rows: specs.Rows, slots: Slots, implementation: str
):
    with use(rows.scatter, implementation):
        quant_calls.check_scatter(rows, slots)


@pytest.mark.parametrize(("rows", "slots", "implementation"), each(specs.ALL, "gather"))
def test_rows_are_read_where_they_are_here_and_zeros_elsewhere(
    use: Use, rows: specs.Rows, slots: Slots, implementation: str
):
    with use(rows.gather, implementation):
        quant_calls.check_gather(rows, slots, DTYPES[specs.ALL.index(rows) % 3])


SMALL = [specs.named(name) for name in ("one-block", "tiny-mla-fp4", "tiny-dsa")]
IMPLEMENTED = [(rows, name) for rows in SMALL for name in sorted(dispatch.IMPLEMENTATIONS[rows.scatter])]
small = pytest.mark.parametrize(
    ("rows", "implementation"), [pytest.param(*case, id=f"{case[0].name}-{case[1]}") for case in IMPLEMENTED]
)


def _both(use: Use, rows: specs.Rows, implementation: str, slots: Slots) -> None:
    with use(rows.scatter, implementation):
        quant_calls.check_scatter(rows, slots)
    if implementation in dispatch.IMPLEMENTATIONS[rows.gather]:
        with use(rows.gather, implementation):
            quant_calls.check_gather(rows, slots)


@small
@pytest.mark.parametrize("n", [0, 1, 70])
def test_any_number_of_rows(use: Use, rows: specs.Rows, implementation: str, n: int):
    # A program of triton takes up to 64 rows, one of mosaic a row, and its interpreter takes long.
    _both(use, rows, implementation, Slots(n=min(n, 18) if implementation == "mosaic" else n))


@small
def test_a_traced_layer_out_of_range_writes_nothing_and_reads_zeros(use: Use, rows: specs.Rows, implementation: str):
    layer = (-1, calls.LAYERS, 2**31 - 1)[SMALL.index(rows)]
    _both(use, rows, implementation, Slots(layer=layer))


@small
def test_64_bit_ids(use: Use, rows: specs.Rows, implementation: str):
    with jax.enable_x64(True):
        _both(use, rows, implementation, Slots(ids=np.int64, interleave=2))
