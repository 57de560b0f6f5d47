"""Corners of the contract that only a hostile caller visits: wide spaces, mixed meshes, varying ids, odd arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_pools import ids, mesh, mha, mla, on, row_of, rows, same, write

import jkv

LOC, K = ids(5, 6), rows(2, 2, 4)


def test_int32_ids_of_a_space_that_passes_int32():
    with jax.enable_x64(True):
        space = jkv.SlotSpace(2**30, 1, 4)
        for array in (np.asarray, jnp.asarray):
            np.testing.assert_array_equal(space.localize(array(ids(5)), 1), [1])
            np.testing.assert_array_equal(space.slot(array(ids(2**30)), 3), [2**32 + 3])
        written = jkv.scatter_rows(
            jnp.zeros((2**20, 1), jnp.uint8), ids(5), np.ones((1, 1), np.uint8), dcp_size=4096, dcp_rank=5
        )
        assert np.asarray(written).sum() == written[0, 0] == 1
    with pytest.raises(ValueError, match="scatter_rows: slot ids of 1048576 rows on 4096 ranks do not fit int32"):
        jkv.scatter_rows(jnp.zeros((2**20, 1), jnp.uint8), ids(5), np.ones((1, 1), np.uint8), dcp_size=4096)


@pytest.mark.parametrize("opened", ["dcp", "tp"])
@pytest.mark.parametrize("check_vma", [False, True])
def test_a_loop_in_a_shard_map_over_some_of_the_axes(opened, check_vma):
    pool = mha(**on(2, 2))
    keep = lambda s: P(*(part if opened in (part if isinstance(part, tuple) else (part,)) else None for part in s))  # noqa: E731
    specs = jax.tree.map(keep, pool.partition_specs(), is_leaf=lambda x: isinstance(x, P))
    heads = P(None, "tp") if opened == "tp" else P()

    def loop(pool, k):
        return lax.fori_loop(0, 2, lambda i, p: p.set_kv_buffer(0, LOC, k + i, k), pool)

    inside = jax.shard_map(
        loop, mesh=mesh(2, 2), in_specs=(specs, heads), out_specs=specs, axis_names={opened}, check_vma=check_vma
    )
    with jkv.enable_checks(False):
        assert same(jax.jit(inside)(pool, K), pool.set_kv_buffer(0, LOC, K + 1, K))


def test_what_varies_over_an_axis_of_the_caller_stays_so():
    m = jax.make_mesh((2, 2), ("dcp", "data"), axis_types=(AxisType.Auto,) * 2)
    pool = mha(mesh=m, dcp_axis="dcp")
    whole = jax.tree.map(lambda _: P(), pool.partition_specs(), is_leaf=lambda x: isinstance(x, P))

    def read(out_specs):
        return jax.shard_map(
            lambda p, loc: p.get_kv(0, loc)[0],
            mesh=m,
            in_specs=(whole, P("data")),
            out_specs=out_specs,
            axis_names={"data"},
        )

    with jkv.enable_checks(False):
        assert jax.jit(read(P("data")))(pool, jnp.arange(4, 8)).shape == (4, 2, 4)
        with pytest.raises(ValueError, match="out_specs"):
            jax.jit(read(P()))(pool, jnp.arange(4, 8))


def test_a_dcp_axis_of_one_rank_in_a_callers_shard_map():
    for pool, heads in ((write(mha(**on(1, 2)), LOC), P(None, "tp")), (write(mla(**on(1, 2)), LOC), P())):
        read = jax.shard_map(
            lambda p: p.get_kv(0, LOC)[0], mesh=mesh(1, 2), in_specs=(pool.partition_specs(),), out_specs=heads
        )
        np.testing.assert_array_equal(jkv.checked_jit(read)(pool), pool.get_kv(0, LOC)[0])


@pytest.mark.parametrize("types", [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)])
def test_a_mesh_of_auto_and_explicit_axes(types):
    m = jax.make_mesh((2, 2), ("dcp", "tp"), axis_types=types)
    pool = mha(mesh=m, dcp_axis="dcp", tp_axis="tp")
    for new in (pool.set_kv_buffer(0, LOC, K, K), jkv.checked_jit(lambda p, k: p.set_kv_buffer(0, LOC, k, k))(pool, K)):
        np.testing.assert_array_equal(row_of(new, 5)[0].view(np.float32), K[0])


def test_a_traced_layer_that_int32_would_truncate_is_dropped():
    with jax.enable_x64(True), jkv.enable_checks(False):
        pool = mha(stacked=True, layer_num=2)
        new = jax.jit(lambda p, layer: p.set_kv_buffer(layer, LOC, K, K))(pool, jnp.int64(2**32 + 1))
    assert same(new, pool)


def test_a_device_array_of_ids_that_int32_would_truncate_is_refused():
    with jax.enable_x64(True):
        wide = jnp.array([2**32 + 5])
    with pytest.raises(ValueError, match=r"set_kv_buffer \(MHA\): loc holds id 4294967301, which does not fit int32"):
        mha().set_kv_buffer(0, wide, K[:1], K[:1])


def test_explicitly_sharded_ids_are_gathered_eagerly_too():
    m = mesh(2, 1, AxisType.Explicit)
    pool = mha(**on(2, 1, AxisType.Explicit))
    loc = jax.device_put(jnp.asarray(LOC), NamedSharding(m, P("dcp")))
    assert same(pool.set_kv_buffer(0, loc, K, K), pool.set_kv_buffer(0, LOC, K, K))
    assert same(pool.move_kv_cache(loc, loc), pool)


def test_ids_that_differ_between_dcp_ranks_are_refused_where_jax_can_tell():
    pool = mha(**on(2))
    specs = pool.partition_specs()
    read = jax.shard_map(
        lambda p, loc: p.get_kv(0, loc)[0], mesh=mesh(2), in_specs=(specs, P("dcp")), out_specs=P("dcp")
    )
    with pytest.raises(
        ValueError, match=r"get_kv \(MHA\): loc must be the same on all DCP ranks, it varies over \['dcp'\]"
    ):
        jkv.checked_jit(read)(pool, jnp.arange(4, 8))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mha(padding_slot=np.int64(-1)), ValueError, "padding_slot must be 0 or -1"),
        (lambda: mha(padding_slot=0.0), ValueError, "padding_slot must be 0 or -1, got 0.0"),
        (lambda: mha(start_layer=True), ValueError, "start_layer must be a non-negative integer, got True"),
        (lambda: mha(mesh="x"), ValueError, "mesh must be a jax Mesh, an AbstractMesh or None, got 'x'"),
        (lambda: mha(mesh=mesh(2), dcp_axis=3), ValueError, "must be distinct axes of the mesh"),
        (lambda: mha().get_kv(True, LOC), IndexError, "layer_id must be one integer, got True"),
        (lambda: mha().get_kv(0, [[1], [2, 3]]), ValueError, r"get_kv \(MHA\): loc must have shape \[N\]"),
        (lambda: mha().load_cpu_copy((1, 2), [5]), ValueError, "host must be what get_cpu_copy returned, got tuple"),
        (lambda: mha().get_kv(0, LOC, dst_dtype="foo"), ValueError, r"get_kv \(MHA\): dst_dtype must be a float dtype"),
        (lambda: mla().get_mla_kv_buffer(0, LOC, dst_dtype=int), ValueError, "dst_dtype must be a float dtype, got"),
        (
            lambda: mha(dtype="float8_e5m2").set_kv_buffer(0, LOC, K, K, k_scale="x"),
            ValueError,
            r"set_kv_buffer \(MHA\): k_scale must be a number or an array of one, got 'x'",
        ),
        (lambda: jkv.scatter_rows(jnp.zeros(()), [1], jnp.zeros(1)), ValueError, "cache must have rows, got shape"),
        (lambda: jkv.scatter_rows(jnp.zeros((0, 2)), [1], jnp.zeros((1, 2))), ValueError, "cache must have rows"),
        (lambda: jkv.scatter_rows(jnp.zeros(4), [1], jnp.zeros(1), dcp_rank=None), ValueError, "dcp_rank must be in"),
        (lambda: jkv.scatter_rows(jnp.zeros(4), [1], jnp.zeros(1), skip_slot="a"), ValueError, "skip_slot must be"),
        (
            lambda: jkv.local_rows(jkv.SlotSpace(8, 4, 2), np.zeros((1, 2), int), [3], 0),
            ValueError,
            r"local_rows: lens must be in \[0, 2\]",
        ),
        (
            lambda: jkv.local_page_table(jkv.SlotSpace(8, 4, 2), np.zeros((1, 2), int), [1, 1], 0),
            ValueError,
            r"local_page_table: table must be \[B, L\] and lens \[B\], got \(1, 2\) and \(2,\)",
        ),
        (
            lambda: jkv.local_rows(jkv.SlotSpace(8, 4, 2), np.array([[2**32 + 16, 17]]), jnp.array([2]), 0),
            ValueError,
            "local_rows: table holds id 4294967312, which does not fit int32",
        ),
    ],
)
def test_odd_arguments_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_numpy_integers_and_empty_lists_are_fine():
    assert mha(start_layer=np.int64(2)).start_layer == 2
    assert jkv.SlotSpace(8, 4, 2).localize([], 0).shape == (0,)
