"""Probes wherever a model puts them: in loops and shard_maps, its own and the caller's, on every kind of mesh."""

import contextlib
import functools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType

from jkv import _shim, checks
from jkv.checked import checked_jit, wait_for_checks
from jkv.checks import KVIndexError, enable_checks

P = jax.P
GOOD, BAD = jnp.array([3, 2]), jnp.array([3, 9])
MESSAGE = r"1 of 2 slot ids outside \[0, 8\) = B; min 3, max 9"


def probe(loc, label="door", **options):
    checks.probe_ids(loc, label, bound=8, how="B", **options)


def make_mesh(axis_type, **axes):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes), devices=devices)


def put(mesh, x, *spec):
    return jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))


@pytest.fixture(autouse=True)
def _checks_on():
    with enable_checks():
        yield


# Each takes a shard_map of one mesh over "x", the sharded x [8] and ids, probes these and returns x.


def door(sm, x, loc, label="door", **options):
    probe(loc, label, **options)
    return sm(lambda x: x + 1, in_specs=P("x"), out_specs=P("x"))(x)


def inner_door(sm, x, loc, label="door", check_vma=True, body=lambda x, loc: x + 1):
    def with_probe(x, loc):
        probe(loc, label)
        return body(x, loc)

    return sm(with_probe, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=check_vma)(x, loc)


def two_doors(sm, x, loc):
    return door(sm, door(sm, x, GOOD), loc, "second")


def between_own_shard_maps(sm, x, loc):
    plus = sm(lambda x: x + 1, in_specs=P("x"), out_specs=P("x"))
    probe(loc)
    return plus(door(sm, plus(x), loc))


def scan_over_layers(sm, x, loc):
    def layer(x, i):
        x = door(sm, x, jnp.where(i < 1, GOOD, loc), layer=i)
        return inner_door(sm, x, jnp.where(i < 2, GOOD, loc)), None

    return lax.scan(layer, x, jnp.arange(3))[0]


def while_loop(sm, x, loc):
    return lax.while_loop(lambda c: c[1] < 2, lambda c: (door(sm, c[0], loc), c[1] + 1), (x, 0))[0]


def fori_loop(sm, x, loc):
    return lax.fori_loop(0, 2, lambda i, x: inner_door(sm, x, loc), x)


def cond(sm, x, loc):
    return lax.cond(x.sum() >= 0, lambda x: door(sm, x, loc), lambda x: inner_door(sm, x, loc, "not taken"), x)


def in_a_shard_map(sm, x, loc):
    return inner_door(sm, inner_door(sm, x, loc), loc, check_vma=False)


def loops_over_what_differs_by_rank(sm, x, loc):
    def body(x, loc):
        rank = lax.axis_index("x")
        own = jnp.where(rank == 2, loc, GOOD)  # as a rank's heads do

        def layer(x, i):
            probe(own, layer=i)
            return lax.cond(rank == 1, lambda x: (probe(own, "in a branch"), x)[1], lambda x: x, x), None

        x = lax.scan(layer, x, jnp.arange(2))[0]
        return lax.fori_loop(0, 2, lambda i, x: (probe(own, "in a loop"), x)[1], x)

    return inner_door(sm, x, GOOD, body=lambda x, _: body(x, loc))


def nested_jit(sm, x, loc):
    once = jax.jit(functools.partial(door, sm))
    return once(jax.jit(functools.partial(inner_door, sm))(x, GOOD), loc)


def remat_and_grad(sm, x, loc):
    return jax.grad(lambda x: jax.checkpoint(functools.partial(inner_door, sm))(x, loc).sum())(x)


def custom_jvp(sm, x, loc):
    f = jax.custom_jvp(lambda x: door(sm, x, loc))
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return f(x)


def vmapped(sm, x, loc):
    jax.vmap(probe)(jnp.stack([GOOD, loc]))
    return x


PROGRAMS = {
    door: "door: ",
    two_doors: "second: ",
    between_own_shard_maps: "door: ",
    scan_over_layers: "door, layer 1: ",
    while_loop: "door: ",
    fori_loop: "door: ",
    cond: "door: ",
    in_a_shard_map: "door: ",
    loops_over_what_differs_by_rank: "door, layer 0: ",
    nested_jit: "door: ",
    remat_and_grad: "door: ",
    custom_jvp: "door: ",
    vmapped: "door: ",
}
# Tried on all four kinds of mesh; for the rest one plain Auto and one Explicit under set_mesh are enough.
ANY_MESH = (two_doors, scan_over_layers, in_a_shard_map, loops_over_what_differs_by_rank)


CASES = [
    pytest.param(program, axis_type, set_mesh, id=f"{program.__name__}-{axis_type.name}{'-set_mesh' * set_mesh}")
    for program in PROGRAMS
    for axis_type in (AxisType.Auto, AxisType.Explicit)
    for set_mesh in (False, True)
    if program in ANY_MESH or set_mesh == (axis_type is AxisType.Explicit)
]


@pytest.mark.parametrize(("program", "axis_type", "set_mesh"), CASES)
def test_a_probe_reports_from_anywhere(program, axis_type, set_mesh):
    mesh = make_mesh(axis_type, x=4)
    x = put(mesh, jnp.zeros(8), "x")
    run = functools.partial(program, functools.partial(jax.shard_map, mesh=mesh))
    step = checked_jit(run)
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        clean = step(x, GOOD)
        wait_for_checks()
        out = step(x, BAD)
        with pytest.raises(KVIndexError, match=f"^{PROGRAMS[program]}{MESSAGE}$"):
            wait_for_checks()
        with enable_checks(False):
            np.testing.assert_array_equal(out, jax.jit(run)(x, BAD))
    assert clean.sharding == out.sharding


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
@pytest.mark.parametrize("axis_names", [{"x", "t"}, {"x"}, {"t"}], ids=lambda names: "".join(sorted(names)))
def test_the_lowest_rank_that_failed_speaks_once(axis_type, axis_names):
    mesh = make_mesh(axis_type, x=4, t=2)
    axes = tuple(axis for axis in ("x", "t") if axis in axis_names)

    def step(x, loc):
        def body(x, loc):
            rank = lax.axis_index(axes)
            probe(jnp.where(rank >= 1, loc + 100 * rank, 1))
            return x + 1

        specs = P(*(axis if axis in axes else None for axis in ("x", "t")))
        return jax.shard_map(body, mesh=mesh, in_specs=(specs, P()), out_specs=specs, axis_names=axis_names)(x, loc)

    checked_jit(step)(put(mesh, jnp.zeros((8, 4)), *(axis if axis in axes else None for axis in ("x", "t"))), BAD)
    with pytest.raises(KVIndexError, match=r"^door: 2 of 2 slot ids outside \[0, 8\) = B; min 103, max 109$"):
        wait_for_checks()
    wait_for_checks()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
def test_a_shard_map_in_a_shard_map(axis_type):
    mesh = make_mesh(axis_type, x=2, t=2)

    def step(x, loc, fine):
        def inner(x, loc):
            probe(jnp.where(lax.axis_index("t") == 1, loc, 1), "inner")
            return x + 1

        def outer(x, loc, fine):
            own = jax.shard_map(inner, in_specs=(P(None, "t"), P()), out_specs=P(None, "t"), axis_names={"t"})
            x = own(x, fine)
            probe(loc, "outer")
            return own(x, loc)

        specs = (P("x"), P(), P())
        return jax.shard_map(outer, mesh=mesh, in_specs=specs, out_specs=P("x"), axis_names={"x"})(x, loc, fine)

    step = checked_jit(step, raise_sync=True)
    x = put(mesh, jnp.zeros((4, 4)), "x", "t")
    np.testing.assert_array_equal(step(x, GOOD, GOOD), np.full((4, 4), 2))
    with pytest.raises(KVIndexError, match=r"^outer: "):
        step(x, BAD, GOOD)
    with pytest.raises(KVIndexError, match=r"^inner: "):
        step(x, GOOD, BAD)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
@pytest.mark.parametrize("eager", [False, True], ids=["checked_jit", "eager"])
def test_sharded_ids_and_rows_are_counted_over_all_ranks(axis_type, eager):
    mesh = make_mesh(axis_type, x=4, t=2)
    loc, rows = put(mesh, jnp.arange(8) * 2, "x"), put(mesh, jnp.full((8, 2, 3), jnp.nan), "x", "t")
    probes = {
        "4 of 8 slot ids outside [0, 8); min 0, max 14": lambda a: checks.maybe_detect_oob(a["loc"], 0, 8, "door"),
        "4 of 8 slot ids are no multiple of page_size 4; smallest 2": lambda a: checks.maybe_detect_page_aligned(
            a["loc"], 4, "door"
        ),
        "48 of 48 values are NaN": lambda a: checks.maybe_detect_nan(a["rows"], "door"),
        "7 of 8 rows of k hold NaN; first at slot id 1": lambda a: checks.probe_rows(
            a["rows"], a["whole"], "door", what="k"
        ),
    }
    for message, call in probes.items():
        with pytest.raises(KVIndexError, match=re.escape(message)):
            (call if eager else checked_jit(call, raise_sync=True))(
                {"loc": loc, "rows": rows, "whole": put(mesh, jnp.arange(8))}
            )


@pytest.mark.parametrize("set_mesh", [False, True])
def test_in_a_plain_shard_map_even_concrete_ids_are_an_error(set_mesh):
    mesh = make_mesh(AxisType.Explicit, x=4)
    inner = jax.shard_map(lambda x: (probe(GOOD), x)[1], mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        for run in (inner, jax.jit(inner)):
            with pytest.raises(RuntimeError, match=r"door: checks are on.*shard_map.*jkv\.checked_jit"):
                run(put(mesh, jnp.zeros(8), "x"))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("outer probe, inner int", "inner 9 0"),
        ("outer int, inner probe", "probed: 1 of 2"),
        ("inner bool, inner int", "inner [False  True]"),
        ("inner float, outer int", "inner 13.5"),
        ("outer int, inner int, inner probe", "inner 9 0"),
    ],
)
def test_checks_of_other_payloads_keep_their_own_messages(axis_type, order, message):
    """Codes of checks inside a shard_map must not be taken for those of checks outside of it."""
    mesh = make_mesh(axis_type, x=4)
    kinds = {
        "int": lambda loc: checkify.check((loc < 8).all(), "inner {n} {r}", n=loc.max(), r=lax.axis_index("x")),
        "bool": lambda loc: checkify.check((loc < 8).all(), "inner {b}", b=loc > 3),
        "float": lambda loc: checkify.check((loc < 8).all(), "inner {f}", f=loc.max() * 1.5),
        "probe": lambda loc: probe(loc, "probed"),
    }

    def step(x, loc, fine):
        for place, kind in (word.split() for word in order.split(", ")):
            if place == "inner":

                def body(x, loc, kind=kind):
                    kinds[kind](loc)
                    return x

                x = jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))(x, loc)
            else:
                kinds[kind](fine) if kind == "probe" else checkify.check((fine < 8).all(), "outer {n}", n=fine.max())
        return x

    checked_jit(step)(put(mesh, jnp.zeros(8), "x"), BAD, GOOD)
    with pytest.raises((KVIndexError, ValueError), match=re.escape(message)):
        wait_for_checks()


def test_the_models_own_shard_maps_stay_as_they_are():
    step = functools.partial(door, functools.partial(jax.shard_map, mesh=make_mesh(AxisType.Auto, x=4)))
    text = checked_jit(step).lower(jnp.zeros(8), GOOD).as_text()
    assert "manual_computation" in text
    assert "all_reduce" not in text  # no word of the error is exchanged where no rank checks anything
    inner = functools.partial(inner_door, functools.partial(jax.shard_map, mesh=make_mesh(AxisType.Auto, x=4)))
    assert "all_reduce" in checked_jit(inner).lower(jnp.zeros(8), GOOD).as_text()


# The shim


def two_probes_around_a_shard_map(mesh):
    def step(x, loc):
        for _ in range(2):
            checkify.check((loc < 8).all(), "bad")
            x = jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)
        return x

    return step


def test_jax_still_needs_the_shim():
    """When this fails, JAX's own rule has learnt it: see which cases of this file pass without `_shim._rule`."""
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = make_mesh(axis_type, x=4)
        step = jax.jit(checkify.checkify(two_probes_around_a_shard_map(mesh)))
        with pytest.raises((TypeError, ValueError)):
            step(put(mesh, jnp.zeros(8), "x"), GOOD)


def test_this_jax_has_what_the_shim_stands_on():
    """When this fails, a new JAX has moved private names: `_shim` says which, and is the only file to change."""
    ground = _shim._ground.__wrapped__()
    assert ground.rules[ground.shard_map_p].__module__ == checkify.checkify.__module__
    params = jax.make_jaxpr(jax.shard_map(lambda x: x, mesh=make_mesh(AxisType.Auto, x=4), in_specs=P(), out_specs=P()))
    assert set(params(1.0).eqns[0].params) == _shim._SHARD_MAP_PARAMS


@pytest.mark.parametrize("missing", ["error_checks", "ErrorEffect", "checkify_jaxpr_flat"])
def test_a_jax_without_the_private_names_is_a_clear_error_where_checks_are_on(monkeypatch, missing):
    import sys

    monkeypatch.delattr(sys.modules[checkify.checkify.__module__], missing)
    _shim._ground.cache_clear()
    try:
        step = checked_jit(lambda loc: (probe(loc), loc)[1])
        with pytest.raises(RuntimeError, match=rf"JAX {jax.__version__} differs.*{missing}.*JKV_ENABLE_ASYNC_ASSERT=0"):
            step(GOOD)
        with enable_checks(False):
            step(BAD)
    finally:
        _shim._ground.cache_clear()


def test_a_jax_whose_rules_or_shard_maps_differ_is_a_clear_error(monkeypatch):
    ground = _shim._ground()
    step = two_probes_around_a_shard_map(make_mesh(AxisType.Auto, x=4))
    with monkeypatch.context() as patch:
        patch.setattr(_shim, "_SHARD_MAP_PARAMS", {"jaxpr", "mesh"})
        with pytest.raises(RuntimeError, match=r"differs.*newly_manual_axes"):
            checked_jit(step)(jnp.zeros(8), GOOD)
    monkeypatch.setitem(ground.rules, ground.shard_map_p, lambda state, error, **params: None)
    with pytest.raises(RuntimeError, match=r"differs.*state"):
        _shim._ground.__wrapped__()


def test_others_see_jaxs_rule_during_and_after_a_checked_trace():
    mesh = make_mesh(AxisType.Auto, x=4)
    ground = _shim._ground()
    stock = ground.rules[ground.shard_map_p]
    tracing, done = threading.Event(), threading.Event()

    def slow(x, loc):
        out = two_probes_around_a_shard_map(mesh)(x, loc)
        tracing.set()
        done.wait(10)
        return out

    def work():
        with enable_checks():
            checked_jit(slow)(put(mesh, jnp.zeros(8), "x"), BAD)

    thread = threading.Thread(target=work)
    thread.start()
    assert tracing.wait(10)
    try:
        assert ground.rules[ground.shard_map_p] is not stock
        with pytest.raises((TypeError, ValueError)):
            jax.jit(checkify.checkify(two_probes_around_a_shard_map(mesh)))(put(mesh, jnp.zeros(8), "x"), GOOD)
        with pytest.raises(KeyError):  # a trace here that ends, badly, while the other is open
            checked_jit(lambda: {}["no such key"])()
        checked_jit(two_probes_around_a_shard_map(mesh))(put(mesh, jnp.zeros(8), "x"), GOOD)
    finally:
        done.set()
        thread.join()
    assert ground.rules[ground.shard_map_p] is stock
    with pytest.raises(checkify.JaxRuntimeError, match="bad"):
        wait_for_checks()
