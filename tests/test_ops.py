"""The raw ops of `pallas_kernels`: what their arguments promise, on one rank of many, without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import codecs, dispatch, index

ROWS, RANKS = 5, 3  # ids 0..14


def words(*shape: int) -> jax.Array:
    """A buffer of distinct words, none zero."""
    return jnp.asarray(1 + np.arange(np.prod(shape)).reshape(shape) % 60_000, jnp.uint16)


def floats(*shape: int) -> np.ndarray:
    return -1 - np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 200


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(jnp.bfloat16).view(np.uint16)


LOC = np.array([0, 1, 14, 15, -1, 7, 4, 2**31 - 1, -(2**31)], np.int32)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("skip_slot", [None, 0, 7])
@pytest.mark.parametrize("layer", [None, 1])
def test_scatters_write_their_rows_and_nothing_else(rank, skip_slot, layer):
    lead = () if layer is None else (2,)
    k, v, kv = words(*lead, ROWS, 2, 4), words(*lead, ROWS, 2, 6), words(*lead, ROWS, 1, 8)
    rows_k, rows_v, row = floats(9, 2, 4), floats(9, 2, 6), floats(9, 1, 8)
    slots = {"dcp_size": RANKS, "dcp_rank": rank, "skip_slot": skip_slot}
    options = {"dtype": jnp.bfloat16, "layer": layer} | slots
    new = [
        *pallas_kernels.scatter_kv(k, v, LOC, rows_k, rows_v, **options),
        pallas_kernels.scatter_mla(kv, LOC, row[..., :5], row[..., 5:], **options),
        pallas_kernels.scatter_mla(kv, LOC, row, **options),
    ]
    for old, got, rows in zip((k, v, kv, kv), new, (rows_k, rows_v, row, row), strict=True):
        expected = np.array(old)
        one = expected if layer is None else expected[layer]
        for i, slot in enumerate(LOC):
            if 0 <= slot < ROWS * RANKS and slot % RANKS == rank and slot != skip_slot:
                one[slot // RANKS] = bits(rows[i])
        np.testing.assert_array_equal(got, expected)
    if layer is None:
        got = pallas_kernels.scatter_rows(k, LOC, bits(rows_k), **slots)
        np.testing.assert_array_equal(got, new[0])


@pytest.mark.parametrize("layer", [-1, 2, 2**31 - 1])
def test_a_layer_out_of_range_writes_nothing_and_reads_zeros(layer):
    kv = words(2, ROWS, 1, 8)
    write = jax.jit(lambda layer: pallas_kernels.scatter_mla(kv, [1], floats(1, 1, 8), dtype=jnp.bfloat16, layer=layer))
    np.testing.assert_array_equal(write(layer), kv)
    assert not np.asarray(jax.jit(lambda layer: pallas_kernels.gather_rows(kv, [1], layer=layer))(layer)).any()


def test_gather_reads_what_this_rank_owns():
    kv = words(ROWS, 1, 8)
    total = np.zeros((9, 1, 8), np.uint16)
    for rank in range(RANKS):
        got = np.asarray(pallas_kernels.gather_rows(kv, LOC, dcp_size=RANKS, dcp_rank=rank))
        mine = [0 <= slot < ROWS * RANKS and slot % RANKS == rank for slot in LOC]
        np.testing.assert_array_equal(got[mine], np.asarray(kv)[LOC[mine] // RANKS])
        assert not got[np.logical_not(mine)].any()
        total += got
    np.testing.assert_array_equal(total[2], kv[4])
    nope, rope = pallas_kernels.gather_rows(kv, [2], split=5)
    np.testing.assert_array_equal(np.concatenate([nope, rope], -1)[0], kv[2])


def test_move_reads_every_source_before_it_writes():
    for stacked, buffers in ((False, (words(8, 1, 4), words(8, 2, 2))), (True, (words(3, 8, 1, 4), words(3, 8, 2, 2)))):
        moved = pallas_kernels.move_rows(
            buffers, [2, 3, 4, 0, 5, 99], [1, 2, 3, 7, 99, 1], stacked=stacked, skip_slot=0
        )
        for old, got in zip(buffers, moved, strict=True):
            expected = np.array(old)
            axis = 1 if stacked else 0
            source = np.take(expected, [1, 2, 3], axis)
            place = (slice(None),) * axis
            expected[(*place, [2, 3, 4])] = source
            expected[(*place, 5)] = 0
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("op", dispatch.IMPLEMENTATIONS)
def test_an_unknown_implementation_is_refused_by_name(op):
    with pytest.raises(ValueError, match=f"{op} has no implementation 'cuda'; there is .*xla"):
        dispatch.run(op, "cuda")


def test_ops_refuse_what_does_not_fit():
    k, row = words(ROWS, 2, 4), floats(1, 2, 4)
    with pytest.raises(ValueError, match=r"scatter_kv: k must have shape \(1, 2, 4\), got \(2, 4\)"):
        pallas_kernels.scatter_kv(k, k, [1], row[0], row, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"scatter_kv: v must be one of float32, .*, got int32"):
        pallas_kernels.scatter_kv(k, k, [1], row, row.astype(np.int32), dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"scatter_kv: a buffer must be \[rows, heads, dim\] of uint32, got .* uint16"):
        pallas_kernels.scatter_kv(k, k, [1], row, row, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"scatter_kv: a buffer must be \[layers, rows, heads, dim\] of uint16, got"):
        pallas_kernels.scatter_kv(k, k, [1], row, row, dtype=jnp.bfloat16, layer=0)
    with pytest.raises(ValueError, match="scatter_kv: buffers differ in rows"):
        pallas_kernels.scatter_kv(k, k[1:], [1], row, row, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="scatter_mla: scale is for FP8 rows only, and these are bfloat16"):
        pallas_kernels.scatter_mla(words(ROWS, 1, 4), [1], floats(1, 1, 4), dtype=jnp.bfloat16, scale=0.5)
    with pytest.raises(ValueError, match=r"scatter_rows: rows must have shape \(1, 2, 4\), got \(1, 4\)"):
        pallas_kernels.scatter_rows(k, [1], k[0, :1])
    with pytest.raises(ValueError, match="gather_rows: split must lie within the row of 4, got 5"):
        pallas_kernels.gather_rows(k, [1], split=5)
    with pytest.raises(ValueError, match=r"move_rows: 2 targets \(tgt_loc\) but 1 sources \(src_loc\)"):
        pallas_kernels.move_rows([k], [1, 2], [1])
    with pytest.raises(ValueError, match="move_rows: axis_name must name the mesh axis of the 2 ranks"):
        pallas_kernels.move_rows([k], [1], [2], dcp_size=2)
    for options, message in (
        ({"dcp_size": 0}, "dcp_size must be a positive integer, got 0"),
        ({"interleave": -1}, "interleave must be a positive integer, got -1"),
        ({"dcp_size": 2, "dcp_rank": 2}, r"dcp_rank must be in \[0, 2\), got 2"),
        ({"interleave": 2}, "interleave 2 must divide the 5 rows of a rank"),
    ):
        with pytest.raises(ValueError, match=f"scatter_rows: {message}"):
            pallas_kernels.scatter_rows(k, [1], k[:1], **options)
        with pytest.raises(ValueError, match=f"gather_rows: {message}"):
            pallas_kernels.gather_rows(k, [1], **options)
    for loc, error in ((np.ones(1), TypeError), (np.ones((1, 1), np.int32), ValueError), ([2**32 + 5], ValueError)):
        with pytest.raises(error, match="gather_rows: loc"):
            pallas_kernels.gather_rows(k, loc)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-39, 1e-50, 1e300])
def test_a_scale_that_is_no_scale_is_refused(scale):
    with pytest.raises(ValueError, match="here: k_scale must be positive and finite in float32, got"):
        codecs.as_scale(scale, "float8_e4m3fn", "here", "k_scale")


def test_a_scale_of_another_shape_is_refused():
    with pytest.raises(
        ValueError, match=r"here: k_scale must be a number or have shape \(\) or \(1,\), got shape \(2,\)"
    ):
        codecs.as_scale(np.ones(2, np.float32), "float8_e4m3fn", "here", "k_scale")


def test_row_numbers_that_pass_int32_are_refused():
    huge = jax.ShapeDtypeStruct((2**31 - 4, 1), jnp.uint8)
    with pytest.raises(ValueError, match="2147483644 rows a rank and 8 ids pass the range of int32 row numbers"):
        jax.eval_shape(lambda b: index.set_rows(b, jnp.zeros(8, jnp.int32), jnp.zeros((8, 1), jnp.uint8)), huge)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.uint8, jnp.float8_e4m3fn, jnp.bfloat16])
def test_scatter_rows_takes_any_dtype_and_rank(dtype):
    for shape in ((6,), (6, 3), (6, 2, 3, 2)):
        cache = jnp.ones(shape, dtype)
        got = jkv_scatter(cache, [2, 6, -1], jnp.full((3, *shape[1:]), 5, dtype))
        expected = np.ones(shape)
        expected[2] = 5
        np.testing.assert_array_equal(np.asarray(got, np.float32), expected)
        assert got.dtype == dtype


def jkv_scatter(*args):
    return jax.jit(pallas_kernels.scatter_rows)(*[jnp.asarray(a) for a in args])
