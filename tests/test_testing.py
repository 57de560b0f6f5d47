"""The NumPy model of a pool against figures that are not its own, and what its assertions say."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_pools import ids, mha, mla, on, rows, write

import jkv
from jkv.testing import MHAModel, MLAModel, PlainCodec, assert_invariants, assert_pool_equals, deal, model_like

CASES = json.loads((pathlib.Path(__file__).parent / "data" / "index_math.json").read_text())["dcp_layout"]
MHA = {"size": 8, "page_size": 4, "dtype": jnp.float32, "head_num": 2, "head_dim": 4, "layer_num": 1}


def test_ids_are_dealt_as_in_the_worked_examples():
    places = deal(8192, 64, 4, 1)
    assert len(places) == 33024
    assert places[33023] == (3, 8255)
    assert places[:6] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1)]
    assert deal(8, 4, 4, 1)[47] == (3, 11)
    assert deal(8, 4, 2, 2)[:6] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]


def test_ids_are_dealt_as_another_system_localises_them():
    dealt = {}
    for case in CASES:
        space = (8192, 64, case["dcp_size"], case["interleave_size"])
        places = dealt.setdefault(space, deal(*space))
        found = [places[i][1] if 0 <= i < len(places) and places[i][0] == case["dcp_rank"] else -1 for i in case["ids"]]
        assert found == case["localized"]


@pytest.mark.parametrize(
    ("dtype", "values", "codes"),
    [
        (
            "float8_e4m3fn",
            [448, 464, 465, 1000, -1000, np.inf, 2**-9, 2**-10, 25, 1.0625],
            "7e 7e 7e 7e fe 7e 01 00 5c 38",
        ),
        ("float8_e5m2", [57344, 61440, 1e6, -np.inf, 2**-16, 1.125, 1.375], "7b 7b 7b fb 01 3c 3e"),
        ("bfloat16", [1 + 2**-8, 1 + 3 * 2**-8, np.inf], "3f80 3f82 7f80"),
        ("float16", [1 + 2**-11, 65504, 65520], "3c00 7bff 7c00"),
        ("float32", [1.5, -0.0], "3fc00000 80000000"),
    ],
)
def test_casts_round_to_nearest_even_and_fp8_saturates(dtype, values, codes):
    words = PlainCodec(dtype).encode(np.array(values, np.float32))["buffer"]
    assert [int(word) for word in words] == [int(code, 16) for code in codes.split()]


def test_an_fp8_scale_divides_in_float32_and_nan_stays_nan():
    codec = PlainCodec("float8_e4m3fn")
    stored = codec.encode(np.array([1.0, np.nan, -1e30], jnp.bfloat16), scale=0.04)
    np.testing.assert_array_equal(codec.decode(stored).astype(np.float32), [24, np.nan, -448])


def test_a_write_lands_in_global_coordinates():
    model = MHAModel(**MHA, dcp_size=4, start_layer=3)
    model.set_kv_buffer(3, [5, 21, 0, -1, 48], rows(5, 2, 4), rows(5, 2, 4))
    assert np.flatnonzero(model.buffers["k_buffer"][0].any(axis=(1, 2))).tolist() == [12 + 1, 12 + 5]
    assert model.bad_ids([5, 0, -1, 48]) == [-1, 48]
    assert model.written_twice([5, 6, 5, 0, 0, 48, 48]) == [5]
    assert not model.get_kv(7, [5])[0].any()  # a layer that it does not hold
    mla_model = MLAModel(size=8, page_size=4, dtype=jnp.float32, kv_lora_rank=6, qk_rope_head_dim=2, layer_num=1)
    mla_model.set_mla_kv_buffer(0, [5], np.ones((1, 1, 6), np.float32), np.full((1, 2), 2, np.float32))
    assert mla_model.get_kv(0, [5])[0].tolist() == [[[1, 1, 1, 1, 1, 1, 2, 2]]]


def test_a_model_like_a_pool_has_its_geometry():
    for pool in (
        mha(dtype=jnp.bfloat16, layer_num=2, start_layer=4, v_head_dim=3, padding_slot=-1, interleave=2, **on(2, 2)),
        mla(layer_num=2, stacked=True, **on(2)),
    ):
        model = model_like(pool)
        assert_pool_equals(pool, model)
        layer = model.start_layer + 1
        written = write(pool, ids(5, 6), layer=layer)
        model.set_kv_buffer(layer, ids(5, 6), *_given(pool))
        assert_pool_equals(written, model)


def _given(pool):
    if hasattr(pool, "kv_lora_rank"):
        return [rows(2, 1, 8)]
    return [rows(2, pool.head_num, pool.head_dim), rows(2, pool.head_num, pool.v_head_dim, start=8)]


def test_a_difference_is_named_by_buffer_layer_id_rank_and_word():
    pool, model = write(mha(**on(4)), ids(21)), MHAModel(**MHA, dcp_size=4)
    with pytest.raises(
        AssertionError, match=r"k_buffer, layer 0: rows of slot ids \[21\] differ; id 21 is \(rank, row\) \(1, 5\)"
    ):
        assert_pool_equals(pool, model)
    with pytest.raises(AssertionError, match=r"its word \(0, 0\) is 0x3f800000, expected 0x0"):
        assert_pool_equals(pool, model)
    with pytest.raises(AssertionError, match=r"k_buffer: expected uint16\(48, 2, 4\) a layer, got uint32\(48, 2, 4\)"):
        assert_pool_equals(pool, MHAModel(**MHA | {"dtype": jnp.bfloat16}, dcp_size=4))


def test_rows_written_twice_are_open_until_the_model_settles_on_the_pools():
    with jkv.enable_checks(False):
        pool, model = write(mha(), ids(5, 6, 5)), MHAModel(**MHA)
    model.set_kv_buffer(0, ids(5, 6, 5), np.zeros((3, 2, 4)), np.zeros((3, 2, 4)))
    with pytest.raises(AssertionError, match=r"slot ids \[6\] differ"):
        assert_pool_equals(pool, model)
    with pytest.raises(ValueError, match="id 5 of layer 0 was written twice: settle the model first"):
        model.get_kv(0, [5])
    model.settle(pool)
    np.testing.assert_array_equal(model.get_kv(0, [5])[0], pool.get_kv(0, ids(5))[0])


def test_broken_invariants_are_named():
    pool = mha()
    assert_invariants(pool)
    dirty = dataclasses.replace(pool, v_buffer=(pool.v_buffer[0].at[0, 1, 1].set(7),))
    with pytest.raises(AssertionError, match="v_buffer: the padding slot's row is not zero"):
        assert_invariants(dirty)
    longer = dataclasses.replace(pool, k_buffer=(jnp.zeros((13, 2, 4), jnp.uint32),))
    with pytest.raises(AssertionError, match=r"kv_size_bytes says 768, the arrays have 800"):
        assert_invariants(longer)
    sharded = mha(**on(2))
    moved = jax.device_put(sharded.k_buffer[0], jax.NamedSharding(sharded.k_buffer[0].sharding.mesh, jax.P()))
    with pytest.raises(AssertionError, match=r"k_buffer: lies as P(artitionSpec)?\(\), partition_specs says"):
        assert_invariants(dataclasses.replace(sharded, k_buffer=(moved,)))
