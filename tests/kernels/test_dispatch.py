"""Which implementation runs where: the table, the choice by platform, the query, and what an export holds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jkv
import pallas_kernels
from pallas_kernels import dispatch
from pallas_kernels.dispatch import KernelConfig

ROW = jax.ShapeDtypeStruct((16, 128), jnp.uint16)
LOC = jax.ShapeDtypeStruct((4,), jnp.int32)
CALL = (ROW, LOC, jax.ShapeDtypeStruct((4, 128), jnp.uint16))


def refuse(*args: Any, op: str = "scatter_rows", implementation: str = "triton", **options: Any) -> str | None:
    return dispatch.refusal(op, implementation, *args, **options)


def rows(shape: tuple[int, ...], dtype: Any = jnp.uint16, n: int = 4) -> tuple[Any, ...]:
    return jax.ShapeDtypeStruct(shape, dtype), LOC, jax.ShapeDtypeStruct((n, *shape[1:]), dtype)


def test_an_implementation_that_is_not_in_the_table_is_an_error():
    with pytest.raises(ValueError, match="scatter_rows has no implementation 'cuda'; there is triton"):
        pallas_kernels.scatter_rows(jnp.zeros((4, 8)), np.array([1]), jnp.ones((1, 8)), implementation="cuda")
    with pytest.raises(ValueError, match="use: there is no implementation 'cuda'"), dispatch.use("cuda"):
        pass
    with pytest.raises(ValueError, match="use: interpret is for triton and mosaic, not for 'xla'"):
        dispatch.use("xla", interpret=True).__enter__()


@pytest.mark.parametrize(
    ("call", "options", "reason"),
    [
        (rows((16, 128), jnp.bool_), {}, "it does not move bool"),
        (rows((16, 128), jnp.int4), {}, "it does not move int4"),
        (rows((16, 128), jnp.complex64), {}, "it does not move complex64"),
        (rows((16, 1 << 17)), {}, "rows of 131072 uint16 pass 131072 bytes"),
        (rows((1 << 20, 3001), jnp.uint8), {}, "it would address 3146776576 single bytes in 32 bits"),
        (CALL, {"config": KernelConfig(stages=1)}, "config.stages is for mosaic"),
        (CALL, {"config": KernelConfig(rows=3)}, "config.rows must be a power of two up to 128, got 3"),
        (CALL, {"config": KernelConfig(warps=64)}, "config.warps must be a power of two up to 16, got 64"),
        (CALL, {"device_kind": "Tesla T4"}, "Tesla T4 has compute capability 7.5, it needs 8.0"),
        (CALL, {"device_kind": "NVIDIA A100-SXM4-40GB"}, None),
        (CALL, {}, None),
        (rows((1 << 20, 3004), jnp.uint8), {}, None),  # words of 4 bytes
        (rows((1 << 21, 3001), jnp.uint8), {}, None),  # beyond 2**32 bytes offsets have 64 bits
    ],
)
def test_the_query_says_why_triton_cannot(call: Any, options: dict[str, Any], reason: str | None):
    assert refuse(*call, **options) == reason
    assert dispatch.supports("scatter_rows", "triton", *call, **options) == (reason is None)


@pytest.mark.parametrize(
    ("source", "stored", "scale", "reason"),
    [
        ("float8_e5m2", "float8_e4m3fn", None, "it does not cast float8_e5m2"),
        ("float8_e5m2", "float8_e5m2", None, "it does not cast float8_e5m2"),  # infinities change
        ("float8_e4m3fn", "float8_e4m3fn", None, None),
        ("float8_e4m3fn", "float8_e4m3fn", jnp.ones(()), "it does not cast float8_e4m3fn"),
        ("bfloat16", "float8_e5m2", jnp.ones(()), None),
    ],
)
def test_fp8_rows_are_not_cast_in_triton(source: str, stored: str, scale: Any, reason: str | None):
    buffer, k = jax.ShapeDtypeStruct((16, 1, 128), jnp.uint8), jax.ShapeDtypeStruct((4, 1, 128), source)
    assert refuse(buffer, buffer, LOC, k, k, op="scatter_kv", dtype=stored, k_scale=scale) == reason


def test_a_named_one_says_why_it_cannot_and_never_falls_back():
    cache, loc, new = jnp.zeros((4, 8), bool), np.array([1]), jnp.ones((1, 8), bool)
    with pytest.raises(
        ValueError, match="scatter_rows: implementation 'triton' cannot run this: it does not move bool"
    ):
        pallas_kernels.scatter_rows(cache, loc, new, implementation="triton")
    assert pallas_kernels.scatter_rows(cache, loc, new)[1].all()
    with pytest.raises(ValueError, match="'xla' cannot run this: config is for the GPU kernels"):
        pallas_kernels.scatter_rows(cache, loc, new, implementation="xla", config=KernelConfig(rows=1))
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
            pallas_kernels.scatter_rows(jnp.zeros((4, 8)), loc, jnp.ones((1, 8)), implementation="triton")


def test_an_old_jax_or_one_without_the_module_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    assert refuse(*CALL) is None
    monkeypatch.setitem(dispatch._BACKENDS, "triton", dispatch._Backend("jax.experimental.no_such", (0, 10), 80))
    assert "does not have it (No module named" in (refuse(*CALL) or "")
    monkeypatch.setitem(dispatch._BACKENDS, "triton", dispatch._Backend("jax", (99, 1), 80))
    assert refuse(*CALL) == f"it needs JAX 99.1, this is {jax.__version__}"
    jax.clear_caches()
    assert "gpu.triton" not in export_rows(None)
    jax.clear_caches()  # of programs that were traced without the kernels


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA A100-SXM4-80GB", 80), ("NVIDIA A10", 86), ("NVIDIA L4", 89), ("NVIDIA L40S", 89), ("Tesla T4", 75),
        ("NVIDIA H100 80GB HBM3", 90), ("NVIDIA H200", 90), ("NVIDIA GH200 480GB", 90), ("NVIDIA B200", 100),
        ("NVIDIA GB300", 103), ("NVIDIA GeForce RTX 4090", 89), ("NVIDIA X1", None), ("cpu", None), (None, None),
    ],
)  # fmt: skip
def test_chips_are_known_by_their_kind(kind: str | None, capability: int | None):
    assert dispatch.compute_capability(kind) == capability


def export_rows(implementation: str | None, platform: str = "cuda", **options: Any) -> str:
    fn = lambda *args: pallas_kernels.scatter_rows(*args, implementation=implementation, **options)  # noqa: E731
    checks = jkv.export_disabled_checks()
    return jax.export.export(jax.jit(fn), platforms=[platform], disabled_checks=checks)(*CALL).mlir_module()


def test_the_platform_that_is_lowered_for_chooses():
    assert export_rows(None).count("__gpu$xla.gpu.triton") == 1
    assert "stablehlo.scatter" not in export_rows(None)
    assert "gpu.triton" not in export_rows(None, "cpu")
    assert "stablehlo.scatter" in export_rows("xla")
    with dispatch.use("xla"):
        assert "gpu.triton" not in export_rows(None)
        assert "gpu.triton" in export_rows("triton")
    with dispatch.use("triton"):
        assert "gpu.triton" in export_rows(None)


def test_an_export_for_the_cpu_too_is_xlas():
    """JAX lowers each branch of a choice by platform for all platforms of an export."""
    fn, checks = jax.jit(pallas_kernels.scatter_rows), jkv.export_disabled_checks()
    export = lambda: jax.export.export(fn, platforms=["cpu", "cuda"], disabled_checks=checks)(*CALL)  # noqa: E731
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        export()
    with dispatch.use("xla"):
        exported = jax.export.deserialize(export().serialize())
    assert exported.platforms == ("cpu", "cuda")
    if jax.default_backend() == "cpu":
        cache, rows = jnp.zeros((16, 128), jnp.uint16), jnp.ones((4, 128), jnp.uint16)
        new = exported.call(cache, jnp.array([3, -1, 15, 16], jnp.int32), rows)
        assert np.flatnonzero(np.asarray(new).all(axis=1)).tolist() == [3, 15]


@pytest.mark.parametrize("layer", [0, 1, 2, -1, np.int64(1)])
def test_a_layer_may_be_a_number(layer: Any):
    buffer, row = jax.ShapeDtypeStruct((2, 16, 1, 128), jnp.uint16), jax.ShapeDtypeStruct((4, 1, 128), jnp.bfloat16)
    write = lambda b, loc, x: pallas_kernels.scatter_mla(b, loc, x, dtype=jnp.bfloat16, layer=layer)  # noqa: E731
    read = lambda b, loc, x: pallas_kernels.gather_rows(b, loc, layer=layer)  # noqa: E731
    for fn in (write, read):
        export = jax.export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=jkv.export_disabled_checks())
        assert "gpu.triton" in export(buffer, LOC, row).mlir_module()


def test_xla_on_cuda_divides_as_the_kernels_do():
    buffer, row = jax.ShapeDtypeStruct((16, 1, 128), jnp.uint8), jax.ShapeDtypeStruct((4, 1, 128), jnp.bfloat16)

    def write(b: Any, loc: Any, x: Any, scale: Any) -> Any:
        return pallas_kernels.scatter_mla(b, loc, x, dtype=jnp.float8_e4m3fn, scale=scale, implementation="xla")

    exact = {
        platform: "optimization_barrier"
        in jax.export.export(jax.jit(write), platforms=[platform])(
            buffer, LOC, row, jax.ShapeDtypeStruct((), jnp.float32)
        ).mlir_module()
        for platform in ("cpu", "cuda")
    }
    assert exact == {"cpu": True, "cuda": False}  # on CUDA a division of floats is none of IEEE's


def test_a_config_reaches_the_kernel_and_nothing_else():
    text = export_rows(None, config=KernelConfig(rows=2, warps=8))
    assert "grid_x = 2 : i32" in text
    assert "num_warps = 8 : i32" in text
    assert "gpu.triton" not in export_rows(None, "cpu", config=KernelConfig(rows=2))


def test_a_program_for_the_cpu_is_the_xla_one():
    cache = jax.ShapeDtypeStruct((1 << 16, 128), jnp.uint16)

    def compiled(implementation: str | None) -> tuple[Any, str]:
        fn = lambda *args: pallas_kernels.scatter_rows(*args, implementation=implementation)  # noqa: E731
        out = jax.jit(fn, donate_argnums=0).lower(cache, *CALL[1:]).compile()
        memory = out.memory_analysis()
        return (memory.temp_size_in_bytes, memory.alias_size_in_bytes), out.as_text()

    (memory, text), (want, reference) = compiled(None), compiled("xla")
    assert memory == want
    assert "conditional" not in text
    assert text.count("scatter") == reference.count("scatter")


# A whole decode step, through the pools, as their users write it.


def decode(mha: Any, mla: Any, layers: Any, loc: Any, k: Any, c: Any, tgt: Any, src: Any) -> Any:
    """Two layers of attention of each kind over a scan, then a move: six calls of ops, one of them of two kernels."""

    def layer(pools: Any, at: Any) -> Any:
        mha, mla = pools
        mha = mha.set_kv_buffer(at, loc, k, k)
        mla = mla.set_mla_kv_buffer(at, loc, c[..., :64], c[..., 64:])
        keys, values = mha.get_kv(at, loc)
        nope, rope = mla.get_mla_kv_buffer(at, loc)
        out, _ = jkv.attend_rows(k, keys, values, jnp.ones((len(loc), len(loc)), bool))
        return (mha, mla), (out, nope.sum() + rope.sum())

    (mha, mla), out = jax.lax.scan(layer, (mha, mla), layers)
    return mha.move_kv_cache(tgt, src), mla, out


def arguments(mesh: Any) -> tuple[Any, ...]:
    place = {} if mesh is None else {"mesh": mesh, "dcp_axis": "dcp"}
    options = {"size": 64, "page_size": 16, "layer_num": 2, "stacked": True} | place
    mha = jkv.MHATokenToKVPool.create(head_num=2, head_dim=64, dtype=jnp.bfloat16, **options)
    mla = jkv.MLATokenToKVPool.create(kv_lora_rank=64, qk_rope_head_dim=16, dtype=jnp.bfloat16, **options)
    loc = jnp.arange(20, 24, dtype=jnp.int32)
    k, c = jnp.ones((4, 2, 64), jnp.bfloat16), jnp.ones((4, 1, 80), jnp.bfloat16)
    return mha, mla, jnp.arange(2), loc, k, c, loc + 20, loc


def assert_kernels(text: str) -> None:
    """All of them, the two gathers of a layer apart, and no scatter of XLA's."""
    for name, least in {"scatter_kv": 1, "scatter_mla": 1, "gather_rows": 2, "scatter_rows": 1}.items():
        assert text.count(f'name = "{name}"') >= least
    assert "stablehlo.scatter" not in text


@pytest.mark.parametrize("axis_type", [None, AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_decode_step_exported_on_this_host_holds_the_kernels(axis_type: AxisType | None):
    mesh = None
    if axis_type is not None:
        mesh = jax.make_mesh((4,), ("dcp",), devices=jax.devices()[:4], axis_types=(axis_type,))
    args = arguments(mesh)
    with jkv.enable_checks(False):
        step = jax.jit(decode, donate_argnums=(0, 1))
        exported = jax.export.export(step, platforms=["cuda"], disabled_checks=jkv.export_disabled_checks())(*args)
        text = exported.mlir_module()
        here = jax.export.export(step)(*args).mlir_module()
    assert_kernels(text)
    assert "gpu.triton" not in here
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_kernels_stand_in_a_callers_shard_map(check_vma: bool):
    mesh = jax.make_mesh((4,), ("dcp",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    mha, mla, *rest = arguments(mesh)
    specs = mha.partition_specs(), mla.partition_specs()

    def step(mha: Any, mla: Any, *rest: Any) -> Any:
        mha, mla, (out, _) = decode(mha, mla, *rest)
        return mha, mla, out

    fn = jax.shard_map(step, mesh=mesh, in_specs=(*specs, *[P()] * 6), out_specs=(*specs, P()), check_vma=check_vma)
    with jkv.enable_checks(False):
        exported = jax.export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=jkv.export_disabled_checks())
        assert_kernels(exported(mha, mla, *rest).mlir_module())
        if check_vma:
            return  # the interpreter has no types for what varies
        want = jax.jit(fn)(mha, mla, *rest)
        with dispatch.use("triton", interpret=True):
            got = jax.jit(fn)(mha, mla, *rest)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
