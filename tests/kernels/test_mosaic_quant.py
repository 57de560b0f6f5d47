"""The mosaic kernels that quantise, in the interpreter with its race detector: batches, planted faults, refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import quant_calls
import quant_specs as specs
import test_mosaic
from calls import Slots
from test_faults import FAULTS, written_padding

from pallas_kernels import dispatch, index
from pallas_kernels.dispatch import KernelConfig

if reason := dispatch.unavailable("mosaic"):
    pytest.skip(f"mosaic: {reason}", allow_module_level=True)

from pallas_kernels.mosaic import quant

_mosaic = test_mosaic._mosaic  # the fixture
ALONE, AMONG = Slots(dcp_size=1, layer=2, n=19), Slots(dcp_size=2, interleave=3, n=19)


@pytest.mark.parametrize("slots", [ALONE, AMONG], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("name", ["one-block", "deepseek-v3-fp4"])
def test_a_batch_of_many_rows_is_written_where_they_are_here(name: str, slots: Slots):
    quant_calls.check_scatter(specs.named(name), slots, KernelConfig(rows=8))


@pytest.mark.parametrize("name", ["smollm2-135m", "deepseek-v3.2"])
def test_a_batch_of_many_rows_is_read_where_they_are_here(name: str):
    quant_calls.check_gather(specs.named(name), AMONG, "float16", KernelConfig(rows=8))


CHECKS = {"write": quant_calls.check_scatter, "read": quant_calls.check_gather}


@pytest.mark.parametrize("check", CHECKS)
def test_every_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch, check: str):
    for fault in FAULTS:
        if check == "read" and fault is written_padding:
            continue  # it reads the padding slot, as it should
        monkeypatch.setattr(index, "local_row", fault)
        jax.clear_caches()
        with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=r"words differ|RACE DETECTED"):
            CHECKS[check](specs.named("tiny-mla-fp4"), Slots(dcp_size=2, n=16), config=KernelConfig(rows=4))
        monkeypatch.undo()
        test_mosaic._reset()
    jax.clear_caches()


def test_a_row_in_the_place_of_another_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quant, "_places", lambda rows: (range(len(rows)), sum((row >= 0) * 1 for row in rows)))
    jax.clear_caches()
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=r"words differ|RACE DETECTED"):
        quant_calls.check_scatter(specs.named("deepseek-v3.2"), AMONG, KernelConfig(rows=8))
    jax.clear_caches()


def _shapes(*shapes: tuple[tuple[int, ...], str]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]


def _write(source: str = "bfloat16", width: int = 64, **config: Any) -> str | None:
    shapes = ((8, 1, width // 2), "uint8"), ((8, width // 16), "uint8"), ((2,), "int32"), ((2, 1, width), source)
    return dispatch.refusal("scatter_mla_fp4", "mosaic", *_shapes(*shapes), None, config=KernelConfig(**config))


def _read(dtype: str = "bfloat16", width: int = 64, **config: Any) -> str | None:
    codes, scales, loc = _shapes(((8, 1, width // 2), "uint8"), ((8, width // 16), "uint8"), ((2,), "int32"))
    options = {"dtype": jnp.dtype(dtype), "config": KernelConfig(**config)}
    return dispatch.refusal("gather_fp4", "mosaic", (codes,), (scales,), loc, **options)


def _latent(rope: int) -> tuple[str | None, str | None]:
    shapes = (8, 1, 132 + 2 * rope), (2,), (2, 1, 128), (2, 1, rope)
    args = _shapes(*zip(shapes, ("uint8", "int32", "bfloat16", "bfloat16"), strict=True))
    options = {"kv_lora_rank": 128}
    return (
        dispatch.refusal("scatter_dsa", "mosaic", *args, **options),
        dispatch.refusal("gather_dsa", "mosaic", *args[:2], **options),
    )


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
def test_what_cannot_be_written_is_refused(case: dict[str, Any], reason: str | None):
    assert _write(**case) == reason


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"dtype": "float8_e5m2"}, "it reads as float32, bfloat16, float16, not float8_e5m2"),
        ({"stages": 0}, "config.stages must be 1: rows are multiplied out in shared memory"),
        ({"width": 1 << 17}, "1 rows need 335872 bytes of shared memory, more than 196608"),
        ({}, None),
    ],
)
def test_what_cannot_be_read_is_refused(case: dict[str, Any], reason: str | None):
    assert _read(**case) == reason


def test_a_rope_of_odd_bytes_is_refused():
    assert _latent(8) == (None, None)
    assert _latent(4) == ("bulk copies move multiples of 16 bytes, not 4 elements of bfloat16 rows", None)
    assert _latent(3)[1] == "it reads rows as 32-bit words, which 138 bytes are not"
