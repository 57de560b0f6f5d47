"""What a compiled step needs: every buffer of a donated pool aliased, and temporary bytes that ignore its size."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from small_pools import mesh, mha, mla, on, rows

import jkv

N = 4
LOC, SRC = np.arange(20, 20 + N, dtype=np.int32), np.arange(22, 22 + N, dtype=np.int32)
SIZES = (512, 4096)
DIMS = {"mha": {"head_num": 2, "head_dim": 8, "v_head_dim": 6}, "mla": {"kv_lora_rank": 12, "qk_rope_head_dim": 4}}

# door -> (family, step of pool, layer, ids). The rows are constants: their bytes are no part of what is measured.
WRITES = {
    "set_kv_buffer (MHA)": ("mha", lambda pool, layer, loc: pool.set_kv_buffer(layer, loc, *_mha_rows(pool))),
    "set_kv_buffer (MLA)": ("mla", lambda pool, layer, loc: pool.set_kv_buffer(layer, loc, rows(N, 1, 16))),
    "set_mla_kv_buffer (MLA)": (
        "mla",
        lambda pool, layer, loc: pool.set_mla_kv_buffer(layer, loc, rows(N, 1, 12), rows(N, 1, 4)),
    ),
    "move_kv_cache (MHA)": ("mha", lambda pool, layer, loc: pool.move_kv_cache(loc, SRC)),
    "move_kv_cache (MLA)": ("mla", lambda pool, layer, loc: pool.move_kv_cache(loc, SRC)),
}
READS = {
    "get_kv (MHA)": ("mha", lambda pool, layer, loc: pool.get_kv(layer, loc)),
    "get_kv (MLA)": ("mla", lambda pool, layer, loc: pool.get_kv(layer, loc)),
    "get_mla_kv_buffer (MLA)": ("mla", lambda pool, layer, loc: pool.get_mla_kv_buffer(layer, loc)),
}


def _mha_rows(pool: Any) -> list[np.ndarray]:
    return [rows(N, 2, 8), rows(N, 2, 6)]


def new_pool(family: str, dtype: Any, stacked: bool, context: str, size: int) -> Any:
    place = {} if context == "no mesh" else on(4)
    new = mha if family == "mha" else mla
    return new(size=size, page_size=64, dtype=dtype, layer_num=2, stacked=stacked, **DIMS[family], **place)


def memory(step: Any, pool: Any, stacked: bool, context: str, *, writes: bool) -> Any:
    """What the compiler says of a step that takes the pool, a (traced, where it is stacked) layer and ids."""
    if context == "caller's shard_map":
        specs = pool.partition_specs()
        shard = functools.partial(jax.shard_map, mesh=mesh(4), in_specs=(specs, P(), P()))
        inner, out_specs = step, specs if writes else P(None, "tp" if hasattr(pool, "k_buffer") else None)
        step = shard(lambda pool, layer, loc: inner(pool, layer if stacked else 0, loc), out_specs=out_specs)
    elif not stacked:
        inner = step
        step = lambda pool, layer, loc: inner(pool, 0, loc)  # noqa: E731
    with jkv.enable_checks(False):
        lowered = jax.jit(step, donate_argnums=0 if writes else ()).lower(pool, np.int32(0), LOC)
        return lowered.compile().memory_analysis()


def bytes_per_device(pool: Any) -> int:
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool)
    )


every_kind_of_pool = [
    pytest.mark.parametrize("context", ["no mesh", "mesh", "caller's shard_map"]),
    pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"]),
    pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"]),
]


def on_every_kind_of_pool(test):
    # K05: a donated pool is updated in place in every layout, also on one device
    for mark in every_kind_of_pool:
        test = mark(test)
    return test


@on_every_kind_of_pool
@pytest.mark.parametrize("door", WRITES)
def test_a_donated_write_aliases_the_whole_pool_and_its_temporaries_ignore_the_size(door, dtype, stacked, context):
    family, step = WRITES[door]
    temporary = []
    for size in SIZES:
        pool = new_pool(family, dtype, stacked, context, size)
        needed = memory(step, pool, stacked, context, writes=True)
        assert needed.alias_size_in_bytes == bytes_per_device(pool)
        temporary.append(needed.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@on_every_kind_of_pool
@pytest.mark.parametrize("door", READS)
def test_the_temporaries_of_a_read_ignore_the_size_of_the_pool(door, dtype, stacked, context):
    family, step = READS[door]
    temporary = [
        memory(step, new_pool(family, dtype, stacked, context, size), stacked, context, writes=False).temp_size_in_bytes
        for size in SIZES
    ]
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("context", ["no mesh", "mesh"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"])
def test_a_host_copy_is_restored_into_a_donated_pool_in_place(stacked, dtype, context):
    temporary = []
    for size in SIZES:
        pool = new_pool("mha", dtype, stacked, context, size)
        host = pool.get_cpu_copy(LOC)
        step = lambda pool, layer, loc, host=host: pool.load_cpu_copy(host, loc)  # noqa: E731
        needed = memory(step, pool, stacked, context, writes=True)
        assert needed.alias_size_in_bytes == bytes_per_device(pool)
        temporary.append(needed.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("context", ["no mesh", "mesh"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_scan_over_the_layers_carries_the_pool_in_place(dtype, context):
    def step(pool, layer, loc):
        def one(pool, layer):
            pool = pool.set_kv_buffer(layer, loc, *_mha_rows(pool))
            return pool, pool.get_kv(layer, loc)[0].astype(jnp.float32).sum()

        return jax.lax.scan(one, pool, jnp.arange(2) + layer)[0]

    temporary = []
    for size in SIZES:
        pool = new_pool("mha", dtype, True, context, size)
        needed = memory(step, pool, True, context, writes=True)
        assert needed.alias_size_in_bytes == bytes_per_device(pool)
        temporary.append(needed.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "float32"])
def test_scatter_rows_writes_a_donated_cache_of_words_in_place(dtype):
    temporary = []
    for size in SIZES:
        cache = jnp.zeros((size, 2, 8), dtype)
        step = lambda cache, layer, loc: jkv.scatter_rows(cache, loc, rows(N, 2, 8).astype(dtype))  # noqa: E731
        needed = memory(step, cache, True, "no mesh", writes=True)
        assert needed.alias_size_in_bytes == cache.nbytes
        temporary.append(needed.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_with_checks_on_a_donated_write_is_still_in_place(dtype):
    family, step = WRITES["set_kv_buffer (MHA)"]
    temporary = []
    for size in SIZES:
        pool = new_pool(family, dtype, False, "mesh", size)
        checked = jkv.checked_jit(lambda pool, loc: step(pool, 0, loc), donate_argnums=0)
        needed = checked.lower(pool, LOC).compile().memory_analysis()
        assert needed.alias_size_in_bytes == bytes_per_device(pool)
        temporary.append(needed.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


def test_the_same_buffer_for_k_and_v_is_never_made_and_is_refused_when_donated():
    # K05: two names for one array would be donated twice
    pool = mha(layer_num=2)
    addresses = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)}
    assert len(addresses) == 4
    twin = jax.tree.unflatten(jax.tree.structure(pool), [pool.k_buffer[0]] * 4)
    write = jkv.checked_jit(
        lambda pool: pool.set_kv_buffer(0, LOC - 15, rows(N, 2, 4), rows(N, 2, 4)), donate_argnums=0
    )
    with pytest.raises(Exception, match="donate"):
        jax.block_until_ready(write(twin))
