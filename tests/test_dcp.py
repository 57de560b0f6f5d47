"""Attention over local rows and the merge of its parts, against plain softmax in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from small_pools import ids, mesh, on

import jkv
from jkv.testing import model_like


def softmax_attention(q, k, v, mask, scale=None):
    """float64, one query at a time."""
    heads, kv_heads = q.shape[-2], k.shape[-2]
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(q.shape[:-1], -np.inf)
    for i in np.ndindex(*q.shape[:-1]):
        seen = mask[i[:-1]]
        if not seen.any():
            continue
        head = i[-1] // (heads // kv_heads)
        scores = k[seen, head].astype(np.float64) @ q[i].astype(np.float64) * (scale or q.shape[-1] ** -0.5)
        lse[i] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        out[i] = np.exp(scores - lse[i]) @ v[seen, head].astype(np.float64)
    return out, lse


def example(t=3, s=10, heads=4, kv_heads=2, dim=8, v_dim=6):
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(x).astype(np.float32) for x in ((t, heads, dim), (s, kv_heads, dim), (s, kv_heads, v_dim))
    )
    return q, k, v, np.arange(s)[None, :] <= np.array([0, 4, 9])[:t, None]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attend_rows_is_softmax_attention(scale):
    q, k, v, mask = example()
    out, lse = jax.jit(lambda *a: jkv.attend_rows(*a, scale=scale))(q, k, v, mask)
    expected, expected_lse = softmax_attention(q, k, v, mask, scale)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


def test_a_batch_is_its_requests_one_by_one():
    q, k, v, mask = example()
    one = jkv.attend_rows(q, k, v, mask)
    batch = jkv.attend_rows(q, np.stack([k] * 3), np.stack([v] * 3), mask)
    prefill = jkv.attend_rows(q[None], k[None, None], v[None, None], mask[None])
    for a, b, c in zip(one, batch, prefill, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-6)
        np.testing.assert_allclose(c[0], a, atol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_lies_in_a_masked_row_reaches_nobody(poison):
    q, k, v, mask = example()
    clean = jkv.attend_rows(q, k, v, mask)
    k[5:], v[5:] = poison, poison
    out, lse = jkv.attend_rows(q, k, v, mask)
    np.testing.assert_array_equal(out[:2], clean[0][:2])
    np.testing.assert_array_equal(lse[:2], clean[1][:2])
    assert np.isnan(np.asarray(out[2])).all(), "the query that does see the rows must show it"


def test_a_query_that_sees_no_row_gives_zero_and_minus_infinity():
    q, k, v, mask = example()
    out, lse = jkv.attend_rows(q, k, v, np.zeros_like(mask))
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()
    out, lse = jkv.attend_rows(q, k[:0], v[:0], mask[:, :0])
    assert not np.asarray(out).any()


def test_attend_rows_refuses_what_does_not_fit():
    q, k, v, mask = example()
    with pytest.raises(ValueError, match=r"attend_rows: q .* do not fit together"):
        jkv.attend_rows(q[:, :3], k, v, mask)
    with pytest.raises(ValueError, match=r"attend_rows: q .* do not fit together"):
        jkv.attend_rows(q, k, v[1:], mask)
    with pytest.raises(ValueError, match=r"attend_rows: mask must be bool \[..., 10\], got int32"):
        jkv.attend_rows(q, k, v, mask.astype(np.int32))


def merged(parts, lses, dcp=4):
    """merge_states over a mesh, of parts stacked along a new first axis."""
    run = jax.shard_map(
        lambda o, s: jkv.merge_states(o[0], s[0], "dcp"), mesh=mesh(dcp), in_specs=(P("dcp"), P("dcp")), out_specs=P()
    )
    return jax.jit(run)(jnp.stack(parts), jnp.stack(lses))


def test_merged_parts_are_the_whole():
    q, k, v, mask = example()
    whole = softmax_attention(q, k, v, mask)
    parts = [jkv.attend_rows(q, k[r::4], v[r::4], mask[:, r::4]) for r in range(4)]
    out, lse = merged(*zip(*parts, strict=True))
    np.testing.assert_allclose(out, whole[0], atol=1e-6)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-5, atol=1e-6)


def test_an_empty_rank_contributes_exactly_nothing():
    rng = np.random.default_rng(1)
    out, lse = rng.standard_normal((2, 3, 5)).astype(np.float32), rng.standard_normal((2, 3)).astype(np.float32)
    nothing = np.full((3,), -np.inf, np.float32)
    two = merged([out[0], out[1]], [lse[0], lse[1]], dcp=2)
    for rubbish in (0.0, np.nan):
        empty = np.full((3, 5), rubbish, np.float32)
        four = merged([out[0], empty, out[1], empty], [lse[0], nothing, lse[1], nothing])
        np.testing.assert_array_equal(four[0], two[0])
        np.testing.assert_array_equal(four[1], two[1])


def test_all_ranks_empty_gives_zero_never_nan():
    out, lse = merged([jnp.zeros((3, 5))] * 4, [jnp.full((3,), -jnp.inf)] * 4)
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()


def test_the_merge_is_float32_inside_and_keeps_the_dtype():
    out = jnp.full((1, 4), 3.0, jnp.bfloat16)
    merged_out, lse = merged([out] * 4, [jnp.full((1,), 80.0, jnp.bfloat16)] * 4)
    assert merged_out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(merged_out, np.float32), 3.0)
    np.testing.assert_allclose(lse, 80 + np.log(4), rtol=1e-6)


def test_merge_states_refuses_another_shape():
    with pytest.raises(ValueError, match=r"merge_states: lse must have shape \(3,\) for out \(3, 5\), got \(5,\)"):
        jkv.merge_states(jnp.zeros((3, 5)), jnp.zeros(5), "dcp")


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(("dcp", "interleave"), [(1, 1), (4, 1), (2, 2), (3, 4)])
def test_local_rows_and_pages_are_those_of_the_owner(array, dcp, interleave):
    space = jkv.SlotSpace(16, 4, dcp, interleave)
    page = space.alloc_page_size
    lens = np.array([2 * page - 1, 1, 0, page])
    pages = np.array([[3, 1], [2, 4], [0, 0], [4, 0]])
    table = (pages[:, :, None] * page + np.arange(page)).reshape(4, -1)
    for rank in range(dcp):
        rows, count = jkv.local_rows(space, array(table), array(lens), rank)
        numbers, count_too = jkv.local_page_table(space, array(table), array(lens), rank)
        np.testing.assert_array_equal(count, count_too)
        for b in range(4):
            ids = table[b, : lens[b]]
            mine = [space.row(i) for i in ids if space.owner(i) == rank]
            assert count[b] == len(mine)
            assert list(np.asarray(rows[b])) == mine + [-1] * (rows.shape[1] - len(mine))
            by_page = [int(numbers[b, i // 4]) * 4 + i % 4 for i in range(len(mine))]
            assert by_page == mine
        assert rows.shape[1] == space.local_lens(table.shape[1], 0)
    np.testing.assert_array_equal(np.asarray(numbers)[[1, 2, 3]], [[2, 0], [0, 0], [4, 0]])


POOLS = {
    "MHA": lambda **o: jkv.MHATokenToKVPool.create(dtype=jnp.bfloat16, head_num=4, head_dim=16, **o),
    "MHA-FP4": lambda **o: jkv.MHATokenToKVPoolFP4.create(head_num=4, head_dim=16, **o),
    "MLA": lambda **o: jkv.MLATokenToKVPool.create(dtype=jnp.float8_e5m2, kv_lora_rank=6, qk_rope_head_dim=2, **o),
    "DSA": lambda **o: jkv.DSATokenToKVPool.create(kv_lora_rank=128, qk_rope_head_dim=2, **o),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"])
@pytest.mark.parametrize("family", POOLS)
def test_a_ranks_part_by_itself_reads_its_rows_by_number(family, stacked, check_vma):
    pool = POOLS[family](size=8, page_size=4, layer_num=2, start_layer=1, stacked=stacked, **on(2, 2))
    model = model_like(pool)
    rng, loc = np.random.default_rng(0), ids(1, 2, 3, 23, 10)
    rows = [rng.standard_normal((5, *row)).astype(np.float32) for row in model.tensors.values()]
    pool = pool.set_kv_buffer(2, loc, *rows)
    model.set_kv_buffer(2, loc, *rows)
    table, heads = np.array([[1, 2, 3, 23, 10]], np.int32), "tp" if family.startswith("MHA") else None

    def read(pool, layer):
        rows, _ = jkv.local_rows(pool.slots, table, np.array([5]), jax.lax.axis_index("dcp"))
        mine = pool.local()
        assert mine.slots == jkv.SlotSpace(8, 4)
        return tuple(x[None] for x in mine.get_kv(layer if stacked else 2, rows[0]))

    specs = (pool.partition_specs(), P())
    over = functools.partial(jax.shard_map, mesh=mesh(2, 2), in_specs=specs, check_vma=check_vma)
    got = jkv.checked_jit(over(read, out_specs=P("dcp", None, heads)))(pool, np.int32(2))
    jkv.wait_for_checks()
    places = [[2, 10, 0], [1, 3, 23]]  # what each rank has of them, in order; rank 0 has one less, and -1 reads zeros
    for rank, held in enumerate(places):
        for have, want in zip(got, model.get_kv(2, np.array(held, np.int32)), strict=True):
            np.testing.assert_array_equal(np.asarray(have[rank]).astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("interleave", [1, 2])
def test_new_tokens_of_a_batch_attend_causally_to_the_rows_of_all_ranks(interleave, axis_type):
    pool = POOLS["MHA"](size=16, page_size=4, layer_num=1, interleave=interleave, **on(2, 2, axis_type))
    rng, page = np.random.default_rng(3), pool.slots.alloc_page_size
    table = (np.array([[3, 1], [4, 2], [2, 4]])[:, :, None] * page + np.arange(page)).reshape(3, -1).astype(np.int32)
    lens = np.array([11, 3, 0])
    at = np.array([[8, 9, 10], [2, -1, -1], [-1, -1, -1]])  # where each new token stands; -1 is padding
    written = np.concatenate([table[0, :11], table[1, :3]])
    k, v = np.asarray(jnp.asarray(rng.standard_normal((2, 14, 4, 16)), jnp.bfloat16))
    q = rng.standard_normal((3, 3, 8, 16)).astype(np.float32)
    heads = P(None, None, "tp")

    def attend(pool, q):
        rank = jax.lax.axis_index("dcp")
        rows, _ = jkv.local_rows(pool.slots, table, lens, rank)
        keys, values = (x.reshape(*rows.shape, *x.shape[1:]) for x in pool.local().get_kv(0, rows.reshape(-1)))
        seen = pool.slots.local_lens(at + 1, rank)
        mask = jnp.arange(rows.shape[1]) < seen[..., None]
        return jkv.merge_states(*jkv.attend_rows(q, keys[:, None], values[:, None], mask), "dcp")

    pool = pool.set_kv_buffer(0, written, k, v)
    specs = {"in_specs": (pool.partition_specs(), heads), "out_specs": (heads, heads)}
    over = jkv.checked_jit(jax.shard_map(attend, mesh=mesh(2, 2, axis_type), **specs))
    out, lse = over(pool, jax.device_put(q, jax.NamedSharding(mesh(2, 2, axis_type), heads)))
    jkv.wait_for_checks()
    for b, part in enumerate((slice(0, 11), slice(11, 14), slice(14, 14))):
        mask = np.arange(lens[b]) <= at[b][:, None]
        want, want_lse = softmax_attention(q[b], k[part], v[part], mask)
        np.testing.assert_allclose(out[b], want, atol=1e-5)
        np.testing.assert_allclose(lse[b], want_lse, rtol=1e-5, atol=1e-5)


def test_a_part_is_a_ranks_only_where_the_pool_is_split():
    pool = POOLS["MHA"](size=8, page_size=4, layer_num=1, **on(2, 2))
    with pytest.raises(ValueError, match=r"local \(MHA\): call it in a shard_map over all .* also \['dcp', 'tp'\]"):
        pool.local()
    one = POOLS["MHA"](size=8, page_size=4, layer_num=1, **on(1, 1))
    with pytest.raises(ValueError, match=r"also \['dcp', 'tp'\]"):
        one.local()
    alone = POOLS["MHA"](size=8, page_size=4, layer_num=1)
    assert alone.local().slots == alone.slots
