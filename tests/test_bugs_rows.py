"""Kinds of bugs that serving stacks had with the bytes of rows: what this library stores, moves, saves and restores.

The kind of each is in a comment: K13 head geometry, K14 FP8, K16 moves, K17 host copies, K18 host memory reused in
flight, K20 the MLA row, K24 nothing to do, K27 dtypes.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from small_pools import ids, mesh, mha, mla, on, row_of, rows, same, write

import jkv

FP8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def codes(pool, loc, buffer=0):
    return row_of(pool, loc)[buffer].reshape(-1)


def put(pool, values, **scales):
    """Writes `values` (up to 8) to slot 5 as K, and 1.0 as V."""
    k = np.zeros((1, 2, 4), np.float32)
    k.reshape(-1)[: len(values)] = values
    with jkv.enable_checks(False):  # NaN is what some of these are about
        return pool.set_kv_buffer(0, ids(5), k, np.ones((1, 2, 4), np.float32), **scales)


# K13: head dims that are no power of two, and K wider than V.


@pytest.mark.parametrize("dim", [80, 96, 192, 576])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_rows_of_any_width_come_back_whole_and_touch_no_other(dim, dtype):
    pool = mha(dtype=dtype, head_num=2, head_dim=dim, v_head_dim=dim - 1)
    assert [leaf.shape for leaf in jax.tree.leaves(pool)] == [(12, 2, dim), (12, 2, dim - 1)]
    k, v = rows(1, 2, dim) % 15 + 1, rows(1, 2, dim - 1) % 13 + 1
    after = pool.set_kv_buffer(0, ids(5), k, v)
    for got, expected in zip(after.get_kv(0, ids(5)), (k, v), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), expected)
    assert [int((np.asarray(leaf) != 0).any(axis=(1, 2)).sum()) for leaf in jax.tree.leaves(after)] == [1, 1]


def test_k_of_192_and_v_of_128_cost_their_own_bytes_and_cannot_be_swapped():
    pool = mha(dtype=jnp.bfloat16, head_num=4, head_dim=192, v_head_dim=128)
    assert pool.kv_size_bytes == 12 * 4 * (192 + 128) * 2
    assert [x.shape[2] for x in pool.get_kv_buffer(0)] == [192, 128]
    with pytest.raises(ValueError, match=r"cache_k.*\(1, 4, 192\).*\(1, 4, 128\)"):
        pool.set_kv_buffer(0, ids(5), rows(1, 4, 128), rows(1, 4, 192))


# K14: FP8.


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_saturates_where_xla_makes_nan_or_infinity_and_nan_stays_nan(dtype):
    top = FP8[dtype]
    beyond = [top, top * 1.04, -top * 1.2, 1e30, np.inf, -np.inf, np.nan]
    got = np.asarray(put(mha(dtype=dtype), beyond).get_kv(0, ids(5))[0], np.float32).reshape(-1)[:7]
    np.testing.assert_array_equal(got, [top, top, -top, top, top, -top, np.nan])


def test_an_fp8_scale_is_used_at_the_write_and_k_has_not_that_of_v():
    # K14: 1.0 / 0.04 = 25 lies between 24 and 26: a tie, to even; a stored 1.0 would be a scale that was dropped
    after = put(mha(dtype=jnp.float8_e4m3fn), [1.0], k_scale=0.04, v_scale=0.5)
    k, v = (np.asarray(x, np.float32).reshape(-1)[0] for x in after.get_kv(0, ids(5)))
    assert (k, v) == (24.0, 2.0)
    k, v = (np.asarray(x, np.float32).reshape(-1)[0] for x in after.get_kv(0, ids(5), k_scale=0.04, v_scale=0.5))
    assert (k, v) == (np.float32(jnp.bfloat16(np.float32(24) * np.float32(0.04))), 1.0)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_a_scale_may_be_a_number_or_an_array_and_means_the_same(shape, array):
    pool = mha(dtype=jnp.float8_e5m2)
    constant = put(pool, [1, 3, 7, 11], k_scale=0.3, v_scale=0.7)
    given = {"k_scale": array(np.full(shape, 0.3, np.float32)), "v_scale": array(np.full(shape, 0.7, np.float32))}
    assert same(constant, put(pool, [1, 3, 7, 11], **given))
    traced = jkv.checked_jit(lambda pool, scales: pool.set_kv_buffer(0, ids(5), rows(1, 2, 4), rows(1, 2, 4), **scales))
    assert same(traced(pool, given), pool.set_kv_buffer(0, ids(5), rows(1, 2, 4), rows(1, 2, 4), **given))


def test_division_by_a_scale_is_ieee_and_not_by_its_reciprocal():
    # K14: half of all quotients differ in the last place; some of them then round to another code
    pool = mha(dtype=jnp.float8_e4m3fn, head_num=1, head_dim=8192, v_head_dim=1)
    scale = np.float32(0.7)
    middles = (np.arange(8192, dtype=np.float32) % 8 + 8.5) / 8  # halfway between two codes
    values = (middles * np.exp2(np.arange(8192) // 8 % 5).astype(np.float32) * scale).astype(np.float32)
    after = pool.set_kv_buffer(0, ids(5), values.reshape(1, 1, -1), np.ones((1, 1, 1), np.float32), k_scale=0.7)
    expected = (values / scale).astype(jnp.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(codes(after, 5), expected)


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", FP8)
def test_fp8_rounds_once_straight_from_the_source(source, dtype):
    # K14: 1 + 2**-4 + 2**-11 goes to float16 or bfloat16 as a tie, and from there down
    values = np.array(
        [1 + 2**-4 + 2**-11, 1 + 2**-3 + 2**-12, 2**-10 * 1.01, 240.1, -17.03, 3e-3, 0.0, -0.0], np.float32
    )
    values = values.astype(jnp.dtype(source))
    after = put(mha(dtype=dtype), values) if source == "float32" else None
    if after is None:
        after = mha(dtype=dtype).set_kv_buffer(0, ids(5), values.reshape(1, 2, 4), values.reshape(1, 2, 4))
    np.testing.assert_array_equal(codes(after, 5), values.astype(np.float32).astype(jnp.dtype(dtype)).view(np.uint8))


# K16: moves.


@pytest.mark.parametrize("dcp", [1, 4])
@pytest.mark.parametrize("stacked", [False, True])
def test_an_overlapping_move_reads_all_sources_before_it_writes(dcp, stacked):
    # K16: one after the other, 1 would be in all three; across ranks each goes to another owner
    pool = mha(8, 4, layer_num=2, stacked=stacked, **(on(dcp) if dcp > 1 else {}))
    pool = write(write(pool, ids(1, 2, 3)), ids(1, 2, 3), layer=1, start=40)
    after = pool.move_kv_cache(ids(2, 3, 4), ids(1, 2, 3))
    for layer in (0, 1):
        for target, source in ((1, 1), (2, 1), (3, 2), (4, 3)):
            assert all(map(np.array_equal, row_of(after, target, layer), row_of(pool, source, layer)))
    swapped = pool.move_kv_cache(ids(1, 3), ids(3, 1))
    assert all(map(np.array_equal, row_of(swapped, 1), row_of(pool, 3)))
    assert all(map(np.array_equal, row_of(swapped, 3), row_of(pool, 1)))


def test_moving_one_token_of_a_page_moves_that_token_and_permutes_nothing():
    pool = write(mla(128, 64), np.arange(64, 128, dtype=np.int32))
    after = pool.move_kv_cache(ids(130), ids(77))
    for loc in set(range(192)) - {130}:
        np.testing.assert_array_equal(row_of(after, loc)[0], row_of(pool, loc)[0])
    np.testing.assert_array_equal(row_of(after, 130)[0], row_of(pool, 77)[0])


def test_a_source_out_of_range_moves_zeros_and_a_target_out_of_range_nothing():
    pool = write(mha(8, 1), ids(1, 2, 3))
    with jkv.enable_checks(False):
        after = pool.move_kv_cache(ids(2, 9, -1, 0), ids(-7, 1, 3, 1))
    assert not row_of(after, 2)[0].any()
    for loc in (1, 3):
        assert all(map(np.array_equal, row_of(after, loc), row_of(pool, loc)))
    assert not any(row.any() for loc in (0, 8) for row in row_of(after, loc))


# K17: host copies.


@pytest.mark.parametrize("family", [mha, mla])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dcp", [1, 4])
def test_a_host_copy_holds_every_buffer_of_every_layer_and_follows_new_ids(family, stacked, dcp):
    # K17: what is added to a pool and forgotten here is lost without an error
    pool = family(layer_num=3, stacked=stacked, **(on(dcp) if dcp > 1 else {}))
    for layer in range(3):
        pool = write(pool, ids(1, 2), layer=layer, start=1 + 20 * layer)
    host = pool.get_cpu_copy(ids(1, 2))
    pool = write(pool, ids(1, 2), start=60)  # the old slots have a new owner
    after = pool.load_cpu_copy(host, ids(5, 6))
    fresh = family(layer_num=3, stacked=stacked, **(on(dcp) if dcp > 1 else {}))
    for layer in range(3):
        expected = write(fresh, ids(5, 6), layer=layer, start=1 + 20 * layer)
        for loc in (5, 6):
            assert all(map(np.array_equal, row_of(after, loc, layer), row_of(expected, loc, layer)))
        assert all(map(np.array_equal, row_of(after, 1, layer), row_of(pool, 1, layer)))


def test_a_host_copy_keeps_its_values_when_the_pool_is_donated_to_a_write_at_once():
    pool = write(mha(), ids(5, 6))
    expected = write(mha(), ids(9, 10))
    host = pool.get_cpu_copy(ids(5, 6))
    overwritten = jkv.checked_jit(functools.partial(write, start=70), donate_argnums=0)(pool, ids(5, 6))
    assert all(map(np.array_equal, row_of(overwritten.load_cpu_copy(host, ids(9, 10)), 9), row_of(expected, 9)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_host_copy_goes_between_layouts_and_meshes_bit_for_bit(dtype):
    pool = put(mha(dtype=dtype, stacked=True), [np.nan, 1, -0.0, 2**-9])
    host = pool.get_cpu_copy(ids(5))
    after = mha(dtype=dtype, **on(2, 2)).load_cpu_copy(host, ids(7))
    assert all(map(np.array_equal, row_of(after, 7), row_of(pool, 5)))


def test_rows_that_are_views_of_other_arrays_are_read_as_they_look():
    # K17: strides are part of an array
    k = np.asfortranarray(rows(3, 2, 4))
    v = rows(4, 2, 3).transpose(2, 1, 0)
    after = mha().set_kv_buffer(0, ids(5, 6, 7), k, v)
    for n, loc in enumerate((5, 6, 7)):
        np.testing.assert_array_equal(row_of(after, loc)[0].view(np.float32), k[n])
        np.testing.assert_array_equal(row_of(after, loc)[1].view(np.float32), v[n])


# K18: the host reuses an array while the step is in flight.


def aligned(array):
    """A copy at a multiple of 64 bytes, where JAX on CPU shares the memory instead of copying it."""
    raw = np.zeros(array.nbytes + 64, np.uint8)
    at = -raw.ctypes.data % 64
    copy = raw[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("dcp", [1, 2])
def test_arrays_that_the_host_overwrites_after_the_call_were_read_before(dcp):
    n = 4096
    pool = mha(n, 4, **(on(dcp) if dcp > 1 else {}))
    loc, k, v = aligned(np.arange(1, n, dtype=np.int32)), aligned(rows(n - 1, 2, 4)), aligned(rows(n - 1, 2, 4))
    expected = pool.set_kv_buffer(0, loc.copy(), k.copy(), v.copy())
    with jkv.enable_checks(False):  # a probe would wait for the ids
        after = pool.set_kv_buffer(0, loc, k, v)
        loc[:], k[:], v[:] = 7, -1, -1
        moved, targets = after.move_kv_cache(source := aligned(ids(5, 6)), target := aligned(ids(9, 10))), ids(5, 6)
        source[:], target[:] = 1, 2
    assert same(after, expected)
    assert same(moved, expected.move_kv_cache(targets, ids(9, 10)))


def test_a_host_copy_that_is_evicted_after_the_restore_was_read_before():
    # K17, K18: the host cache reuses its memory while the device still reads
    loc = np.arange(1, 4096, dtype=np.int32)
    pool = write(mha(4096, 4), loc)
    host = pool.get_cpu_copy(loc)
    for _ in range(10):  # a race: the more often it is run, the surer it is lost
        words = tuple(aligned(array) for array in host.words)
        with jkv.enable_checks(False):
            after = mha(4096, 4).load_cpu_copy(dataclasses.replace(host, words=words), loc)
        for array in words:
            array[...] = 0
        assert same(after, pool)


# K20: the MLA row.


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_an_mla_row_is_the_latent_part_and_then_the_rope(pieces, flat):
    pool = mla(kv_lora_rank=512, qk_rope_head_dim=64)
    nope, rope = np.full((1, 1, 512), 1, np.float32), np.full((1, 1, 64), 2, np.float32)
    if pieces:
        after = pool.set_mla_kv_buffer(0, ids(5), *((x[:, 0] for x in (nope, rope)) if flat else (nope, rope)))
    else:
        row = np.concatenate([nope, rope], axis=-1)
        after = pool.set_kv_buffer(0, ids(5), row[:, 0] if flat else row)
    stored = row_of(after, 5)[0].view(np.float32)
    assert stored.shape == (1, 576)
    assert (stored[0, :512] == 1).all()
    assert (stored[0, 512:] == 2).all()
    row, value = after.get_kv(0, ids(5))
    assert (row.shape, value.shape) == ((1, 1, 576), (1, 1, 512))
    got_nope, got_rope = after.get_mla_kv_buffer(0, ids(5), dst_dtype=jnp.bfloat16)
    assert (got_nope.shape, got_rope.shape, got_rope.dtype) == ((1, 1, 512), (1, 1, 64), jnp.bfloat16)
    assert np.asarray(value == 1).all()
    assert np.asarray(got_rope == 2).all()


# K24: nothing to do.


@pytest.mark.parametrize("dcp", [1, 4])
@pytest.mark.parametrize("family", [mha, mla])
def test_no_tokens_is_no_work_for_any_door(family, dcp):
    pool = write(family(**(on(dcp) if dcp > 1 else {})), ids(5))
    none = np.zeros(0, np.int32)
    for loc in (none, []):
        assert same(pool, write(pool, loc))
        assert same(pool, pool.move_kv_cache(loc, loc))
        assert same(pool, pool.load_cpu_copy(pool.get_cpu_copy(loc), loc))
        assert all(x.shape[0] == 0 for x in pool.get_kv(0, loc))
    step = jkv.checked_jit(lambda pool, loc: write(pool, loc).move_kv_cache(loc, loc))
    assert same(pool, step(pool, none))
    jkv.wait_for_checks()
    if family is mla:
        assert all(x.shape[0] == 0 for x in pool.get_mla_kv_buffer(0, none))


def test_a_rank_without_tokens_adds_exactly_nothing_to_the_merge():
    # K24: two tokens on four ranks
    slots = jkv.SlotSpace(8, 4, 4)
    lens = [int(slots.local_lens(np.array([2]), rank)[0]) for rank in range(4)]
    assert lens == [1, 1, 0, 0]
    q, k, v = rows(1, 2, 4) / 97, rows(4, 1, 2, 4) / 97, rows(4, 1, 2, 4, start=20)

    def rank(q, k, v, n):
        return jkv.merge_states(*jkv.attend_rows(q, k[0], v[0], n.reshape(1, 1) > 0), "dcp")

    specs = {"in_specs": (P(), P("dcp"), P("dcp"), P("dcp")), "out_specs": P(), "check_vma": False}
    merge = jax.jit(jax.shard_map(rank, mesh=mesh(4), **specs))
    out, lse = merge(q, k, v, np.array(lens))
    whole, whole_lse = jkv.attend_rows(q, k[:2, 0], v[:2, 0], np.ones((1, 2), bool))
    np.testing.assert_allclose(out, whole, rtol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6)
    out, lse = merge(q, k, v, np.zeros(4, np.int64))
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()


# K27: dtypes.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_rows_of_another_dtype_are_converted_and_never_reinterpreted(dtype, source):
    k = np.full((3, 2, 4), 184).astype(jnp.dtype(source))  # the bits of another format would be another number
    pool = mha(dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = pool.set_kv_buffer(0, ids(5, 6, 7), k, k)
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(pool)]
    got = after.get_kv(0, ids(5))[0]
    assert got.dtype == pool.dtype == jnp.dtype(dtype)
    # 184 is exact in all of them but the FP8 formats: a tie between 176 and 192, and between 160 and 192
    assert (np.asarray(got, np.float32) == (192 if "float8" in dtype else 184)).all()


def test_the_callers_arrays_are_left_as_they_were():
    k = rows(3, 2, 4) * 1e6
    before, loc = k.copy(), np.array([5, 6, 40], np.int64)
    with jkv.enable_checks(False):
        mha(dtype=jnp.float8_e4m3fn).set_kv_buffer(0, loc, k, k, k_scale=2.0)
    np.testing.assert_array_equal(k, before)
    assert loc.tolist() == [5, 6, 40]


@pytest.mark.parametrize(("dtype", "word"), [("float32", "uint32"), ("bfloat16", "uint16"), ("float16", "uint16")])
def test_special_values_keep_their_bits_where_the_dtype_is_the_pools(dtype, word):
    bits = np.array([0x7F800001, 0xFF800000, 0x80000000, 1, 0x7FC00123, 0xFFFFFFFF, 2, 3], np.uint32)
    if word == "uint16":
        bits = np.array([0x7F81, 0xFF80, 0x8000, 1, 0x7FC1, 0xFFFF, 2, 0x7C01], np.uint16)
    k = bits.view(jnp.dtype(dtype)).reshape(1, 2, 4)
    with jkv.enable_checks(False):
        after = mha(dtype=dtype, **on(2)).set_kv_buffer(0, ids(5), k, k)
    np.testing.assert_array_equal(codes(after, 5), bits)
    got = np.asarray(after.get_kv(0, ids(5))[0]).view(word).reshape(-1)
    np.testing.assert_array_equal(got, bits)
