"""One door, everywhere a model may call it from: the same rows, whatever mesh, shard_map or trace is around it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_pools import ids, mesh, mha, mla, on, row_of, rows, same, words, write

import jkv

LOC = ids(0, 17, 47, 20, 9)
K, V = rows(5, 2, 4), rows(5, 2, 4, start=9)


def step(pool, loc, k, v):
    pool = pool.set_kv_buffer(0, loc, k, v)
    return pool, pool.get_kv(0, loc)


def expected_words(pool):
    for slot, k, v in list(zip(LOC, K, V, strict=True))[1:]:
        np.testing.assert_array_equal(row_of(pool, slot)[0].view(np.float32), k)
        np.testing.assert_array_equal(row_of(pool, slot)[1].view(np.float32), v)
    assert sum(np.count_nonzero(w) for w in words(pool)) == 2 * 4 * 8


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("set_mesh", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_under_jit_eagerly_and_in_a_callers_shard_map(axis_type, set_mesh, stacked):
    m = mesh(4, 2, axis_type)
    pool = mha(**on(4, 2, axis_type), stacked=stacked)
    if stacked:  # row_of looks at one layer's arrays
        unstack = lambda p: dataclasses.replace(p, k_buffer=tuple(p.k_buffer), v_buffer=tuple(p.v_buffer))  # noqa: E731
    else:
        unstack = lambda p: p  # noqa: E731
    heads = NamedSharding(m, P(None, "tp"))
    args = LOC, jax.device_put(K, heads), jax.device_put(V, heads)

    def run(fn):
        if set_mesh:
            with jax.set_mesh(m):
                return fn(pool, *args)
        return fn(pool, *args)

    specs = pool.partition_specs()
    functions = [step, jkv.checked_jit(step)]
    for check_vma in (True, False):
        inside = jax.shard_map(
            step,
            mesh=m,
            in_specs=(specs, P(), P(None, "tp"), P(None, "tp")),
            out_specs=(specs, P(None, "tp")),
            check_vma=check_vma,
        )
        functions.append(jkv.checked_jit(inside))
    for fn in functions:
        new, (k, v) = run(fn)
        expected_words(unstack(new))
        np.testing.assert_array_equal(np.asarray(k)[1:], K[1:])
        np.testing.assert_array_equal(np.asarray(v)[1:], V[1:])
        assert not np.asarray(k)[0].any()
    jkv.wait_for_checks()


def test_in_a_shard_map_over_the_dcp_axis_alone():
    pool = mha(**on(4, 2))
    over_dcp = jax.tree.map(lambda s: P(s[0]), pool.partition_specs(), is_leaf=lambda x: isinstance(x, P))
    inside = jax.shard_map(
        step, mesh=mesh(4, 2), in_specs=(over_dcp, P(), P(), P()), out_specs=(over_dcp, P()), axis_names={"dcp"},
        check_vma=False,
    )  # fmt: skip
    new, (k, _) = jkv.checked_jit(inside)(pool, LOC, K, V)
    expected_words(new)
    np.testing.assert_array_equal(np.asarray(k)[1:], K[1:])


def test_in_a_shard_map_over_the_tp_axis_alone():
    pool = mha(**on(4, 2))
    over_tp = jax.tree.map(lambda s: P(None, s[1]), pool.partition_specs(), is_leaf=lambda x: isinstance(x, P))
    heads = P(None, "tp")
    inside = jax.shard_map(
        step, mesh=mesh(4, 2), in_specs=(over_tp, P(), heads, heads), out_specs=(over_tp, heads), axis_names={"tp"},
        check_vma=False,
    )  # fmt: skip
    new, (k, _) = jkv.checked_jit(inside)(pool, LOC, K, V)
    expected_words(new)
    np.testing.assert_array_equal(np.asarray(k)[1:], K[1:])


def test_a_pool_that_comes_in_whole_is_refused():
    pool = mha(**on(4))
    inside = jax.shard_map(lambda p: p.get_kv(0, LOC), mesh=mesh(4), in_specs=P(), out_specs=P(), check_vma=False)
    message = r"get_kv \(MHA\): k_buffer has shape \(48, 2, 4\) here, expected \(12, 2, 4\); pass the pool in and out"
    with pytest.raises(ValueError, match=message):
        jkv.checked_jit(inside)(pool)


def test_a_mesh_with_axes_that_the_pool_does_not_use():
    m = jax.make_mesh((2, 2, 2), ("data", "dcp", "tp"), axis_types=(AxisType.Auto,) * 3)
    pool = mha(size=32, mesh=m, dcp_axis="dcp", tp_axis="tp")
    expected_words(jkv.checked_jit(step)(pool, LOC, K, V)[0])
    # Rows that arrive sharded over the batch are gathered, not mixed up.
    batch = jax.device_put(K[:4], NamedSharding(m, P("data")))
    new = jkv.checked_jit(lambda p, k: p.set_kv_buffer(0, LOC[:4], k, k))(pool, batch)
    np.testing.assert_array_equal(row_of(new, 47)[0].view(np.float32), K[2])


def test_the_dcp_axis_may_be_several():
    m = jax.make_mesh((2, 4), ("pcp", "dcp"), axis_types=(AxisType.Auto,) * 2)
    pool = mla(mesh=m, dcp_axis=("pcp", "dcp"))
    assert pool.slots.dcp_size == 8
    new = write(pool, ids(21, 90))
    assert new.kv_buffer[0].sharding.spec == P(("pcp", "dcp"))
    np.testing.assert_array_equal(row_of(new, 90)[0].view(np.float32), rows(2, 1, 8)[1])


def test_heads_are_split_and_latent_rows_replicated_over_tp():
    k = mha(**on(2, 2)).k_buffer[0]
    assert {shard.data.shape for shard in k.addressable_shards} == {(12, 1, 4)}
    kv = mla(**on(2, 2)).kv_buffer[0]
    assert {shard.data.shape for shard in kv.addressable_shards} == {(12, 1, 8)}
    new = write(mla(**on(2, 2)), ids(5, 6))
    copies = [np.asarray(s.data) for s in new.kv_buffer[0].addressable_shards if s.index[0].start in (0, None)]
    assert len(copies) == 2
    np.testing.assert_array_equal(*copies)


def test_an_abstract_pool_is_made_on_devices_that_do_not_exist():
    abstract = jax.sharding.AbstractMesh((16, 4), ("dcp", "tp"))
    pool = jax.eval_shape(
        lambda: mha(size=1 << 20, page_size=64, mesh=abstract, dcp_axis="dcp", tp_axis="tp", head_num=8)
    )
    assert pool.k_buffer[0].shape == (16 * ((1 << 20) + 64), 8, 4)
    assert pool.slots.dcp_size == 16
    with pytest.raises(ValueError, match="an AbstractMesh has no devices"):
        mha(mesh=abstract, dcp_axis="dcp")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_create_may_be_traced(axis_type):
    m = mesh(4, 2, axis_type)
    with jax.set_mesh(m):
        pool = jax.jit(lambda: mha(**on(4, 2, axis_type)))()
    assert {shard.data.shape for shard in pool.k_buffer[0].addressable_shards} == {(12, 1, 4)}


def test_a_scan_over_layers_carries_a_stacked_pool():
    pool = mha(**on(4, 2), stacked=True, layer_num=3, start_layer=5)

    def body(pool, layer):
        pool = pool.set_kv_buffer(layer, LOC, K + layer, V)
        return pool, pool.get_kv(layer, LOC)[0]

    pool, read = jkv.checked_jit(lambda p: jax.lax.scan(body, p, jnp.arange(5, 8)))(pool)
    for i in range(3):
        np.testing.assert_array_equal(np.asarray(read[i])[1:], K[1:] + 5 + i)
        np.testing.assert_array_equal(np.asarray(pool.get_kv(5 + i, LOC)[0])[1:], K[1:] + 5 + i)


@pytest.mark.parametrize("layer", [4, 8, -1])
def test_a_traced_layer_out_of_range_is_dropped_read_as_zero_and_reported(layer):
    pool = mha(stacked=True, layer_num=3, start_layer=5)
    pool = write(pool, ids(5), layer=5)

    def f(pool, layer):
        new = pool.set_kv_buffer(layer, ids(6), K[:1], V[:1])
        return new, pool.get_kv(layer, ids(5)), pool.get_kv_buffer(layer)

    with jkv.enable_checks(False):
        new, read, whole = jax.jit(f)(pool, layer)
    assert same(new, pool)
    assert not any(np.asarray(x).any() for x in (*read, *whole))
    checked = jkv.checked_jit(f, raise_sync=True)
    with pytest.raises(jkv.KVIndexError, match=rf"set_kv_buffer \(MHA\): layer {layer} outside \[5, 8\)"):
        checked(pool, layer)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_an_exported_step_takes_the_pool_of_another_mesh(axis_type):
    def put(pool):
        return pool.set_kv_buffer(0, LOC, K, V)

    pool = mha(**on(4, 2, axis_type))
    with jkv.enable_checks(False):
        exported = export.export(jax.jit(put), disabled_checks=jkv.export_disabled_checks())(pool)
        loaded = export.deserialize(exported.serialize())
        reversed_mesh = jax.sharding.Mesh(
            np.array(jax.devices()[::-1]).reshape(4, 2), ("dcp", "tp"), axis_types=(axis_type,) * 2
        )
        there = mha(mesh=reversed_mesh, dcp_axis="dcp", tp_axis="tp")
        new = loaded.call(there)
    assert isinstance(new, jkv.MHATokenToKVPool)
    assert new.layout == pool.layout
    expected_words(new)
    assert new.k_buffer[0].sharding.mesh == reversed_mesh
    expected_words(put(there))


def test_eager_doors_compile_once_for_all_layers():
    pool = mla(**on(2), layer_num=4)
    from jkv.pools import programs

    write(pool, ids(5, 6))
    before = programs.store._cache_size()
    for layer in range(4):
        write(pool, ids(7, 8), layer=layer)
    assert programs.store._cache_size() == before


def test_repr_is_one_line_that_tells_the_pool():
    text = repr(mha(**on(4, 2), dtype=jnp.bfloat16, layer_num=3, start_layer=2))
    assert "\n" not in text
    for part in ("MHATokenToKVPool", "bfloat16", "3 layers from 2", "size=8", "page_size=4", "dcp_size=4", "MB"):
        assert part in text


def test_running_out_of_memory_names_buffer_layer_shape_and_bytes(monkeypatch):
    from jkv import layout

    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(layout, "_zeros", refuse)
    with pytest.raises(MemoryError, match=r"no memory for k_buffer of layer 3: \(12, 2, 4\) uint32, .* GB in all"):
        mha(start_layer=3)


def test_sizes_are_those_of_the_arrays():
    for pool in (
        mha(**on(4, 2), layer_num=3),
        mha(**on(4, 2), layer_num=3, stacked=True),
        mla(**on(4, 2), layer_num=2),
    ):
        assert pool.kv_size_bytes == sum(x.nbytes for x in jax.tree.leaves(pool))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("constant_ids", [False, True])
def test_of_two_findings_in_a_scan_the_earlier_is_told(axis_type, constant_ids):
    # Probes of ids, rows and layers in one program: on an Explicit mesh only some of their operands lay on the mesh.
    pool = mla(layer_num=2, stacked=True, **on(2, 1, axis_type))
    x = rows(2, 3, 1, 8)
    x[0, 1, 0, 2] = np.nan
    loc = np.array([[1, 2, 3], [4, 5, 6]], np.int32)

    def write(pool, layers, loc, x):
        def layer(pool, given):
            return pool.set_kv_buffer(given[0], np.array([1, 2, 3]) if constant_ids else given[1], given[2]), None

        return jax.lax.scan(layer, pool, (layers, loc, x))[0]

    with jkv.enable_checks(), pytest.raises(jkv.KVIndexError, match=r"layer 0: 1 of 3 rows of cache_k hold NaN"):
        jkv.checked_jit(write, raise_sync=True)(pool, np.array([0, -1], np.int32), loc, x)
    x[0], loc[0, 2] = 1, 99
    if not constant_ids:
        with jkv.enable_checks(), pytest.raises(jkv.KVIndexError, match=r"layer 0: 1 of 3 slot ids outside"):
            jkv.checked_jit(write, raise_sync=True)(pool, np.array([0, 7], np.int32), loc, x)


def test_rows_are_resharded_over_an_explicit_axis_that_the_callers_shard_map_leaves():
    m = mesh(2, 2, AxisType.Explicit)
    pool = mha(**on(2, 2, AxisType.Explicit))
    over_dcp = jax.tree.map(lambda s: P(s[0]), pool.partition_specs(), is_leaf=lambda x: isinstance(x, P))
    inside = jax.shard_map(
        lambda pool, k, v: pool.set_kv_buffer(0, ids(17, 20), k, v), mesh=m, in_specs=(over_dcp, P(), P()),
        out_specs=over_dcp, axis_names={"dcp"},
    )  # fmt: skip
    with jax.set_mesh(m):
        k, v = (jax.device_put(x[1:3], NamedSharding(m, P())) for x in (K, V))
        got = jkv.checked_jit(inside)(pool, k, v)
    assert same(got, pool.set_kv_buffer(0, ids(17, 20), K[1:3], V[1:3]))
