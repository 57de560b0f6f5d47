"""Kinds of bugs that serving stacks had around the pool: donation, geometry, checks in programs, sharding, compilation.

The kind of each is in a comment: K05 donation, K06 geometry, K09 checks in programs, K10 sharding, K23 layers of a
pipeline stage, K28 memory and recompilation, K29 errors that vanish.
"""

import contextlib
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from small_pools import ids, mesh, mha, mla, on, row_of, rows, same, write

import jkv
from jkv.testing import assert_invariants, assert_pool_equals, model_like

# K05: donation.


@pytest.mark.parametrize(("dcp", "tp"), [(1, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_donated_pool_ends_as_an_undonated_one_does_and_lies_as_before(dcp, tp, stacked):
    def step(pool, loc):
        return write(pool, loc, layer=1).move_kv_cache(loc + 4, loc)

    pool = mha(layer_num=2, stacked=stacked, **on(dcp, tp))
    kept = jkv.checked_jit(step)(pool, ids(4, 5))
    donated = jkv.checked_jit(step, donate_argnums=0)(pool, ids(4, 5))
    assert same(kept, donated)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(pool))
    assert_invariants(donated)
    again = jkv.checked_jit(step, donate_argnums=0)(donated, ids(6, 7))
    assert_invariants(again)


def test_no_door_changes_shape_dtype_or_what_is_static():
    # K05: donation needs the same type going out as coming in, and so does a compiled step
    for pool in (mha(layer_num=2, **on(2)), mla(layer_num=2, stacked=True), mha(dtype=jnp.float8_e5m2)):
        loc = ids(5, 6)
        after = [write(pool, loc), pool.move_kv_cache(loc, loc), pool.load_cpu_copy(pool.get_cpu_copy(loc), loc)]
        for new in after:
            assert jax.tree.structure(new) == jax.tree.structure(pool)
            assert [jax.typeof(x) for x in jax.tree.leaves(new)] == [jax.typeof(x) for x in jax.tree.leaves(pool)]


# K06: geometry.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_stated_bytes_are_those_of_the_arrays_replicas_counted_once(dtype, stacked):
    for pool in (
        mha(dtype=dtype, stacked=stacked, layer_num=3, head_dim=96, v_head_dim=80),
        mha(dtype=dtype, stacked=stacked, layer_num=3, **on(2, 2)),
        mla(dtype=dtype, stacked=stacked, layer_num=3, **on(2, 2)),
    ):
        assert pool.kv_size_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(pool))
        assert_invariants(pool)


def test_the_widths_of_a_row_survive_a_round_trip_through_a_pytree():
    pool = mla(kv_lora_rank=512, qk_rope_head_dim=64)
    leaves, structure = jax.tree.flatten(pool)
    back = jax.tree.unflatten(structure, leaves)
    assert (back.kv_lora_rank, back.qk_rope_head_dim, back.slots) == (512, 64, pool.slots)
    assert back.kv_size_bytes == pool.kv_size_bytes
    assert len(repr(pool).splitlines()) == 1


# K09: checks wherever a model puts them.


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("set_mesh", [False, True])
@pytest.mark.parametrize("program", ["two doors", "scan", "inside and outside", "after the model's own shard_map"])
def test_one_bad_id_is_one_message_in_every_kind_of_program(axis_type, set_mesh, program):
    pool = mha(layer_num=2, stacked=True, **on(2, 2, axis_type))
    specs = pool.partition_specs()

    def inside(pool, loc):
        local = jax.shard_map(
            lambda pool, loc: pool.move_kv_cache(loc, loc),
            mesh=mesh(2, 2, axis_type),
            in_specs=(specs, P()),
            out_specs=specs,
        )
        return local(pool, loc)

    def step(pool, loc):
        if program == "two doors":
            return write(write(pool, loc), loc, layer=1)
        if program == "scan":
            return jax.lax.scan(lambda pool, layer: (write(pool, loc, layer), None), pool, jnp.arange(2))[0]
        if program == "inside and outside":
            return inside(write(inside(pool, ids(1, 2)), loc), loc)
        return write(inside(pool, ids(1, 2)), loc)

    checked = jkv.checked_jit(step, donate_argnums=0)
    with jax.set_mesh(mesh(2, 2, axis_type)) if set_mesh else contextlib.nullcontext():
        after = checked(pool, ids(5, 24))
        with pytest.raises(jkv.KVIndexError) as error:
            jkv.wait_for_checks()
        jkv.wait_for_checks()
    message = "set_kv_buffer (MHA), layer 0: 1 of 2 slot ids outside [0, 24) = (size 8 + page_size 4) * dcp_size 2"
    assert str(error.value) == f"{message}; min 5, max 24"
    assert row_of_stacked(after, 5).any()


def row_of_stacked(pool, loc):
    return np.asarray(pool.k_buffer)[0, loc % 2 * 12 + loc // 2]


# K10: sharding.


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("dcp", "tp"), [(4, 1), (2, 2), (4, 2), (1, 4)])
def test_a_pool_is_allocated_sharded_and_its_heads_are_never_silently_replicated(dcp, tp, axis_type):
    pool = mha(head_num=4, layer_num=2, dtype=jnp.bfloat16, **on(dcp, tp, axis_type))
    assert_invariants(pool)
    for leaf in jax.tree.leaves(pool):
        assert leaf.shape == (12 * dcp, 4, 4)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(12, 4 // tp, 4)}
        assert len(leaf.addressable_shards) == dcp * tp
    abstract = jax.eval_shape(lambda: mha(head_num=4, layer_num=2, dtype=jnp.bfloat16, **on(dcp, tp, axis_type)))
    assert jax.tree.structure(abstract) == jax.tree.structure(pool)


def test_heads_over_a_tp_axis_and_an_mla_row_on_every_one_of_it_agree_after_a_write():
    pool = write(mla(**on(2, 2)), ids(5, 6, 7))
    shards = {}
    for shard in pool.kv_buffer[0].addressable_shards:
        rank = shard.index[0].start
        np.testing.assert_array_equal(shards.setdefault(rank, np.asarray(shard.data)), np.asarray(shard.data))
    assert sorted(shards) == [0, 12]


def test_a_write_of_sharded_rows_works_on_an_explicit_mesh():
    # K10: where a plain gather or reshape of a sharded array is a type error
    grid = mesh(2, 2, AxisType.Explicit)
    pool = mha(**on(2, 2, AxisType.Explicit))
    k = jax.device_put(rows(3, 2, 4), jax.NamedSharding(grid, P(None, "tp")))
    after = jkv.checked_jit(lambda pool, k: pool.set_kv_buffer(0, ids(5, 6, 7), k, k))(pool, k)
    model = model_like(pool)
    model.set_kv_buffer(0, ids(5, 6, 7), rows(3, 2, 4), rows(3, 2, 4))
    assert_pool_equals(after, model)


# K23: pipeline stages.


@pytest.mark.parametrize("stacked", [False, True])
def test_a_stage_answers_for_its_own_layers_by_the_models_numbers(stacked):
    # K23: of 44 layers this stage has 21 to 43; what lies outside is in test_bad_input
    pool = mha(layer_num=23, start_layer=21, stacked=stacked)
    for layer in (21, 30, 43):
        pool = write(pool, ids(5), layer=layer, start=layer)
    for layer in (21, 30, 43):
        assert np.asarray(pool.get_kv(layer, ids(5))[0]).ravel()[0] == layer
        assert row_of(pool, 5, layer - 21)[0].view(np.float32).ravel()[0] == layer
    assert not np.asarray(pool.get_kv(22, ids(5))[0]).any()


def test_a_traced_layer_out_of_range_writes_nothing_reads_zeros_and_is_reported():
    pool = write(write(mha(layer_num=2, start_layer=4, stacked=True), ids(5), 4), ids(5), 5)
    step = jkv.checked_jit(
        lambda pool, layer: (write(pool, ids(6), layer), pool.get_kv(layer, ids(5))), raise_sync=True
    )
    for layer in (3, 6, -1, 2**31 - 1, -(2**31)):
        message = re.escape(f"set_kv_buffer (MHA): layer {layer} outside [4, 6)")
        with pytest.raises(jkv.KVIndexError, match=message) as error:
            step(pool, np.int32(layer))
        after, read = error.value.outputs
        assert same(pool, after)
        assert not any(np.asarray(part).any() for part in read)


# K28: memory and recompilation.


def test_a_pool_too_big_for_the_machine_says_which_layer_what_shape_and_how_much():
    with pytest.raises(MemoryError, match=r"k_buffer of layer 0: \(1073741828, 64, 65536\) uint32, \d+\.\d+ GB"):
        mha(2**30, 4, head_num=64, head_dim=65536)


def test_steps_of_any_number_of_tokens_up_to_a_fixed_one_are_traced_once():
    traced = []

    def step(pool, loc, k):
        traced.append(loc.shape)
        return pool.set_kv_buffer(0, loc, k, k)

    checked, pool = jkv.checked_jit(step, donate_argnums=0), mha(16, 4)
    model = model_like(pool)
    for n in range(1, 9):
        loc, k = jkv.pad_slots(np.arange(4, 4 + n, dtype=np.int32), 8), rows(8, 2, 4, start=n)
        pool = checked(pool, loc, k)
        model.set_kv_buffer(0, loc, k, k)
    assert traced == [(8,)]
    assert_pool_equals(pool, model)


def test_a_pools_leaves_are_its_buffers_and_nothing_that_changes_from_step_to_step_is_static():
    pool = mha(layer_num=2)
    assert len(jax.tree.leaves(pool)) == 4
    structures = {jax.tree.structure(write(pool, ids(loc))) for loc in (4, 5)}
    assert structures == {jax.tree.structure(pool)}
    assert hash(jax.tree.structure(pool)) == hash(jax.tree.structure(mha(layer_num=2)))


# K29: errors that vanish.


def test_bad_input_is_an_error_under_python_minus_o_too():
    script = """
import jax.numpy as jnp, numpy as np, jkv
assert False, "asserts are off"
pool = jkv.MHATokenToKVPool.create(size=8, page_size=4, dtype=jnp.float32, head_num=2, head_dim=4, layer_num=1)
k = np.ones((3, 2, 4), np.float32)
for call in (
    lambda: pool.set_kv_buffer(0, np.array([4, 5, 6]), k[:1], k),
    lambda: pool.set_kv_buffer(0, np.array([4.0, 5.0, 6.0]), k, k),
    lambda: pool.set_kv_buffer(7, np.array([4, 5, 6]), k, k),
    lambda: jkv.SlotSpace(10, 4),
):
    try:
        call()
    except (ValueError, TypeError, IndexError) as error:
        print(type(error).__name__)
"""
    root = pathlib.Path(__file__).parent.parent
    run = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert run.stdout.split() == ["ValueError", "TypeError", "IndexError", "ValueError"]
