"""The ways of the mosaic kernels in the interpreter, with its race detector; planted faults; what is refused."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import specs
from calls import Slots
from test_faults import CHECKS, FAULTS, written_padding

import pallas_kernels
from pallas_kernels import dispatch, index
from pallas_kernels.dispatch import KernelConfig

if reason := dispatch.unavailable("mosaic"):
    pytest.skip(f"mosaic: {reason}", allow_module_level=True)

from pallas_kernels.mosaic import Columns, Source, plan

STRAIGHT, STAGED = KernelConfig(rows=3, stages=0), KernelConfig(rows=16, stages=1)
SPEC = {r.name: r for r in (*specs.KV, *specs.MLA)}


@pytest.fixture(autouse=True)
def _mosaic() -> Iterator[None]:
    """Every op runs in the interpreter, which must be told when an exception left it in the middle of a kernel."""
    with dispatch.use("mosaic", interpret=True):
        yield
    _reset()


def _reset() -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()  # whose error was seen already
    name = "jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call"
    importlib.import_module(name).reset_gpu_interpret_mode_state()


ALONE, AMONG = Slots(dcp_size=1, layer=2, n=19), Slots(dcp_size=2, interleave=3, n=19)


@pytest.mark.parametrize("slots", [ALONE, AMONG], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("config", [STRAIGHT, STAGED], ids=["straight", "staged"])
@pytest.mark.parametrize("name", ["smollm2-135m", "deepseek-v3-fp8", "kimi-linear"])
def test_every_way_writes_the_rows_that_are_here(name: str, config: KernelConfig, slots: Slots):
    calls.check_scatter(SPEC[name], slots, config)


@pytest.mark.parametrize(("slots", "split"), [(ALONE, 512), (AMONG, None)], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("config", [STRAIGHT, STAGED], ids=["straight", "staged"])
def test_every_way_reads_the_rows_that_are_here(split: Any, config: KernelConfig, slots: Slots):
    calls.check_gather([(1, 576)], "uint16", slots, split, config)


@pytest.mark.parametrize(("layer", "config"), [(None, STAGED), (0, STRAIGHT), (0, STAGED)])
def test_every_way_moves(config: KernelConfig, layer: Any):
    calls.check_move([(2, 64), (2, 80)], "uint16", Slots(dcp_size=1, layer=layer, n=14), config)


def test_64_bit_ids_move_all_layers():
    with jax.enable_x64(True):
        calls.check_move([(1, 32)], "uint32", Slots(dcp_size=1, layer=0, n=10, ids=np.int64))


def test_rows_of_656_bytes_go_in_bulk():
    calls.check_scatter_rows((656,), "uint8", "uint8", Slots(dcp_size=1, n=10), STAGED)


def test_a_batch_may_hold_all_rows_and_more_are_not_asked_for():
    calls.check_scatter(SPEC["smollm2-135m"], Slots(n=9), STAGED)


def test_buffers_of_many_layers_are_moved_a_few_a_launch():
    calls.check_move([(1, 8)] * 10, "uint32", Slots(dcp_size=1, n=12))


@pytest.mark.parametrize(
    ("source", "dtype", "scaled"),
    [
        ("float8_e5m2", "float8_e5m2", False),  # whose infinities are clamped
        ("float8_e5m2", "float8_e4m3fn", True),
        ("float8_e4m3fn", "bfloat16", False),
        ("float16", "float8_e5m2", True),
    ],
)
def test_rows_of_any_format_are_cast(source: str, dtype: str, scaled: bool):
    rows = specs.Rows("cast", ((1, 64), (1, 64)), stored=dtype, source=source, scaled=scaled)
    calls.check_scatter(rows, Slots(dcp_size=1, n=12))


@pytest.mark.parametrize("op", CHECKS)
def test_every_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch, op: str):
    for fault in FAULTS:
        if op == "gather_rows" and fault is written_padding:
            continue  # it reads the padding slot, as it should
        monkeypatch.setattr(index, "local_row", fault)
        jax.clear_caches()
        with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=r"words differ|RACE DETECTED"):
            CHECKS[op]()
        monkeypatch.undo()
        _reset()
    jax.clear_caches()


def test_a_race_is_an_error():
    cache, loc = jnp.zeros((8, 32), jnp.uint32), jnp.array([3, 3], jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        pallas_kernels.scatter_rows(cache, loc, jnp.ones((2, 32), jnp.uint32)).block_until_ready()


# What is refused, and how a batch is planned.
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (KernelConfig(warps=2), "config.warps is for triton"),
        (KernelConfig(stages=2), r"config.stages must be 0 .* or 1 .*, got 2"),
        (KernelConfig(rows=0), "config.rows must lie within 1 and 32, got 0"),
        (KernelConfig(rows=33), "config.rows must lie within 1 and 32, got 33"),
        (KernelConfig(stages=1), "bulk copies move multiples of 16 bytes"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(config: KernelConfig, reason: str):
    args = (jnp.zeros((8, 3), jnp.uint16), jnp.arange(2), jnp.zeros((2, 3), jnp.uint16))
    with pytest.raises(ValueError, match=f"scatter_rows: implementation 'mosaic' cannot run this: .*{reason}"):
        pallas_kernels.scatter_rows(*args, config=config)
    assert not dispatch.supports("scatter_rows", "mosaic", *args, config=config)


def test_a_batch_that_does_not_fit_shared_memory_is_refused():
    args = (jnp.zeros((8, 4096), jnp.uint32), jnp.arange(2), jnp.zeros((2, 4096), jnp.uint32))
    with pytest.raises(ValueError, match="32 rows of 16384 bytes do not fit 196608 of shared memory"):
        pallas_kernels.scatter_rows(*args, config=KernelConfig(rows=32, stages=1))


@pytest.mark.parametrize("dtype", ["bool", "complex64", "int4"])
def test_elements_that_are_no_words_are_refused(dtype: str):
    cache = jax.ShapeDtypeStruct((8, 32), jnp.dtype(dtype))
    rows = jax.ShapeDtypeStruct((2, 32), jnp.dtype(dtype))
    reason = dispatch.refusal("scatter_rows", "mosaic", cache, jnp.arange(2), rows)
    assert reason == f"it moves numbers of 1, 2 or 4 bytes, not {dtype}"


def test_what_varies_in_a_checked_shard_map_is_refused():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    write = jax.shard_map(
        lambda cache, loc: pallas_kernels.scatter_rows(cache, loc, jnp.ones((2, 32), jnp.uint32)),
        mesh=mesh,
        in_specs=(jax.P("x"), jax.P()),
        out_specs=jax.P("x"),
    )
    with pytest.raises(ValueError, match="check_vma=True"):
        jax.eval_shape(write, jnp.zeros((8, 32), jnp.uint32), jnp.arange(2))


def _columns(width: int, dense: str = "bfloat16", stored: str = "bfloat16") -> list[Columns]:
    rows = jax.ShapeDtypeStruct((1, width), jnp.dtype(dense))
    return [Source(rows, 0, 0, width, stored).columns()]


@pytest.mark.parametrize(
    ("columns", "n", "tile", "planned"),
    [
        (_columns(1024), 1, True, (1, "straight")),
        (_columns(1024), 65536, True, (4, "straight")),  # 2048 bytes fill 128 threads
        (_columns(576), 256, True, (1, "straight")),
        (_columns(576), 512, True, (1, "bulk")),  # too few for a tile to every multiprocessor
        (_columns(576), 65536, True, (16, "tile")),
        (_columns(576), 65536, False, (16, "bulk")),  # not all rows of a batch are here
        (_columns(1024, stored="float8_e4m3fn"), 65536, True, (8, "tile")),  # 1024 bytes do not
        (_columns(656, "uint8", "uint8"), 65536, True, (32, "bulk")),
        (_columns(5), 65536, True, (4, "straight")),
        (_columns(1 << 17), 65536, True, (4, "straight")),
    ],
)
def test_a_batch_is_planned_by_rows_and_their_width(columns: list[Columns], n: int, tile: bool, planned: Any):
    found = plan.plan(columns, n, KernelConfig(), tile=tile)
    assert (found.rows, found.way) == planned


@pytest.mark.parametrize("width", [1, 5, 16, 24, 64, 80, 96, 128, 192, 256, 576, 640, 656, 1024, 5000, 1 << 17])
@pytest.mark.parametrize(
    ("dense", "stored"), [("bfloat16", "bfloat16"), ("float32", "float8_e4m3fn"), ("int8", "int8")]
)
def test_the_pieces_of_a_row_are_the_row(width: int, dense: str, stored: str):
    (columns,) = _columns(width, dense, stored)
    for staged in (False, True):
        vector, covered = columns.vector(staged), 0
        for at, size in columns.pieces(staged):
            lanes = size // vector
            assert at == covered
            assert size == lanes * vector
            assert lanes % 128 == 0 or (lanes < 128 and lanes & (lanes - 1) == 0)
            covered += size
        assert covered == width
        assert vector * max(columns.dense_bytes, columns.buffer_bytes) % 4 == 0 or width % 2 or vector == width
        assert np.log2(vector) % 1 == 0
