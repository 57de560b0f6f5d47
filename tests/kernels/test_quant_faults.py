"""Faults planted in the kernels that quantise: the numeric suite catches each. And what those kernels refuse."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quant_calls
import quant_specs
from calls import Slots
from test_faults import FAULTS, missing_filter, written_padding

import pallas_kernels
from pallas_kernels import dispatch, index
from pallas_kernels.dispatch import KernelConfig
from pallas_kernels.triton import launch, quant

ROWS = {rows.kind: rows for rows in map(quant_specs.named, ("one-block", "tiny-mla-fp4", "tiny-dsa"))}


@pytest.fixture(autouse=True)
def nothing_is_compiled_before_or_after() -> Iterator[None]:
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("check", [quant_calls.check_scatter, quant_calls.check_gather])
@pytest.mark.parametrize("kind", ROWS)
def test_every_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch, kind: str, check: Any, implementation: str):
    with dispatch.use(implementation, interpret=implementation != "xla"):
        for fault in FAULTS:
            if check is quant_calls.check_gather and fault is written_padding:
                continue  # it reads the padding slot, as it should
            monkeypatch.setattr(index, "local_row", fault)
            jax.clear_caches()
            with pytest.raises(AssertionError, match="words differ"):
                check(ROWS[kind], Slots())
            monkeypatch.undo()


@pytest.mark.parametrize("kind", ["kv", "mla"])
def test_scales_that_are_written_without_the_filter_are_caught(monkeypatch: pytest.MonkeyPatch, kind: str):
    locate, store, everywhere = launch.locate, quant.Tiles.store, []

    def locate_both(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(index, "local_row", missing_filter)
            _, _, row, here, layer = locate(*args)
        everywhere[:] = [(layer, row), here]
        return locate(*args)

    def store_scales_anywhere(tiles: quant.Tiles, array: int, start: int, tile: Any) -> None:
        if 2 * array >= len(tiles.targets):
            tiles = dataclasses.replace(tiles, target_row=everywhere[0], stored=everywhere[1])
        store(tiles, array, start, tile)

    monkeypatch.setattr(launch, "locate", locate_both)
    monkeypatch.setattr(quant.Tiles, "store", store_scales_anywhere)
    scales = len(ROWS[kind].buffers) // 2
    with (
        dispatch.use("triton", interpret=True),
        pytest.raises(AssertionError, match=f"buffer {scales}, rank 0: .* diff"),
    ):
        quant_calls.check_scatter(ROWS[kind], Slots())


def shapes(rows: quant_specs.Rows, count: int = 64, n: int = 4, source: Any = jnp.bfloat16) -> tuple[list[Any], ...]:
    """Of the buffers, and of the values."""
    buffers = [jax.ShapeDtypeStruct((count, *shape), jnp.uint8) for shape in rows.buffers]
    return buffers, [jax.ShapeDtypeStruct((n, *shape), source) for shape in rows.values]


def refused(
    kind: str, *, reads: bool = False, count: int = 64, source: Any = jnp.bfloat16, **options: Any
) -> str | None:
    """Why triton cannot."""
    rows, loc = ROWS[kind], jax.ShapeDtypeStruct((4,), jnp.int32)
    buffers, values = shapes(rows, count, source=source)
    if kind == "dsa":
        options["kv_lora_rank"] = 128
    if not reads:
        return dispatch.refusal(rows.scatter, "triton", *buffers, loc, *values, **options)
    options = {"dtype": jnp.dtype(jnp.bfloat16)} | options
    half = len(buffers) // 2
    args = (buffers[0], loc) if kind == "dsa" else (buffers[:half], buffers[half:], loc)
    return dispatch.refusal(rows.gather, "triton", *args, **options)


@pytest.mark.parametrize("kind", ROWS)
def test_the_query_says_why_triton_cannot(kind: str):
    for source in ("float32", "bfloat16", "float16"):
        assert refused(kind, source=source) is None
        assert refused(kind, reads=True, dtype=jnp.dtype(source)) is None
    assert refused(kind, source="float8_e4m3fn") == (
        "it quantises from and to float32, bfloat16, float16, not float8_e4m3fn"
    )
    assert refused(kind, reads=True, dtype=jnp.dtype("float8_e5m2")) == (
        "it quantises from and to float32, bfloat16, float16, not float8_e5m2"
    )
    for reads in (False, True):
        assert refused(kind, reads=reads, config=KernelConfig(stages=1)) == "config.stages is for mosaic"
        assert "config.rows must be a power of two" in str(refused(kind, reads=reads, config=KernelConfig(rows=3)))


def test_rows_that_are_too_wide_are_refused():
    buffer, scales = jax.ShapeDtypeStruct((8, 512, 64), jnp.uint8), jax.ShapeDtypeStruct((8, 4096), jnp.uint8)
    loc, k = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4, 512, 128), jnp.bfloat16)
    reason = dispatch.refusal("scatter_kv_fp4", "triton", buffer, buffer, scales, scales, loc, k, k)
    assert reason == "rows of 65536 elements pass 32768"


def test_single_bytes_beyond_2_gib_are_refused():
    # Of the rows of 4 scale bytes the first 3 are nope's: words of one byte.
    count = 3 << 28
    assert refused("mla", count=count) == f"it would address {4 * count} single bytes in 32 bits"
    assert refused("mla", count=count, reads=True, split=48) == f"it would address {4 * count} single bytes in 32 bits"
    assert refused("mla", count=count, reads=True) is None
    assert refused("mla", count=count // 2) is None


def test_an_odd_rope_is_refused_and_left_to_xla():
    buffer = jnp.zeros((8, 1, 128 + 4 + 2 * 5), jnp.uint8)
    row, loc = jnp.ones((1, 1, 133), jnp.bfloat16), jnp.array([3], jnp.int32)
    options: dict[str, Any] = {"kv_lora_rank": 128}
    for op, args in (("scatter_dsa", (buffer, loc, row)), ("gather_dsa", (buffer, loc))):
        call = getattr(pallas_kernels, op)
        with pytest.raises(ValueError, match=f"{op}: implementation 'triton' cannot run this: it moves rope .* not 5"):
            call(*args, implementation="triton", **options)
    new = pallas_kernels.scatter_dsa(buffer, loc, row, **options)
    assert (pallas_kernels.gather_dsa(new, loc, **options)[1] == 1).all()


@pytest.mark.parametrize(
    "config", [KernelConfig(rows=1, warps=1), KernelConfig(rows=16), KernelConfig(rows=4, warps=4)]
)
@pytest.mark.parametrize("name", ["phi-2", "tiny-mla-fp4", "tiny-dsa-whole"])
def test_a_config_changes_no_result(name: str, config: KernelConfig):
    with dispatch.use("triton", interpret=True):
        quant_calls.check_scatter(quant_specs.named(name), Slots(n=12), config)
        quant_calls.check_gather(quant_specs.named(name), Slots(n=12), config=config)


def test_a_split_of_several_heads_is_made_of_their_rows():
    rows = quant_specs.named("phi-3-mini")
    rng = np.random.default_rng(0)
    buffers, loc = quant_calls.random_buffers(rng, rows, (8,)), jnp.arange(8, dtype=jnp.int32)
    whole = pallas_kernels.gather_fp4(tuple(buffers[:2]), tuple(buffers[2:]), loc, implementation="xla")
    with dispatch.use("triton", interpret=True):
        split = pallas_kernels.gather_fp4(tuple(buffers[:2]), tuple(buffers[2:]), loc, split=32)
    for pair, row in zip(split, whole, strict=True):
        quant_calls.assert_values(pair[0], np.asarray(row[..., :32]), "bfloat16", "the first")
        quant_calls.assert_values(pair[1], np.asarray(row[..., 32:]), "bfloat16", "the rest")
