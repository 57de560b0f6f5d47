"""Bytes of a token and the tokens that fit, against the pools themselves: real ones, abstract ones, on meshes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from small_pools import MHA, MLA, mesh, on

import jkv

LLAMA_3_8B = {"head_num": 8, "head_dim": 128, "layer_num": 32}
DEEPSEEK_V3 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_num": 61}
FAMILIES = {
    "mha": (jkv.MHATokenToKVPool, {"dtype": jnp.bfloat16} | MHA),
    "mla": (jkv.MLATokenToKVPool, {"dtype": jnp.bfloat16} | MLA),
    "mha_fp4": (jkv.MHATokenToKVPoolFP4, {"head_num": 2, "head_dim": 32, "v_head_dim": 16}),
    "mla_fp4": (jkv.MLATokenToKVPoolFP4, {"kv_lora_rank": 32, "qk_rope_head_dim": 16}),
    "dsa": (jkv.DSATokenToKVPool, {"kv_lora_rank": 128, "qk_rope_head_dim": 8}),
}
INT32_MAX = 2**31 - 1


def spec(family: str, **options: Any) -> jkv.PoolSpec:
    pool_class, dims = FAMILIES[family]
    return jkv.PoolSpec(pool_class, **{"layer_num": 2} | dims | options)


def bytes_on_a_device(pool: Any) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(pool))


@pytest.mark.parametrize(
    ("dtype", "llama", "deepseek"),
    [("float32", 262_144, 140_544), ("bfloat16", 131_072, 70_272), ("float8_e5m2", 65_536, 35_136)],
)
def test_a_token_of_known_models_takes_the_bytes_that_one_counts_by_hand(dtype, llama, deepseek):
    # 32 layers x 2 (K and V) x 8 heads x 128, and 61 layers x 576, times the bytes of an element
    assert jkv.bytes_per_token(jkv.PoolSpec(jkv.MHATokenToKVPool, dtype=dtype, **LLAMA_3_8B)) == llama
    assert jkv.bytes_per_token(jkv.PoolSpec(jkv.MLATokenToKVPool, dtype=dtype, **DEEPSEEK_V3)) == deepseek


def test_scales_count():
    llama = jkv.PoolSpec(jkv.MHATokenToKVPoolFP4, **LLAMA_3_8B)
    assert jkv.bytes_per_token(llama) == 32 * 2 * 8 * (64 + 8)  # 4-bit codes, and a byte for every 16
    deepseek = jkv.PoolSpec(jkv.MLATokenToKVPoolFP4, **DEEPSEEK_V3)
    assert jkv.bytes_per_token(deepseek) == 61 * (288 + 36)
    packed = jkv.PoolSpec(jkv.DSATokenToKVPool, **DEEPSEEK_V3)
    assert jkv.bytes_per_token(packed) == 61 * 656


@pytest.mark.parametrize("stacked", [False, True])
def test_heads_are_split_over_tp_and_latent_rows_are_replicated(stacked):
    place = {"mesh": AbstractMesh((8, 4), ("dcp", "tp")), "dcp_axis": "dcp", "tp_axis": "tp", "stacked": stacked}
    llama = jkv.PoolSpec(jkv.MHATokenToKVPool, dtype="bfloat16", **LLAMA_3_8B, **place)
    deepseek = jkv.PoolSpec(jkv.MLATokenToKVPool, dtype="bfloat16", **DEEPSEEK_V3, **place)
    assert (jkv.bytes_per_token(llama), jkv.bytes_per_token(llama, per_rank=True)) == (131_072, 32_768)
    assert (jkv.bytes_per_token(deepseek), jkv.bytes_per_token(deepseek, per_rank=True)) == (70_272, 70_272)


def test_what_fits_is_what_one_counts_by_hand():
    deepseek = jkv.PoolSpec(jkv.MLATokenToKVPool, dtype="bfloat16", **DEEPSEEK_V3)
    # 100e9 // (64 * 70272) = 22235 pages, one of them padding
    fit = jkv.max_tokens(100 * 10**9, deepseek, page_size=64, dcp_size=8)
    assert fit == jkv.Capacity(22_234 * 64, 8 * 22_234 * 64, 22_235 * 64 * 70_272, "memory")


@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"])
@pytest.mark.parametrize("place", ["no mesh", (4, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pool_that_fits_exists_and_one_page_more_does_not_fit(family, place, stacked):
    options = {} if place == "no mesh" else on(*place)
    planned = spec(family, stacked=stacked, **options)
    page_size, memory = 4, 12_345
    fit = jkv.max_tokens(memory, planned, page_size=page_size)
    pool = planned.create(fit.per_rank, page_size)
    assert bytes_on_a_device(pool) == fit.bytes_per_rank <= memory
    assert bytes_on_a_device(planned.create(fit.per_rank + page_size, page_size)) > memory
    assert (fit.per_rank, fit.aggregate) == (pool.slots.size, pool.slots.capacity)
    assert jkv.bytes_per_token(pool) == jkv.bytes_per_token(planned)
    assert pool.kv_size_bytes == jkv.bytes_per_token(pool) * pool.slots.bound
    assert bytes_on_a_device(pool) == jkv.bytes_per_token(pool, per_rank=True) * pool.slots.rows
    assert jkv.max_tokens(memory, pool, page_size=page_size) == fit


@settings(max_examples=60)
@given(data=st.data())
def test_abstract_pools_of_any_size_and_mesh_agree(data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    tp, dcp, page_size, memory = draw(1, 4), draw(1, 16), draw(1, 128), draw(10**6, 10**12)
    place = {"mesh": AbstractMesh((tp, dcp), ("t", "d")), "dcp_axis": "d", "tp_axis": "t"}
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    unit = {"mha_fp4": 16, "mla_fp4": 16, "dsa": 128}.get(family, 1)
    if family.startswith("mha"):
        split, dims = tp, {"head_num": tp * draw(1, 4), "head_dim": unit * draw(1, 8), "v_head_dim": unit * draw(1, 8)}
    else:
        split, dims = 1, {"kv_lora_rank": unit * draw(1, 8), "qk_rope_head_dim": unit * draw(1, 4)}
    if family in ("mha", "mla"):
        dims["dtype"] = data.draw(st.sampled_from(["float32", "float16", "float8_e4m3fn"]))
    planned = spec(family, layer_num=draw(1, 3), **dims, **place)
    fit = jkv.max_tokens(memory, planned, page_size=page_size)
    pool = planned.abstract(fit.per_rank, page_size)
    assert pool.kv_size_bytes == jkv.bytes_per_token(pool) * pool.slots.bound
    assert pool.kv_size_bytes == fit.bytes_per_rank * dcp * split
    assert (fit.per_rank, fit.aggregate) == (pool.slots.size, pool.slots.capacity)
    assert fit.bytes_per_rank <= memory
    one_more = fit.bytes_per_rank + page_size * jkv.bytes_per_token(pool, per_rank=True)
    if fit.limit == "memory":
        assert one_more > memory
    else:
        assert one_more <= memory
        assert pool.slots.bound <= INT32_MAX < pool.slots.bound + page_size * dcp


def test_any_abstract_pool_serves_as_a_spec():
    pool = jax.eval_shape(lambda: jkv.MHATokenToKVPool.create(size=4, page_size=4, dtype="bfloat16", **LLAMA_3_8B))
    planned = jkv.PoolSpec(jkv.MHATokenToKVPool, dtype="bfloat16", **LLAMA_3_8B)
    assert jkv.max_tokens(10**9, pool, page_size=16) == jkv.max_tokens(10**9, planned, page_size=16)


def test_a_spec_makes_no_arrays_but_a_create_does():
    planned = spec("mla", **on(2))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(planned.abstract(8, 4)))
    assert planned.create(8, 4).layout == planned.abstract(8, 4).layout
    assert not any(leaf.any() for leaf in jax.tree.leaves(planned.create(8, 4)))


def test_an_interleaved_spec_needs_a_page_that_it_divides():
    planned = spec("mha", interleave=4, **on(2))
    assert jkv.max_tokens(10_000, planned, page_size=8).per_rank == 144  # 10000 // (8 * 64) - 1 = 18 pages
    with pytest.raises(ValueError, match="interleave 4 must divide page_size 6"):
        jkv.max_tokens(10_000, planned, page_size=6)


def test_what_a_token_takes_beside_the_pool_counts_but_is_not_the_pools():
    planned = spec("mla")  # 2 layers x 8 x 2 bytes
    fit = jkv.max_tokens(4_800, planned, page_size=4, extra_bytes_per_token=16)
    assert fit == jkv.Capacity(96, 96, 100 * 32, "memory")


def test_slot_ids_in_int32_cap_what_fits():
    planned = jkv.PoolSpec(jkv.MLATokenToKVPool, dtype="float8_e4m3fn", **MLA, layer_num=1)
    fit = jkv.max_tokens(10**12, planned, page_size=64, dcp_size=2)
    assert fit.limit == "int32"
    assert fit.aggregate + 2 * 64 <= INT32_MAX < fit.aggregate + 4 * 64
    assert fit.bytes_per_rank == (fit.per_rank + 64) * 8
    jkv.SlotSpace(fit.per_rank, 64, 2)
    with pytest.raises(ValueError, match="do not fit int32"):
        jkv.SlotSpace(fit.per_rank + 64, 64, 2)
    with pytest.raises(ValueError, match="do not fit int32; enable x64"):
        jkv.max_tokens(10**15, planned, page_size=2**20, dcp_size=2**11)
    with jax.enable_x64(True):
        assert jkv.max_tokens(10**12, planned, page_size=64, dcp_size=2).limit == "memory"


@pytest.mark.parametrize("memory", [-1, 0, 255, 511])
def test_memory_for_less_than_a_page_says_what_one_needs(memory):
    need = "one page of 4 tokens and the padding page take 512 bytes on a device"
    with pytest.raises(ValueError, match=f"max_tokens: memory_bytes {memory} hold no token: {need}"):
        jkv.max_tokens(memory, spec("mha"), page_size=4)
    assert jkv.max_tokens(512, spec("mha"), page_size=4).per_rank == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"memory_bytes": 1e9}, "memory_bytes must be an integer, got 1000000000.0"),
        ({"page_size": 0}, "page_size must be a positive integer, got 0"),
        ({"dcp_size": 0}, "dcp_size must be a positive integer, got 0"),
        ({"extra_bytes_per_token": -1}, "extra_bytes_per_token must be a non-negative integer, got -1"),
        ({"spec": "llama"}, "max_tokens: expected a pool, an abstract pool or a jkv.PoolSpec, got 'llama'"),
        ({"spec": spec("mha", mesh=AbstractMesh((2,), ("d",)), dcp_axis="d"), "dcp_size": 4}, "mesh has 2"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        jkv.max_tokens(**{"memory_bytes": 10**9, "spec": spec("mha"), "page_size": 4} | wrong)


def test_bytes_per_token_wants_a_pool():
    with pytest.raises(
        ValueError, match=r"bytes_per_token: expected a pool, an abstract pool or a jkv.PoolSpec, got 3"
    ):
        jkv.bytes_per_token(3)


@pytest.mark.parametrize("pool_class", [dict, "MHATokenToKVPool", jkv.MHATokenToKVPool.__base__])
def test_a_spec_wants_a_pool_class(pool_class):
    with pytest.raises(ValueError, match=r"PoolSpec: expected a pool class such as jkv.MHATokenToKVPool, got"):
        jkv.PoolSpec(pool_class)


@pytest.mark.parametrize("name", ["size", "page_size"])
def test_a_spec_has_no_size(name):
    with pytest.raises(ValueError, match=f"PoolSpec: {name} is no part of a spec"):
        spec("mha", **{name: 4})


def test_a_spec_is_checked_when_it_is_made():
    with pytest.raises(ValueError, match="MHATokenToKVPool: head_num 2 must be divisible by the 4 ranks"):
        spec("mha", mesh=mesh(1, 4), tp_axis="tp")
    with pytest.raises(TypeError, match="rope"):
        spec("mla", rope=3)


def test_a_spec_is_a_key():
    place = {"mesh": AbstractMesh((2,), ("dcp",)), "dcp_axis": "dcp"}
    assert {spec("mha", **place): "here"}[spec("mha", **place)] == "here"
    assert spec("mha") != spec("mha", **place)
