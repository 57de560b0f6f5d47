"""Arrays that are not what JAX or the pool would have made: refused by name, or taken for what they are."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from small_pools import mesh, mha, mla, on, rows

import jkv

IDS = np.array([9, 10, 5], np.int32)


def write(pool: Any, values: Any = None, **scales: Any) -> Any:
    values = rows(3, 2, 4) if values is None else values
    return pool.set_kv_buffer(0, IDS, values, rows(3, 2, 4), **scales)


def read(pool: Any) -> np.ndarray:
    return np.asarray(pool.get_kv(0, IDS)[0], np.float32)


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">f8"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_rows_in_the_other_byte_order_are_the_numbers_that_they_are(dtype: str, stored: str):
    values = (rows(3, 2, 4) * 64).astype(dtype)
    write(
        mha(dtype=stored), values.astype(values.dtype.newbyteorder("="))
    )  # what a compiled step could be mistaken for
    expected = jnp.asarray(values.astype(np.float32)).astype(stored).astype(np.float32)
    np.testing.assert_array_equal(read(write(mha(dtype=stored), values)), expected)


@pytest.mark.parametrize("x64", [False, True])
def test_float64_rows_are_float32_rows(x64: bool):
    values = rows(3, 2, 4).astype(np.float64) * (1 + 2.0**-30)
    values[0, 0, 0] = 1e300
    with jax.enable_x64(x64):
        for given in (values, jnp.asarray(values)) if x64 else (values,):
            found = read(write(mha(), given))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, values.astype(np.float32))


def test_ragged_rows_are_named():
    with pytest.raises(
        ValueError, match=r"set_kv_buffer \(MHA\): cache_k must have shape \(3, 2, 4\): setting an array"
    ):
        write(mha(), [[[1.0, 2.0]], [[1.0]]])


@pytest.mark.parametrize("scale", ["2", b"2", True, np.datetime64(5, "s"), np.complex64(2 + 5j), 1j * jnp.ones(())])
def test_a_scale_that_is_no_real_number_is_refused(scale: Any):
    with pytest.raises(ValueError, match=r"set_kv_buffer \(MHA\): k_scale must be a number or an array of one, got"):
        write(mha(dtype="float8_e4m3fn"), k_scale=scale)


@pytest.mark.parametrize("dst", ["float8_e4m3fn", "float8_e5m2"])
def test_what_is_read_as_8_bits_saturates_as_writes_do(dst: str):
    values = np.full((3, 2, 4), 500, np.float32) * np.array([1, -1000, np.nan], np.float32)[:, None, None]
    largest = float(jnp.finfo(dst).max)
    expected = np.clip(np.round(values / 2) * 2 if dst == "float8_e4m3fn" else values, -largest, largest)
    with jkv.enable_checks(False):  # they look for NaN
        pool = write(mha(), values)
    got = np.asarray(pool.get_kv(0, IDS, dst_dtype=dst)[0], np.float32)
    np.testing.assert_array_equal(got[1:], expected[1:])
    assert (got[0] == min(largest, 512)).all()
    # A scale may take an 8-bit row past the range of its own format.
    fp8 = write(mha(dtype=dst), np.full((3, 2, 4), largest, np.float32))
    assert (np.asarray(fp8.get_kv(0, IDS, k_scale=2.0, dst_dtype=dst)[0], np.float32) == largest).all()
    assert (np.asarray(fp8.get_kv(0, IDS, dst_dtype=dst)[0], np.float32) == largest).all()


def test_quantised_rows_read_as_8_bits_saturate_too():
    fp4 = jkv.MHATokenToKVPoolFP4.create(size=16, page_size=4, head_num=1, head_dim=16, layer_num=1)
    dsa = jkv.DSATokenToKVPool.create(size=16, page_size=4, kv_lora_rank=128, qk_rope_head_dim=4, layer_num=1)
    x = np.full((3, 1, 16), 6 * 2.0**10, np.float32)
    packed = dsa.set_mla_kv_buffer(0, IDS, np.full((3, 1, 128), 1e4, np.float32), np.full((3, 1, 4), 1e4, np.float32))
    for found in (
        *fp4.set_kv_buffer(0, IDS, x, x).get_kv(0, IDS, dst_dtype="float8_e4m3fn"),
        *packed.get_mla_kv_buffer(0, IDS, dst_dtype="float8_e4m3fn"),
    ):
        assert (np.asarray(found, np.float32) == 448).all()


def test_a_dtype_that_no_row_is_read_in_is_refused():
    with pytest.raises(ValueError, match=r"get_kv \(MHA\): dst_dtype must be a float dtype, got 'float4_e2m1fn'; row"):
        mha().get_kv(0, IDS, dst_dtype="float4_e2m1fn")


DOORS = {
    "move_kv_cache": lambda pool, host: pool.move_kv_cache([5], [6]),
    "load_cpu_copy": lambda pool, host: pool.load_cpu_copy(host, [5]),
    "get_cpu_copy": lambda pool, host: pool.get_cpu_copy([5]),
    "set_kv_buffer": lambda pool, host: write(pool),
    "get_kv": lambda pool, host: pool.get_kv(0, IDS),
    "get_kv_buffer": lambda pool, host: pool.get_kv_buffer(0),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_arrays_of_another_size(door: str):
    cut = jax.tree.map(lambda array: array[:6], mha())
    with pytest.raises(ValueError, match=rf"{door} \(MHA\): k_buffer has shape \(6, 2, 4\) here, expected \("):
        DOORS[door](cut, mha().get_cpu_copy([5]))


@pytest.mark.parametrize("door", [door for door in DOORS if door != "get_cpu_copy"])
def test_every_door_refuses_a_pool_that_a_shard_map_did_not_split(door: str):
    pool = mha(**on(2))
    host = pool.get_cpu_copy([5])
    step = jax.shard_map(
        lambda pool: jax.tree.leaves(DOORS[door](pool, host))[0],
        mesh=mesh(2), in_specs=P(), out_specs=P(), check_vma=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=rf"{door} \(MHA\): k_buffer has shape .* pool.partition_specs\(\)"):
        step(pool)


@pytest.mark.parametrize("door", DOORS)
def test_every_door_says_that_a_pool_has_lost_its_mesh(door: str):
    pool = pickle.loads(pickle.dumps(mha(**on(2))))
    with pytest.raises(ValueError, match=rf"{door} \(MHA\): k_buffer lies on 1 of the 2 devices of its mesh; place"):
        DOORS[door](pool, mha().get_cpu_copy([5]))


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_shard_map_over_some_dcp_axes_opens_the_first(order: tuple[str, str]):
    devices = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    pool = mla(mesh=devices, dcp_axis=order)
    ids = np.arange(1, pool.slots.bound)
    values = np.broadcast_to(ids[:, None, None], (len(ids), 1, 8)).astype(np.float32)
    pool = pool.set_kv_buffer(0, ids, values)

    def part(opened: str) -> np.ndarray:
        specs = jax.tree.map(lambda _: P(opened), pool)
        read = jax.shard_map(
            lambda pool, loc: pool.get_kv(0, loc)[0],
            mesh=devices, axis_names={opened}, in_specs=(specs, P()), out_specs=P(), check_vma=False,
        )  # fmt: skip
        return np.asarray(jkv.checked_jit(read)(pool, ids))

    np.testing.assert_array_equal(part(order[0]), values)
    with pytest.raises(ValueError, match=r"get_kv \(MLA\): a shard_map over some of dcp_axis .* must open the first"):
        part(order[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda words: words[:1],
        lambda words: words[..., :1],
        lambda words: words.view(np.float32),
        lambda words: words.astype(">u4"),
        lambda words: words[0],
    ],
    ids=["a layer", "a column", "floats", "byte order", "no axis"],
)
def test_a_host_copy_that_was_changed_is_refused(change: Any):
    pool = mha(layer_num=2, stacked=True)
    host = pool.get_cpu_copy(IDS)
    with pytest.raises(ValueError, match=r"load_cpu_copy \(MHA\): (host holds words|loc must name one slot a row)"):
        pool.load_cpu_copy(jax.tree.map(change, host), IDS)
    for words in ((), host.words[:1]):
        with pytest.raises(ValueError, match=r"load_cpu_copy \(MHA\): host holds words .* has something changed them"):
            pool.load_cpu_copy(jkv.HostCopy(words, host.kind), IDS)


def test_an_unknown_option_is_named_beside_the_known_ones():
    with pytest.raises(
        TypeError, match=r"MHATokenToKVPool.create: there is no option dpc_axis; the options are start_l"
    ):
        mha(dpc_axis="dcp")
    with pytest.raises(ValueError, match=r"MHATokenToKVPool: stacked must be True or False, got 'no'"):
        mha(stacked="no")
