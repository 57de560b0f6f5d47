"""The quantised pools: every door under every number of ranks, and data and scales that are never apart."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from small_pools import ids, mesh, on, same, words

import jkv
from jkv.testing import assert_invariants, assert_pool_equals, model_like

SIZE, PAGE, LAYERS, START = 8, 4, 2, 3
FAMILIES = {
    "MHA-FP4": (jkv.MHATokenToKVPoolFP4, {"head_num": 2, "head_dim": 32, "v_head_dim": 16}),
    "MLA-FP4": (jkv.MLATokenToKVPoolFP4, {"kv_lora_rank": 32, "qk_rope_head_dim": 16}),
    "DSA": (jkv.DSATokenToKVPool, {"kv_lora_rank": 128, "qk_rope_head_dim": 3}),
}
unchecked = pytest.mark.usefixtures("no_checks")
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def no_checks() -> Iterator[None]:
    with jkv.enable_checks(False):
        yield


def new(family: str, dcp: int = 1, tp: int = 1, axis_type: AxisType = AxisType.Auto, **options: Any) -> Any:
    cls, dims = FAMILIES[family]
    place = on(dcp, tp, axis_type) if dcp * tp > 1 else {}
    sizes = {"size": SIZE, "page_size": PAGE, "layer_num": LAYERS, "start_layer": START}
    return cls.create(**sizes | dims | place | options)


def values(pool: Any, n: int, seed: int = 0) -> list[np.ndarray]:
    """Rows for `set_kv_buffer`, float32."""
    rng = np.random.default_rng(seed)
    if hasattr(pool, "kv_lora_rank"):
        shapes = [(n, 1, pool.kv_lora_rank + pool.qk_rope_head_dim)]
    else:
        shapes = [(n, pool.head_num, pool.head_dim), (n, pool.head_num, pool.v_head_dim)]
    return [rng.standard_normal(shape).astype(np.float32) * 8 for shape in shapes]


def parts(pool: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows[..., : pool.kv_lora_rank], rows[..., pool.kv_lora_rank :]


def equal(got: Any, want: Any) -> None:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32))


@unchecked
@pytest.mark.parametrize("dcp", [1, 2, 4, 8])
@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"])
@every_family
def test_every_door_under_every_number_of_ranks(family, stacked, dcp):
    pool = new(family, dcp, stacked=stacked)
    model, bound, layer = model_like(pool), pool.slots.bound, START + 1
    loc = ids(0, 5, bound - 1, -1, bound, 7 % bound, -bound, 2**31 - 1)
    write = jax.jit(lambda pool, rows: pool.set_kv_buffer(layer, loc, *rows), donate_argnums=0)
    rows = values(pool, len(loc))
    pool = write(pool, rows)
    model.set_kv_buffer(layer, loc, *rows)
    assert_pool_equals(pool, model)
    if hasattr(pool, "kv_lora_rank"):
        more = values(pool, 3, seed=1)[0]
        pool = pool.set_mla_kv_buffer(START, ids(9, 0, 6), *parts(pool, more))
        model.set_mla_kv_buffer(START, ids(9, 0, 6), *parts(pool, more))
        assert_pool_equals(pool, model)
        for dst_dtype in (None, jnp.float32):
            got = pool.get_mla_kv_buffer(layer, loc, dst_dtype=dst_dtype)
            equal(got, model.get_mla_kv_buffer(layer, loc, dst_dtype=dst_dtype))
    equal(pool.get_kv(layer, loc), model.get_kv(layer, loc))
    equal(pool.get_kv_buffer(layer), model.get_kv_buffer(layer))
    equal([pool.get_key_buffer(layer), pool.get_value_buffer(layer)], model.get_kv_buffer(layer))
    equal(pool.get_page_buffer(layer), model.get_page_buffer(layer))
    tgt, src = ids(5, 6, 0, bound, 10), ids(7 % bound, 5, 9, 5, bound)
    pool = jax.jit(lambda pool: pool.move_kv_cache(tgt, src), donate_argnums=0)(pool)
    model.move_kv_cache(tgt, src)
    assert_pool_equals(pool, model)
    host, held = pool.get_cpu_copy(loc), model.get_cpu_copy(loc)
    target = ids(0, 1, 2, 3, 4, 8, -1, bound)
    pool = pool.load_cpu_copy(host, target)
    model.load_cpu_copy(held, target)
    assert_pool_equals(pool, model)
    assert_invariants(pool)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_heads_and_their_scales_are_split_over_tp_alike(axis_type):
    pool = new("MHA-FP4", 2, 2, axis_type)
    assert pool.k_buffer[0].sharding.shard_shape(pool.k_buffer[0].shape) == (SIZE + PAGE, 1, 16)
    assert pool.k_scale_buffer[0].sharding.shard_shape(pool.k_scale_buffer[0].shape) == (SIZE + PAGE, 2)
    model, loc, layer = model_like(pool), ids(5, 0, 22, 9), START
    rows = values(pool, 4)
    pool = pool.set_kv_buffer(layer, loc, *rows)
    model.set_kv_buffer(layer, loc, *rows)
    assert_pool_equals(pool, model)
    equal(pool.get_kv(layer, loc), model.get_kv(layer, loc))
    equal(pool.get_kv_buffer(layer), model.get_kv_buffer(layer))
    alone = new("MHA-FP4")
    again = alone.load_cpu_copy(pool.get_cpu_copy(loc), ids(1, 2, 3, 4))
    equal(again.get_kv(layer, ids(1, 3)), pool.get_kv(layer, ids(5, 22)))


@pytest.mark.parametrize("check_vma", [True, False])
@every_family
def test_in_a_scan_over_stacked_layers_in_a_callers_shard_map_with_checks(family, check_vma):
    pool = new(family, 4, stacked=True)
    model, loc, specs = model_like(pool), ids(5, 47, 0, 22), pool.partition_specs()
    rows = values(pool, 4)

    def step(pool, rows):
        def layer(pool, layer_id):
            pool = pool.set_kv_buffer(layer_id, loc, *rows)
            return pool, pool.get_kv(layer_id, loc)

        return jax.lax.scan(layer, pool, START + jnp.arange(LAYERS))

    read = P(None, None, "tp" if family == "MHA-FP4" else None)
    inside = jax.shard_map(step, mesh=mesh(4), in_specs=(specs, P()), out_specs=(specs, read), check_vma=check_vma)
    with jkv.enable_checks():
        pool, read = jkv.checked_jit(inside, donate_argnums=0)(pool, rows)
        jkv.wait_for_checks()
    for layer in range(LAYERS):
        model.set_kv_buffer(START + layer, loc, *rows)
        equal([r[layer] for r in read], model.get_kv(START + layer, loc))
    assert_pool_equals(pool, model)


@pytest.mark.parametrize("padding_slot", [0, -1])
@pytest.mark.parametrize("dcp", [1, 4])
@every_family
def test_a_padded_row_of_nan_reaches_neither_data_nor_scales(family, dcp, padding_slot):
    pool = new(family, dcp, padding_slot=padding_slot)
    rows = [np.full_like(x, np.nan) for x in values(pool, 3)]
    with jkv.enable_checks():
        after = pool.set_kv_buffer(START, ids(padding_slot, 0, padding_slot), *rows)
    assert same(after, pool)
    assert not any(w.any() for w in words(after))


@every_family
def test_a_foreign_row_touches_neither_data_nor_scales(family):
    pool = new(family, 4)
    after = pool.set_kv_buffer(START, ids(22), *values(pool, 1))  # rank 2, row 5
    for before, now in zip(words(pool), words(after), strict=True):
        changed = np.flatnonzero((before != now).reshape(len(now), -1).any(axis=1))
        assert changed.tolist() in ([], [2 * (SIZE + PAGE) + 5])
    assert all(w.any() for w in row_of_all(after, 22))


def row_of_all(pool: Any, loc: int) -> list[np.ndarray]:
    c, rows = pool.slots.dcp_size, pool.slots.rows
    return [np.asarray(array[0])[loc % c * rows + loc // c] for array in pool.arrays]


@every_family
def test_a_move_takes_the_scales_along_over_ranks(family):
    pool = new(family, 4)
    pool = pool.set_kv_buffer(START, ids(21, 22), *values(pool, 2))
    moved = pool.move_kv_cache(ids(23, 21), ids(21, 22))
    for was, now in zip(row_of_all(pool, 21), row_of_all(moved, 23), strict=True):
        np.testing.assert_array_equal(was, now)
    for was, now in zip(row_of_all(pool, 22), row_of_all(moved, 21), strict=True):
        np.testing.assert_array_equal(was, now)


# door -> call of pool and ids, the label of its probe
def _doors(family: str) -> dict[str, Any]:
    doors = {
        f"set_kv_buffer ({family})": lambda pool, loc: pool.set_kv_buffer(START, loc, *values(pool, len(loc))),
        f"get_kv ({family})": lambda pool, loc: pool.get_kv(START, loc),
        f"move_kv_cache ({family}) src_loc": lambda pool, loc: pool.move_kv_cache(np.arange(len(loc)) + 1, loc),
        f"move_kv_cache ({family}) tgt_loc": lambda pool, loc: pool.move_kv_cache(loc, np.arange(len(loc)) + 1),
        f"get_cpu_copy ({family})": lambda pool, loc: pool.get_cpu_copy(loc),
        f"load_cpu_copy ({family})": lambda pool, loc: pool.load_cpu_copy(
            pool.get_cpu_copy(np.arange(len(loc), dtype=np.int32)), loc
        ),
    }
    if family != "MHA-FP4":
        doors |= {
            f"set_mla_kv_buffer ({family})": lambda pool, loc: pool.set_mla_kv_buffer(
                START, loc, *parts(pool, values(pool, len(loc))[0])
            ),
            f"get_mla_kv_buffer ({family})": lambda pool, loc: pool.get_mla_kv_buffer(START, loc),
        }
    return doors


@pytest.mark.parametrize(("family", "door"), [(f, d) for f in FAMILIES for d in _doors(f)])
def test_every_door_probes_with_the_widened_bound(family, door):
    pool, call = new(family, 4), _doors(family)[door]
    with jkv.enable_checks():
        call(pool, ids(47, 0, 12, 20))
        message = r"1 of 4 slot ids outside \[0, 48\) = \(size 8 \+ page_size 4\) \* dcp_size 4; min 3, max 48"
        label = door.replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(jkv.KVIndexError, match=rf"^{label}(, layer 3)?: {message}$"):
            call(pool, ids(47, 48, 3, 0))


@every_family
def test_nan_in_a_row_is_reported(family):
    pool = new(family)
    rows = values(pool, 2)
    rows[0][1, 0, 3] = np.nan
    with (
        jkv.enable_checks(),
        pytest.raises(jkv.KVIndexError, match=r"1 of 2 rows of cache_k hold NaN; first at slot id 6"),
    ):
        pool.set_kv_buffer(START, ids(5, 6), *rows)


SIZES = (512, 4096)
STEPS = {
    "set_kv_buffer": lambda pool, loc: pool.set_kv_buffer(START, loc, *values(pool, 4)),
    "move_kv_cache": lambda pool, loc: pool.move_kv_cache(loc, ids(30, 31, 32, 33)),
}


@unchecked
@pytest.mark.parametrize("dcp", [1, 4])
@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"])
@pytest.mark.parametrize("door", STEPS)
@every_family
def test_a_donated_write_is_in_place_and_its_temporaries_ignore_the_size(family, door, stacked, dcp):
    temporary = []
    for size in SIZES:
        pool = new(family, dcp, size=size, page_size=64, stacked=stacked)
        needed = jax.jit(STEPS[door], donate_argnums=0).lower(pool, ids(20, 21, 22, 23)).compile().memory_analysis()
        assert needed.alias_size_in_bytes == pool.kv_size_bytes // dcp
        temporary.append(needed.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


def test_bytes_are_those_of_the_formats():
    fp4 = functools.partial(jkv.MHATokenToKVPoolFP4.create, size=64, page_size=64, layer_num=2)
    assert fp4(head_num=8, head_dim=128).kv_size_bytes == 128 * 2 * 2 * (8 * 64 + 8 * 8)
    mla = {"size": 64, "page_size": 64, "layer_num": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert jkv.MLATokenToKVPoolFP4.create(**mla).kv_size_bytes == 128 * (288 + 36)
    pool = jkv.DSATokenToKVPool.create(**mla)
    assert pool.kv_size_bytes == 128 * 656
    assert pool.get_key_buffer(0).shape == (128, 1, 656)
    assert pool.get_value_buffer(0).dtype == jnp.uint8
    assert [jkv.bytes_per_token(p) for p in (fp4(head_num=8, head_dim=128), pool)] == [2304, 656]


@unchecked
@every_family
def test_an_export_keeps_the_pool_and_its_bytes(family):
    pool = new(family, 4)
    step = jax.jit(lambda pool, loc, rows: pool.set_kv_buffer(START, loc, *rows), donate_argnums=0)
    rows, loc = values(pool, 2), ids(5, 22)
    data = export.export(step, disabled_checks=jkv.export_disabled_checks(), platforms=["cpu"])(
        pool, loc, rows
    ).serialize()
    want = pool.set_kv_buffer(START, loc, *rows)
    got = export.deserialize(data).call(pool, loc, rows)
    assert type(got) is type(pool)
    assert got.layout == pool.layout
    assert same(got, want)


@pytest.mark.parametrize(
    ("family", "options", "match"),
    [
        ("MHA-FP4", {"dtype": jnp.float16}, r"MHATokenToKVPoolFP4: dtype must be bfloat16, got"),
        ("MHA-FP4", {"dtype": "int8"}, r"MHATokenToKVPoolFP4: dtype must be bfloat16, got 'int8'"),
        ("MLA-FP4", {"dtype": jnp.float8_e4m3fn}, r"MLATokenToKVPoolFP4: dtype must be bfloat16"),
        ("DSA", {"dtype": jnp.bfloat16}, r"DSATokenToKVPool: dtype must be float8_e4m3fn"),
        ("DSA", {"dtype": jnp.float8_e5m2}, r"DSATokenToKVPool: dtype must be float8_e4m3fn"),
        ("MHA-FP4", {"head_dim": 24}, r"MHATokenToKVPoolFP4: head_dim must be a multiple of 16, got 24"),
        ("MHA-FP4", {"v_head_dim": 8}, r"MHATokenToKVPoolFP4: v_head_dim must be a multiple of 16, got 8"),
        ("MLA-FP4", {"kv_lora_rank": 40}, r"MLATokenToKVPoolFP4: kv_lora_rank must be a multiple of 16"),
        ("MLA-FP4", {"qk_rope_head_dim": 4}, r"MLATokenToKVPoolFP4: qk_rope_head_dim must be a multiple of 16"),
        ("DSA", {"kv_lora_rank": 64}, r"DSATokenToKVPool: kv_lora_rank must be a multiple of 128, got 64"),
        ("DSA", {"qk_rope_head_dim": 0}, r"DSATokenToKVPool: qk_rope_head_dim must be a positive integer"),
        ("MHA-FP4", {"head_num": 0}, r"MHATokenToKVPoolFP4: head_num must be a positive integer"),
    ],
)
def test_pools_that_cannot_be(family, options, match):
    with pytest.raises(ValueError, match=match):
        new(family, **options)


@every_family
def test_scales_of_the_caller_are_refused_by_every_door(family):
    pool = new(family)
    message = rf"k_scale is for FP8 pools only, {family} rows carry scales of their own"
    calls = [
        (f"set_kv_buffer \\({family}\\)", lambda: pool.set_kv_buffer(START, ids(5), *values(pool, 1), k_scale=2.0)),
        (f"get_kv \\({family}\\)", lambda: pool.get_kv(START, ids(5), k_scale=2.0)),
    ]
    if family != "MHA-FP4":
        mla = parts(pool, values(pool, 1)[0])
        calls += [
            (f"set_mla_kv_buffer \\({family}\\)", lambda: pool.set_mla_kv_buffer(START, ids(5), *mla, k_scale=2.0)),
            (f"get_mla_kv_buffer \\({family}\\)", lambda: pool.get_mla_kv_buffer(START, ids(5), k_scale=2.0)),
        ]
    for door, call in calls:
        with pytest.raises(ValueError, match=f"{door}: {message}"):
            call()


@every_family
def test_rows_of_another_shape_or_dtype_and_copies_of_another_kind_are_refused(family):
    pool = new(family)
    rows = values(pool, 1)
    with pytest.raises(ValueError, match=rf"set_kv_buffer \({family}\): cache_k must have shape"):
        pool.set_kv_buffer(START, ids(5), rows[0][..., :-1], *rows[1:])
    with pytest.raises(ValueError, match=rf"set_kv_buffer \({family}\): cache_k must be one of"):
        pool.set_kv_buffer(START, ids(5), rows[0].astype(np.int32), *rows[1:])
    with pytest.raises(IndexError, match=rf"get_kv \({family}\): layer_id 2 outside \[3, 5\)"):
        pool.get_kv(2, ids(5))
    other = new("DSA" if family != "DSA" else "MLA-FP4").get_cpu_copy(ids(5))
    with pytest.raises(ValueError, match=rf"load_cpu_copy \({family}\): the copy is of .*; this pool holds {family}"):
        pool.load_cpu_copy(other, ids(5))


@unchecked
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
@every_family
def test_rows_of_every_source_dtype(family, source):
    pool = new(family)
    model = model_like(pool)
    rows = [x.astype(jnp.dtype(source)) for x in values(pool, 3)]
    pool = pool.set_kv_buffer(START, ids(3, 9, 4), *rows)
    model.set_kv_buffer(START, ids(3, 9, 4), *rows)
    assert_pool_equals(pool, model)


@every_family
def test_no_rows_are_a_no_op(family):
    pool = new(family, 2)
    none = np.zeros(0, np.int32)
    assert same(pool.set_kv_buffer(START, none, *values(pool, 0)), pool)
    assert same(pool.move_kv_cache(none, none), pool)
    assert all(x.shape[0] == 0 for x in pool.get_kv(START, none))
    assert same(pool.load_cpu_copy(pool.get_cpu_copy(none), none), pool)
    alone = new(family)
    assert same(alone.set_kv_buffer(START, none, *values(alone, 0)), alone)
    assert all(x.shape[0] == 0 for x in alone.get_kv(START, none))


@unchecked
@every_family
def test_a_gradient_ends_at_a_write(family):
    pool, loc = new(family), ids(4, 5)

    def loss(rows):
        return sum((x * x).sum() for x in rows), pool.set_kv_buffer(START, loc, *rows)

    rows = values(pool, 2)
    gradient, written = jax.grad(loss, has_aux=True)(rows)
    for g, x in zip(gradient, rows, strict=True):
        np.testing.assert_array_equal(g, 2 * x)
    assert same(written, pool.set_kv_buffer(START, loc, *rows))
