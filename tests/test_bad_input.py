"""What each door says to arguments that cannot be meant: the type, and a message with door, argument and values."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_pools import ids, mesh, mha, mla, on, rows, write

import jkv

N = 3
K, V = rows(N, 2, 4), rows(N, 2, 4)
ROW, NOPE, ROPE = rows(N, 1, 8), rows(N, 1, 6), rows(N, 1, 2)
LOC = ids(4, 5, 6)

# door -> (pool, call with ids, name of the ids)
DOORS = {
    "set_kv_buffer (MHA)": (mha, lambda p, loc: p.set_kv_buffer(0, loc, K, V), "loc"),
    "set_kv_buffer (MLA)": (mla, lambda p, loc: p.set_kv_buffer(0, loc, ROW), "loc"),
    "set_mla_kv_buffer (MLA)": (mla, lambda p, loc: p.set_mla_kv_buffer(0, loc, NOPE, ROPE), "loc"),
    "get_kv (MHA)": (mha, lambda p, loc: p.get_kv(0, loc), "loc"),
    "get_kv (MLA)": (mla, lambda p, loc: p.get_kv(0, loc), "loc"),
    "get_mla_kv_buffer (MLA)": (mla, lambda p, loc: p.get_mla_kv_buffer(0, loc), "loc"),
    "move_kv_cache (MHA) tgt": (mha, lambda p, loc: p.move_kv_cache(loc, LOC), "tgt_loc"),
    "move_kv_cache (MHA) src": (mha, lambda p, loc: p.move_kv_cache(LOC, loc), "src_loc"),
    "move_kv_cache (MLA) tgt": (mla, lambda p, loc: p.move_kv_cache(loc, LOC), "tgt_loc"),
    "move_kv_cache (MLA) src": (mla, lambda p, loc: p.move_kv_cache(LOC, loc), "src_loc"),
    "get_cpu_copy (MHA)": (mha, lambda p, loc: p.get_cpu_copy(loc), "loc"),
    "get_cpu_copy (MLA)": (mla, lambda p, loc: p.get_cpu_copy(loc), "loc"),
    "load_cpu_copy (MHA)": (mha, lambda p, loc: p.load_cpu_copy(p.get_cpu_copy(LOC), loc), "loc"),
    "load_cpu_copy (MLA)": (mla, lambda p, loc: p.load_cpu_copy(p.get_cpu_copy(LOC), loc), "loc"),
    "scatter_rows": (mha, lambda p, loc: jkv.scatter_rows(jnp.zeros((12, 2, 4)), loc, K), "loc"),
    "pad_slots": (mha, lambda p, loc: jkv.pad_slots(loc, 8), "loc"),
}
TRACED = [door for door in DOORS if "cpu_copy" not in door]


def label(door: str) -> str:
    return door.removesuffix(" tgt").removesuffix(" src")


def says(*parts: object) -> str:
    """A pattern for a message that holds these parts, in this order."""
    return ".*".join(re.escape(str(part)) for part in parts)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", ["float32", "bool", "uint32", "uint8", "complex64"])
def test_ids_that_are_not_signed_integers_are_a_type_error(door, dtype):
    new, call, name = DOORS[door]
    with pytest.raises(TypeError, match=says(label(door), name, "signed integers", dtype)):
        call(new(), np.ones(N, dtype))
    with pytest.raises(TypeError, match=says(label(door), name, "signed integers", dtype)):
        call(new(), jnp.ones(N, dtype))


@pytest.mark.parametrize("door", TRACED)
def test_traced_ids_that_are_not_signed_integers_are_a_type_error_at_trace_time(door):
    new, call, name = DOORS[door]
    with pytest.raises(TypeError, match=says(label(door), name, "signed integers", "float32")):
        jkv.checked_jit(call).lower(new(), jnp.ones(N))


@pytest.mark.parametrize("door", DOORS)
def test_lists_of_floats_or_bools_are_a_type_error(door):
    new, call, name = DOORS[door]
    for bad, dtype in (([1.0, 2.0, 3.0], "float64"), ([True, False, True], "bool")):
        with pytest.raises(TypeError, match=says(label(door), name, "signed integers", dtype)):
            call(new(), bad)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("shape", [(), (N, 1), (1, N)])
def test_ids_that_are_not_one_dimensional_are_a_value_error(door, shape):
    new, call, name = DOORS[door]
    with pytest.raises(ValueError, match=says(label(door), name, "[N]", shape)):
        call(new(), np.ones(shape, np.int32))
    if door in TRACED:
        with pytest.raises(ValueError, match=says(label(door), name, "[N]", shape)):
            jkv.checked_jit(call).lower(new(), jnp.ones(shape, jnp.int32))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("bad", [2**32 + 5, 2**31, -(2**31) - 1])
def test_ids_that_int32_would_truncate_are_a_value_error(door, bad):
    new, call, name = DOORS[door]
    for loc in (np.array([4, bad, 6]), [4, bad, 6]):
        with pytest.raises(ValueError, match=says(label(door), name, bad, "int32")):
            call(new(), loc)
    if door in TRACED:  # also where the ids are a constant of a traced step
        with pytest.raises(ValueError, match=says(label(door), name, bad, "int32")):
            jkv.checked_jit(lambda pool: call(pool, np.array([4, bad, 6]))).lower(new())


@pytest.mark.parametrize("door", [door for door in DOORS if door not in ("get_cpu_copy (MHA)", "get_cpu_copy (MLA)")])
def test_more_or_fewer_ids_than_rows_are_a_value_error(door):
    new, call, _ = DOORS[door]
    if door == "pad_slots":
        with pytest.raises(ValueError, match=says("pad_slots", 9, 8)):
            jkv.pad_slots(np.ones(9, np.int32), 8)
        return
    if door.startswith("get_"):
        return
    for n in (N - 1, N + 1, 1):  # one id for three rows too: no broadcasting
        with pytest.raises(ValueError, match=says(label(door)) + ".*3"):
            call(new(), np.arange(4, 4 + n, dtype=np.int32))


SHAPES = {
    "too few heads": (
        "set_kv_buffer (MHA)",
        lambda p: p.set_kv_buffer(0, LOC, K[:, :1], V),
        "cache_k",
        (3, 2, 4),
        (3, 1, 4),
    ),
    "heads flattened": (
        "set_kv_buffer (MHA)",
        lambda p: p.set_kv_buffer(0, LOC, K.reshape(N, 8), V),
        "cache_k",
        (3, 2, 4),
        (3, 8),
    ),
    "head dim of another model": (
        "set_kv_buffer (MHA)",
        lambda p: p.set_kv_buffer(0, LOC, K, rows(N, 2, 5)),
        "cache_v",
        (3, 2, 4),
        (3, 2, 5),
    ),
    "one row for all ids": (
        "set_kv_buffer (MHA)",
        lambda p: p.set_kv_buffer(0, LOC, K[:1], V),
        "cache_k",
        (3, 2, 4),
        (1, 2, 4),
    ),
    "one row for all ids, V": (
        "set_kv_buffer (MHA)",
        lambda p: p.set_kv_buffer(0, LOC, K, V[:1]),
        "cache_v",
        (3, 2, 4),
        (1, 2, 4),
    ),
    "latent only": ("set_kv_buffer (MLA)", lambda p: p.set_kv_buffer(0, LOC, NOPE), "cache_k", (3, 1, 8), (3, 1, 6)),
    "two heads": (
        "set_kv_buffer (MLA)",
        lambda p: p.set_kv_buffer(0, LOC, rows(N, 2, 8)),
        "cache_k",
        (3, 1, 8),
        (3, 2, 8),
    ),
    "nope and rope swapped": (
        "set_mla_kv_buffer (MLA)",
        lambda p: p.set_mla_kv_buffer(0, LOC, ROPE, NOPE),
        "cache_k_nope",
        (3, 1, 6),
        (3, 1, 2),
    ),
    "rope of another width": (
        "set_mla_kv_buffer (MLA)",
        lambda p: p.set_mla_kv_buffer(0, LOC, NOPE, rows(N, 1, 3)),
        "cache_k_rope",
        (3, 1, 2),
        (3, 1, 3),
    ),
    "one nope row for all ids": (
        "set_mla_kv_buffer (MLA)",
        lambda p: p.set_mla_kv_buffer(0, LOC, NOPE[:1], ROPE),
        "cache_k_nope",
        (3, 1, 6),
        (1, 1, 6),
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_rows_of_a_wrong_shape_are_a_value_error_with_both_shapes(case):
    door, call, name, expected, got = SHAPES[case]
    pool = mha() if "MHA" in door else mla()
    with pytest.raises(ValueError, match=says(door, name, expected, got)):
        call(pool)
    with pytest.raises(ValueError, match=says(door, name, expected, got)):
        jkv.checked_jit(call).lower(pool)


def test_swapped_k_and_v_of_different_widths_are_a_value_error():
    pool = mha(v_head_dim=3)
    with pytest.raises(ValueError, match=says("set_kv_buffer (MHA)", "cache_k", (3, 2, 4), (3, 2, 3))):
        pool.set_kv_buffer(0, LOC, rows(N, 2, 3), rows(N, 2, 4))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_rows_that_are_not_floats_are_a_value_error(dtype):
    with pytest.raises(ValueError, match=says("set_kv_buffer (MHA)", "cache_k", dtype)):
        mha().set_kv_buffer(0, LOC, K.astype(dtype), V)
    with pytest.raises(ValueError, match=says("set_kv_buffer (MHA)", "cache_v", dtype)):
        mha().set_kv_buffer(0, LOC, K, V.astype(dtype))
    with pytest.raises(ValueError, match=says("set_mla_kv_buffer (MLA)", "cache_k_rope", dtype)):
        mla().set_mla_kv_buffer(0, LOC, NOPE, ROPE.astype(dtype))


def test_a_move_of_unequal_lengths_is_a_value_error():
    for pool, family in ((mha(), "MHA"), (mla(), "MLA")):
        with pytest.raises(ValueError, match=says(f"move_kv_cache ({family})") + ".*2.*3|.*3.*2"):
            pool.move_kv_cache(ids(4, 5), ids(6, 7, 8))


LAYERED = {
    "set_kv_buffer (MHA)": (mha, lambda p, layer: p.set_kv_buffer(layer, LOC, K, V)),
    "set_kv_buffer (MLA)": (mla, lambda p, layer: p.set_kv_buffer(layer, LOC, ROW)),
    "set_mla_kv_buffer (MLA)": (mla, lambda p, layer: p.set_mla_kv_buffer(layer, LOC, NOPE, ROPE)),
    "get_kv (MHA)": (mha, lambda p, layer: p.get_kv(layer, LOC)),
    "get_kv (MLA)": (mla, lambda p, layer: p.get_kv(layer, LOC)),
    "get_mla_kv_buffer (MLA)": (mla, lambda p, layer: p.get_mla_kv_buffer(layer, LOC)),
    **{
        f"{door} ({family})": (new, lambda p, layer, door=door: getattr(p, door)(layer))
        for door in ("get_key_buffer", "get_value_buffer", "get_kv_buffer", "get_page_buffer")
        for family, new in (("MHA", mha), ("MLA", mla))
    },
}


@pytest.mark.parametrize("door", LAYERED)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("layer", [3, 8, -1, 0, 2**40])
def test_a_layer_that_the_pool_does_not_hold_is_an_index_error(door, stacked, layer):
    # K23: a pipeline stage that holds layers 4 to 7 must not answer for layer 3 with its last one
    new, call = LAYERED[door]
    pool = new(layer_num=4, start_layer=4, stacked=stacked)
    with pytest.raises(IndexError, match=says(door.split()[0], layer, "[4, 8)")):
        call(pool, layer)
    with pytest.raises(IndexError, match=says(door.split()[0], layer, "[4, 8)")):
        jkv.checked_jit(lambda pool: call(pool, layer)).lower(pool)


@pytest.mark.parametrize("door", LAYERED)
def test_a_layer_that_is_no_integer_is_an_index_error(door):
    new, call = LAYERED[door]
    for bad in (1.5, "0", None):
        with pytest.raises(IndexError, match=says(door.split()[0], "layer_id", bad)):
            call(new(), bad)


@pytest.mark.parametrize("door", LAYERED)
def test_a_traced_layer_needs_a_stacked_pool_and_a_scalar(door):
    new, call = LAYERED[door]
    with pytest.raises(IndexError, match=says(door.split()[0], "stacked=True")):
        jkv.checked_jit(call).lower(new(), jnp.int32(0))
    for bad in (jnp.zeros(2, jnp.int32), jnp.float32(0)):
        with pytest.raises(IndexError, match=says(door.split()[0], "layer_id must be one integer", bad.dtype)):
            jkv.checked_jit(call).lower(new(stacked=True), bad)


CREATE = {
    "size not a multiple of the page": ({"size": 10}, ValueError, ("size 10", "page_size 4")),
    "size zero": ({"size": 0}, ValueError, ("size", 0)),
    "size negative": ({"size": -8}, ValueError, ("size", -8)),
    "size not an integer": ({"size": 8.0}, ValueError, ("size", 8.0)),
    "page zero": ({"page_size": 0}, ValueError, ("page_size", 0)),
    "page negative": ({"page_size": -4}, ValueError, ("page_size", -4)),
    "no layers": ({"layer_num": 0}, ValueError, ("layer_num", 0)),
    "negative layers": ({"layer_num": -1}, ValueError, ("layer_num", -1)),
    "negative first layer": ({"start_layer": -1}, ValueError, ("start_layer", -1)),
    "interleave that does not divide the page": ({"interleave": 3}, ValueError, ("interleave 3", "page_size 4")),
    "interleave zero": ({"interleave": 0}, ValueError, ("interleave", 0)),
    "padding slot 1": ({"padding_slot": 1}, ValueError, ("padding_slot", "0 or -1", 1)),
    "padding slot -2": ({"padding_slot": -2}, ValueError, ("padding_slot", "0 or -1", -2)),
    "dtype int8": ({"dtype": jnp.int8}, ValueError, ("dtype", "int8")),
    "dtype uint8": ({"dtype": jnp.uint8}, ValueError, ("dtype", "uint8")),
    "dtype float64": ({"dtype": np.float64}, ValueError, ("dtype", "float64")),
    "dtype float8 of another family": ({"dtype": jnp.float8_e4m3fnuz}, ValueError, ("dtype", "float8_e4m3fnuz")),
    "dtype by a name that nothing has": ({"dtype": "bf17"}, ValueError, ("dtype", "bf17")),
    "an axis without a mesh": ({"dcp_axis": "dcp"}, ValueError, ("dcp", "mesh")),
    "more ids than int32 has": ({"size": 2**31 - 4}, ValueError, (2**31, "int32")),
}
CREATE_MHA = {
    "no heads": ({"head_num": 0}, ValueError, ("head_num", 0)),
    "head dim zero": ({"head_dim": 0}, ValueError, ("head_dim", 0)),
    "head dim negative": ({"head_dim": -4}, ValueError, ("head_dim", -4)),
    "v head dim zero": ({"v_head_dim": 0}, ValueError, ("v_head_dim", 0)),
}
CREATE_MLA = {
    "latent zero": ({"kv_lora_rank": 0}, ValueError, ("kv_lora_rank", 0)),
    "rope negative": ({"qk_rope_head_dim": -1}, ValueError, ("qk_rope_head_dim", -1)),
}


@pytest.mark.parametrize("case", CREATE | CREATE_MHA)
def test_create_refuses_an_mha_pool_that_cannot_be(case):
    options, error, parts = (CREATE | CREATE_MHA)[case]
    with pytest.raises(error, match=says(*parts)):
        mha(**options)


@pytest.mark.parametrize("case", CREATE | CREATE_MLA)
def test_create_refuses_an_mla_pool_that_cannot_be(case):
    options, error, parts = (CREATE | CREATE_MLA)[case]
    with pytest.raises(error, match=says(*parts)):
        mla(**options)


def test_create_refuses_axes_that_the_mesh_does_not_have():
    for bad in ({"dcp_axis": "pcp"}, {"tp_axis": "model"}, {"dcp_axis": ("dcp", "dcp")}, {"dcp_axis": "tp"}):
        with pytest.raises(ValueError, match=says("MHATokenToKVPool", "axes", "distinct axes of the mesh")):
            mha(**on(2, 2) | bad)


@pytest.mark.parametrize(("heads", "tp"), [(6, 4), (4, 8), (1, 2)])
def test_heads_that_the_mesh_axis_does_not_divide_are_a_value_error_with_both_numbers(heads, tp):
    # K10: JAX would silently replicate them, on every device
    with pytest.raises(ValueError, match=says("head_num", heads, tp)):
        mha(head_num=heads, **on(1, tp))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_scale_for_a_pool_that_has_none_is_a_value_error_not_ignored(name, dtype):
    pool = mha(dtype=dtype)
    with pytest.raises(ValueError, match=says("set_kv_buffer (MHA)", name, "FP8", jnp.dtype(dtype).name)):
        pool.set_kv_buffer(0, LOC, K, V, **{name: 0.5})
    with pytest.raises(ValueError, match=says("get_kv (MHA)", name, "FP8", jnp.dtype(dtype).name)):
        pool.get_kv(0, LOC, **{name: 0.5})
    with pytest.raises(ValueError, match=says("get_kv (MLA)", "k_scale", "FP8", jnp.dtype(dtype).name)):
        mla(dtype=dtype).get_kv(0, LOC, k_scale=0.5)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("shape", [(2,), (1, 1), (3, 2), (0,)])
def test_a_scale_of_a_wrong_shape_is_a_value_error(name, shape):
    pool = mha(dtype=jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=says("set_kv_buffer (MHA)", name, "(1,)", shape)):
        pool.set_kv_buffer(0, LOC, K, V, **{name: jnp.ones(shape)})
    with pytest.raises(ValueError, match=says("get_kv (MHA)", name, "(1,)", shape)):
        pool.get_kv(0, LOC, **{name: jnp.ones(shape)})


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-50])
def test_a_constant_scale_that_cannot_divide_is_a_value_error(bad):
    # K15: what counts is the scale in float32, where 1e-50 is zero
    with pytest.raises(ValueError, match=says("set_kv_buffer (MHA)", "k_scale", "positive")):
        mha(dtype=jnp.float8_e4m3fn).set_kv_buffer(0, LOC, K, V, k_scale=bad)


def test_a_host_copy_of_another_pool_is_a_value_error():
    # K17, K14: the bytes mean something else there
    host = mha().get_cpu_copy(LOC)
    for other in (mla(), mha(head_num=4), mha(layer_num=2), mha(dtype=jnp.bfloat16)):
        with pytest.raises(ValueError, match="load_cpu_copy"):
            other.load_cpu_copy(host, LOC)
    fp8 = mha(dtype=jnp.float8_e4m3fn).get_cpu_copy(LOC)
    with pytest.raises(ValueError, match=says("load_cpu_copy (MHA)", "float8_e4m3fn", "float8_e5m2")):
        mha(dtype=jnp.float8_e5m2).load_cpu_copy(fp8, LOC)


def test_pad_slots_refuses_a_padding_slot_other_than_0_and_minus_1():
    with pytest.raises(ValueError, match=says("pad_slots", "padding_slot", "0 or -1", 7)):
        jkv.pad_slots(LOC, 8, padding_slot=7)


def test_scatter_rows_refuses_rows_of_another_shape():
    with pytest.raises(ValueError, match=says("scatter_rows", "rows", (3, 2, 4), (1, 2, 4))):
        jkv.scatter_rows(jnp.zeros((12, 2, 4)), LOC, K[:1])
    with pytest.raises(ValueError, match=says("scatter_rows", "rows", (3, 2, 4), (3, 8))):
        jkv.scatter_rows(jnp.zeros((12, 2, 4)), LOC, K.reshape(N, 8))


@pytest.mark.parametrize(
    "option", [{"dcp_size": 0}, {"dcp_size": -1}, {"interleave": 0}, {"dcp_size": 2, "dcp_rank": 2}]
)
def test_scatter_rows_refuses_ranks_that_cannot_be(option):
    with pytest.raises(ValueError, match=says("scatter_rows")):
        jkv.scatter_rows(jnp.zeros((12, 2, 4)), LOC, K, **option)


def test_a_pool_that_enters_a_shard_map_by_other_specs_is_a_value_error():
    pool = mha(**on(2))
    inside = jax.shard_map(
        lambda pool: pool.get_kv(0, LOC), mesh=mesh(2), in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    with pytest.raises(ValueError, match=says("get_kv (MHA)", "k_buffer", (24, 2, 4), (12, 2, 4), "partition_specs")):
        jkv.checked_jit(inside).lower(pool)


def test_a_donated_pool_used_again_is_a_runtime_error_of_jax():
    pool = mha()
    jkv.checked_jit(write, donate_argnums=0)(pool, LOC)
    with pytest.raises(RuntimeError, match="deleted"):
        jkv.checked_jit(write)(pool, LOC)


def test_a_mesh_without_devices_is_only_for_tracing():
    abstract = jax.sharding.AbstractMesh((2, 1), ("dcp", "tp"))
    with pytest.raises(ValueError, match=says("AbstractMesh", "eval_shape")):
        mha(mesh=abstract, dcp_axis="dcp", tp_axis="tp")
