"""Quantised pools hold the kernels where they are lowered for CUDA: alone, on meshes, and in a caller's shard_map."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jkv
from pallas_kernels import dispatch

KERNELS = ("scatter_kv_fp4", "scatter_mla_fp4", "scatter_dsa")


def pools(mesh: Any) -> tuple[Any, ...]:
    place = {} if mesh is None else {"mesh": mesh, "dcp_axis": "dcp"}
    options: dict[str, Any] = {"size": 64, "page_size": 16, "layer_num": 2, "stacked": True} | place
    latent: dict[str, Any] = {"kv_lora_rank": 128, "qk_rope_head_dim": 16} | options
    return (
        jkv.MHATokenToKVPoolFP4.create(head_num=2, head_dim=32, **options),
        jkv.MLATokenToKVPoolFP4.create(**latent),
        jkv.DSATokenToKVPool.create(**latent),
    )


def step(pools: Any, layers: Any, loc: Any, k: Any, c: Any) -> Any:
    """A write to each pool and a read of it, in a scan over the layers."""

    def layer(pools: Any, at: Any) -> Any:
        mha, mla, dsa = pools
        mha = mha.set_kv_buffer(at, loc, k, k)
        mla, dsa = (pool.set_mla_kv_buffer(at, loc, c[..., :128], c[..., 128:]) for pool in (mla, dsa))
        return (mha, mla, dsa), (mha.get_kv(at, loc), mla.get_mla_kv_buffer(at, loc), dsa.get_mla_kv_buffer(at, loc))

    return jax.lax.scan(layer, pools, layers)


def arguments(mesh: Any) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    k, c = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((4, 2, 32), (4, 1, 144)))
    return pools(mesh), jnp.arange(2), jnp.arange(20, 24, dtype=jnp.int32), k, c


def mesh_of(axis_type: AxisType) -> Any:
    if len(jax.devices()) < 4:
        pytest.skip(f"needs four devices, there are {len(jax.devices())}")
    return jax.make_mesh((4,), ("dcp",), devices=jax.devices()[:4], axis_types=(axis_type,))


def exported(fn: Any, *args: Any) -> str:
    options = {"platforms": ["cuda"], "disabled_checks": jkv.export_disabled_checks()}
    with jkv.enable_checks(False):
        return jax.export.export(jax.jit(fn), **options)(*args).mlir_module()


def assert_kernels(text: str) -> None:
    for name in KERNELS:
        assert f'name = "{name}"' in text
    assert "stablehlo.scatter" not in text


@pytest.mark.parametrize("axis_type", [None, AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_step_exported_on_this_host_holds_the_kernels(axis_type: AxisType | None):
    args = arguments(None if axis_type is None else mesh_of(axis_type))
    text = exported(step, *args)
    assert_kernels(text)
    if axis_type is None:
        assert text.count('name = "gather_fp4"') >= 2
        assert text.count('name = "gather_dsa"') >= 1
    with jkv.enable_checks(False):
        assert "gpu.triton" not in jax.export.export(jax.jit(step))(*args).mlir_module()


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_kernels_stand_in_a_callers_shard_map(check_vma: bool):
    mesh = mesh_of(AxisType.Auto)
    mine, *rest = arguments(mesh)
    specs = tuple(pool.partition_specs() for pool in mine)

    def write(pools: Any, *rest: Any) -> Any:
        return step(pools, *rest)[0]

    fn = jax.shard_map(write, mesh=mesh, in_specs=(specs, *[P()] * 4), out_specs=specs, check_vma=check_vma)
    assert_kernels(exported(fn, mine, *rest))
    if check_vma:
        return  # the interpreter has no types for what varies
    with jkv.enable_checks(False):
        want = jax.jit(fn)(mine, *rest)
        with dispatch.use("triton", interpret=True):
            got = jax.jit(fn)(mine, *rest)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
