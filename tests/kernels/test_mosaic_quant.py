"""The mosaic kernels that quantise, in the interpreter with its race detector: batches, planted faults, refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import quant_calls
import quant_specs as specs
import test_mosaic
from calls import Slots
from test_faults import FAULTS

from pallas_kernels import dispatch, index
from pallas_kernels.dispatch import KernelConfig

if reason := dispatch.unavailable("mosaic"):
    pytest.skip(f"mosaic: {reason}", allow_module_level=True)

_mosaic = test_mosaic._mosaic  # the fixture
ALONE, AMONG = Slots(dcp_size=1, layer=2, n=19), Slots(dcp_size=2, interleave=3, n=19)


@pytest.mark.parametrize("slots", [ALONE, AMONG], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("name", ["one-block", "deepseek-v3-fp4"])
def test_a_batch_of_many_rows_is_written_where_they_are_here(name: str, slots: Slots):
    quant_calls.check_scatter(specs.named(name), slots, KernelConfig(rows=8))


@pytest.mark.parametrize("name", ["tiny-mla-fp4"])
def test_every_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch, name: str):
    for fault in FAULTS:
        monkeypatch.setattr(index, "local_row", fault)
        jax.clear_caches()
        with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=r"words differ|RACE DETECTED"):
            quant_calls.check_scatter(specs.named(name), Slots(), KernelConfig(rows=4))
        monkeypatch.undo()
        test_mosaic._reset()
    jax.clear_caches()


def _refusal(source: str = "bfloat16", width: int = 64, **config: Any) -> str | None:
    shapes = [((8, 1, width // 2), "uint8"), ((8, width // 16), "uint8"), ((2,), "int32"), ((2, 1, width), source)]
    args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
    config = KernelConfig(**config)
    return dispatch.refusal("scatter_mla_fp4", "mosaic", *args, None, config=config, dcp_size=1)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"source": "float8_e4m3fn"}, "it quantises float32, bfloat16, float16, not float8_e4m3fn"),
        ({"stages": 0}, "config.stages must be 1: rows are quantised in shared memory"),
        ({"warps": 2}, "config.warps is for triton; here a block is one warpgroup"),
        ({"rows": 33}, "config.rows must lie within 1 and 32, got 33"),
        ({"width": 1 << 17}, "1 rows need 335872 bytes of shared memory, more than 196608"),
        ({"rows": 32, "width": 1 << 13}, "32 rows need 671744 bytes of shared memory, more than 196608"),
        ({}, None),
    ],
)
def test_what_it_cannot_do_is_refused(case: dict[str, Any], reason: str | None):
    assert _refusal(**case) == reason
