"""Probes, the switch, and where a probe's report surfaces."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

from jkv import checked, checks
from jkv.checked import checked_jit, wait_for_checks
from jkv.checks import KVIndexError, enable_checks

BOUND = 48
HOW = "(size 8 + page_size 4) * dcp_size 4"


def probe(loc, label="door", **options):
    checks.probe_ids(loc, label, bound=BOUND, how=HOW, **options)


def write(pool, loc):
    probe(loc, distinct=True)
    return pool.at[jnp.where(loc < BOUND, loc, BOUND)].set(1, mode="drop")


def outside(loc, low=0, high=BOUND, label="door"):
    checks.maybe_detect_oob(loc, low, high, label)
    return loc


@pytest.fixture(autouse=True)
def _checks_on():
    with enable_checks():
        yield
        checked._pending.clear()


# The switch


@pytest.mark.parametrize(("value", "on"), [(None, False), ("0", False), ("1", True), ("true", True)])
def test_the_environment_is_the_default(value, on):
    env = {k: v for k, v in os.environ.items() if k != "JKV_ENABLE_ASYNC_ASSERT"}
    env |= {} if value is None else {"JKV_ENABLE_ASYNC_ASSERT": value}
    code = "import jkv.checks; print(jkv.checks.checks_enabled())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(on)]


def test_the_switch_nests_decorates_and_is_restored_by_an_exception():
    @enable_checks(False)
    def off():
        return checks.checks_enabled()

    with enable_checks(False):
        with enable_checks():
            assert checks.checks_enabled()
            assert not off()
            assert not off()
        assert not checks.checks_enabled()
    with pytest.raises(KeyError), enable_checks(False):
        raise KeyError
    assert checks.checks_enabled()


def test_the_switch_is_of_this_thread():
    seen = []
    with enable_checks(not checks._switch.get_global()):
        thread = threading.Thread(target=lambda: seen.append(checks.checks_enabled()))
        thread.start()
        thread.join()
        assert seen == [not checks.checks_enabled()]


def test_off_the_program_is_the_one_without_the_calls():
    loc, rows = jnp.arange(4), jnp.ones((4, 2))

    def step(loc, rows, layer):
        probe(loc, layer=layer, distinct=True)
        checks.probe_rows(rows, loc, "door", what="k")
        checks.probe_layer(layer, 0, 2, "door")
        outside(loc)
        checks.maybe_detect_page_aligned(loc, 4, "door")
        checks.maybe_detect_nan(rows, "door")
        return rows[loc]

    def bare(loc, rows, layer):
        return rows[loc]

    bare.__name__ = "step"
    with enable_checks(False):
        text = jax.jit(bare).lower(loc, rows, 0).as_text()
        assert jax.jit(step).lower(loc, rows, 0).as_text() == text
        assert checked_jit(step).lower(loc, rows, 0).as_text() == text
        outside(np.array([99]))  # eagerly too
    assert checked_jit(step).lower(loc, rows, 0).as_text() != text


def test_an_inner_jit_is_traced_again_in_each_state():
    inner = jax.jit(outside)
    step = checked_jit(lambda loc: inner(loc))
    bad = jnp.array([99])
    with enable_checks(False):
        inner(bad)
        step(bad)
    step(bad)
    with pytest.raises(KVIndexError, match="1 of 1"):
        wait_for_checks()
    with pytest.raises(RuntimeError, match="checked_jit"):
        inner(bad)
    with enable_checks(False):
        step(bad)
    wait_for_checks()


# What a probe says


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: outside([3, -1, 60]), r"door: 2 of 3 slot ids outside \[0, 48\); min -1, max 60"),
        (lambda: outside(np.int8([[3, -1]]), low=1), r"door: 1 of 2 slot ids outside \[1, 48\); min -1, max 3"),
        (lambda: outside(7, high=7), r"door: 1 of 1 slot ids outside \[0, 7\); min 7, max 7"),
        (
            lambda: probe(jnp.array([0, -1, 5, 48]), layer=3),
            r"door, layer 3: 2 of 4 slot ids outside \[0, 48\) = \(size 8 \+ page_size 4\) \* dcp_size 4; "
            "min -1, max 48",
        ),
        (
            lambda: probe(np.int16([0, -1, 5, 47, -2]), padding_slot=-1, layer=np.int32(0)),
            r"door, layer 0: 1 of 5 slot ids outside \[0, 48\) = .*; min -2, max 47",
        ),
        (
            lambda: probe([9, 5, 7, 5, 9, 9, 0, 0], distinct=True),
            r"door: 2 of 8 slot ids are written twice; smallest 5",
        ),
        (lambda: probe([5, 5, 48], distinct=True), r"door: 1 of 3 slot ids outside .*; min 5, max 48"),
        (
            lambda: checks.probe_rows(jnp.array([[1, 2.0], [0, jnp.nan], [jnp.nan] * 2]), [4, 6, 7], "door", what="k"),
            r"door: 2 of 3 rows of k hold NaN; first at slot id 6",
        ),
        (lambda: checks.probe_layer(jnp.int32(7), 4, 2, "door"), r"door: layer 7 outside \[4, 6\)"),
        (lambda: checks.probe_layer(3, 4, 2, "door"), r"door: layer 3 outside \[4, 6\)"),
        (
            lambda: checks.maybe_detect_page_aligned([0, 8, 6, 5], 4, "door"),
            r"door: 2 of 4 slot ids are no multiple of page_size 4; smallest 5",
        ),
        (lambda: checks.maybe_detect_nan(jnp.array([[jnp.nan, 1]]), "door"), r"door: 1 of 2 values are NaN"),
        (lambda: checks.maybe_detect_nan(float("nan"), "door"), r"door: 1 of 1 values are NaN"),
        (
            lambda: checks.probe_rows(jnp.full((1, 2), jnp.nan, jnp.float8_e4m3fn), [9], "{door}", what="{k}", layer=1),
            r"\{door\}, layer 1: 1 of 1 rows of \{k\} hold NaN; first at slot id 9",
        ),
    ],
)
def test_an_eager_probe_raises_one_line_at_once(call, message):
    with pytest.raises(KVIndexError, match=f"^{message}$") as caught:
        call()
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, IndexError)
    assert caught.value.outputs is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: outside([0, 47]),
        lambda: probe([0, 0, 47, 5], distinct=True),
        lambda: probe([-1, -1, 47], padding_slot=-1, distinct=True),
        lambda: probe(np.zeros(0, np.int32), distinct=True),
        lambda: probe([7], distinct=True),
        lambda: outside(jnp.zeros((0,), jnp.int32)),
        lambda: outside([]),
        lambda: checks.probe_rows(jnp.full((2, 3), jnp.nan), [0, -1], "door", padding_slot=-1, what="k"),
        lambda: checks.probe_rows(jnp.zeros((0, 3)), np.zeros(0, np.int32), "door", what="k"),
        lambda: checks.probe_rows(jnp.zeros((1, 3), jnp.uint16), [4], "door", what="k"),
        lambda: checks.maybe_detect_nan(jnp.zeros((2, 0)), "door"),
        lambda: checks.maybe_detect_nan(jnp.arange(3), "door"),
        lambda: checks.maybe_detect_page_aligned([0, 4], 4, "door"),
        lambda: checks.maybe_detect_page_aligned([], 4, "door"),
        lambda: checks.probe_layer(5, 4, 2, "door"),
    ],
)
def test_a_probe_of_fine_values_and_of_nothing_is_silent(call):
    call()

    def step():
        call()

    checked_jit(step, raise_sync=True)()


def test_ids_that_32_bits_cannot_hold_are_out_of_range_not_wrapped():
    for loc in (np.int64([2**32 + 5]), np.uint64([2**64 - 1]), np.int64([-(2**40)])):
        with pytest.raises(KVIndexError, match="1 of 1 slot ids outside"):
            outside(loc)
    with pytest.raises(KVIndexError, match="max 2147483647"):
        checked_jit(lambda: outside(np.int64([2**32 + 5])), raise_sync=True)()


@pytest.mark.parametrize("dtype", ["int8", "int16", "int64"])
def test_ids_of_any_width_are_counted_in_full(dtype):
    with jax.enable_x64(dtype == "int64"):
        loc = jnp.array([-5, 5, 100] if dtype != "int64" else [-5, 5, 2**40 + 7], dtype)
        with pytest.raises(KVIndexError, match=f"2 of 3 slot ids outside .*; min -5, max {loc[2]}$"):
            checked_jit(lambda loc: probe(loc, distinct=True), raise_sync=True)(loc)
        with pytest.raises(KVIndexError, match=f"2 of 3 slot ids outside .*; min -5, max {loc[2]}$"):
            probe(loc)


def test_a_bound_that_the_ids_dtype_cannot_hold_is_not_wrapped_into_it():
    loc = jnp.array([-5, 5, 100, 64], jnp.int8)
    with pytest.raises(KVIndexError, match=r"1 of 4 slot ids outside .*; min -5, max 100$"):
        checks.probe_ids(loc, "door", bound=33000, how="B")
    with pytest.raises(KVIndexError, match="4 of 4 slot ids are no multiple of page_size 256"):
        checks.maybe_detect_page_aligned(loc, 256, "door")
    checks.probe_ids(loc[1:], "door", bound=33000, how="B", distinct=True)


def test_ids_that_are_no_integers_are_a_type_error():
    for loc in ([1.0], np.array([True])):
        with pytest.raises(TypeError, match=r"door: slot ids must be integers, got (float|bool)"):
            outside(loc)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: lambda *a: jax.eval_shape(f, *a)])
def test_traced_by_anything_but_checked_jit_is_an_error_that_says_what_to_do(transform):
    with pytest.raises(RuntimeError, match=r"^door: checks are on, and a plain jax.jit.*jkv.checked_jit"):
        transform(probe)(jnp.array([[1, 2]]))


def test_concrete_ids_are_decided_at_once_even_in_a_trace():
    def f(x, loc):
        probe(loc)
        return x

    jax.jit(lambda x: f(x, np.array([1, 2])))(0)
    with pytest.raises(KVIndexError, match="max 99"):
        jax.jit(lambda x: f(x, jnp.array([99])) if False else f(x, np.array([99])))(0)

    def compile_time(x):
        with jax.ensure_compile_time_eval():
            probe(jnp.array([99]))
        return x

    with pytest.raises(KVIndexError, match="max 99"):
        checked_jit(compile_time)(0)


def test_constant_ids_in_a_checked_step_are_reported_only_if_they_are_reached():
    def step(reached):
        return lax.cond(reached, lambda: outside(jnp.array([99]))[0], lambda: 0)

    step = checked_jit(step, raise_sync=True)
    step(False)
    with pytest.raises(KVIndexError, match="max 99"):
        step(True)


def test_an_eager_probe_runs_one_program(caplog):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    loc = jax.device_put(jnp.arange(13), jax.NamedSharding(mesh, jax.P()))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        outside(loc)
    assert sum("Compiling" in record.message for record in caplog.records) == 1


# Where the report surfaces


def test_outputs_come_at_once_and_wait_for_checks_raises_later():
    step = checked_jit(write, donate_argnums=0)
    pool = step(jnp.zeros(BOUND, jnp.int32), jnp.array([3, 99]))
    np.testing.assert_array_equal(np.nonzero(pool)[0], [3])
    with pytest.raises(KVIndexError, match=r"^door: 1 of 2 .* min 3, max 99$") as caught:
        wait_for_checks()
    assert caught.value.outputs is None
    wait_for_checks()


def test_the_earliest_error_first_and_later_ones_stay_pending():
    steps = [checked_jit(lambda loc, label=label: outside(loc, label=label)) for label in "abc"]
    for step, loc in zip(steps, ([98], [1], [99]), strict=True):
        step(jnp.array(loc))
    with pytest.raises(KVIndexError, match=r"a: .* max 98"):
        wait_for_checks()
    with pytest.raises(KVIndexError, match=r"c: .* max 99"):
        wait_for_checks()
    wait_for_checks()


def test_the_next_call_raises_before_it_runs():
    step = checked_jit(write, donate_argnums=0)
    pool = step(jnp.zeros(BOUND, jnp.int32), jnp.array([3, 99]))
    with pytest.raises(KVIndexError, match="max 99"):
        step(pool, jnp.array([4]))
    assert not pool.is_deleted()
    pool = step(pool, jnp.array([4]))
    np.testing.assert_array_equal(np.nonzero(pool)[0], [3, 4])
    wait_for_checks()


def test_raise_sync_raises_at_once_with_the_outputs():
    step = checked_jit(write, donate_argnums=0, raise_sync=True)
    with pytest.raises(KVIndexError, match="max 99") as caught:
        step(jnp.zeros(BOUND, jnp.int32), jnp.array([3, 99]))
    pool = step(caught.value.outputs, jnp.array([4]))
    np.testing.assert_array_equal(np.nonzero(pool)[0], [3, 4])
    wait_for_checks()


def test_the_first_of_several_checks_speaks():
    def step(loc):
        outside(loc, high=50, label="first")
        outside(loc, high=40, label="second")
        checkify.check(loc.sum() < 10, "third")

    step = checked_jit(step, raise_sync=True)
    for loc, label in ([60], "first"), ([45], "second"):
        with pytest.raises(KVIndexError, match=f"^{label}: 1 of 1"):
            step(jnp.array(loc))


def test_a_check_of_the_callers_own_surfaces_as_checkifys_error():
    step = checked_jit(lambda x: checkify.check((x > 0).all(), "got {x} and {}", x[0], x=x.min()), raise_sync=True)
    step(jnp.ones(2))
    with pytest.raises(checkify.JaxRuntimeError, match=r"^got -2\.0 and 1\.0$"):
        step(jnp.array([1.0, -2.0]))


def test_off_it_is_the_jitted_function_of_the_moment():
    step = checked_jit(write, donate_argnums=0)
    with enable_checks(False):
        pool = step(jnp.zeros(BOUND, jnp.int32), jnp.array([3, 99]))
        plain = jax.jit(write, donate_argnums=0)
        assert step.lower(pool, jnp.array([3])).as_text() == plain.lower(pool, jnp.array([3])).as_text()
        assert isinstance(step.lower(pool, jnp.array([3])), jax.stages.Lowered)
        exported = jax.export.export(step)(pool, jnp.array([3]))
        assert exported.out_avals == (jax.typeof(pool),)
        assert jax.jit(lambda pool: step(pool, jnp.array([3])))(pool).sum() == 1
    wait_for_checks()
    step(pool, jnp.array([3, 99]))
    with pytest.raises(KVIndexError, match="max 99"):
        wait_for_checks()


def test_a_step_without_probes_leaves_no_verdict():
    step = checked_jit(lambda x: x + 1)
    assert step(1) == 2
    assert not checked._pending
    assert jax.vmap(step)(jnp.arange(2)).tolist() == [1, 2]


# The options and methods of jit


def test_static_and_keyword_arguments_and_trees_with_none():
    traces = []

    def step(tree, loc, *, high, scale=None):
        traces.append(high)
        outside(loc, high=high)
        return {"tree": tree, "scale": scale, "n": high}

    step = checked_jit(step, static_argnames="high", raise_sync=True)
    out = step({"a": None, "b": jnp.ones(2)}, loc=jnp.array([3]), high=4)
    assert (out["tree"]["a"], out["scale"], int(out["n"])) == (None, None, 4)
    step({"a": None, "b": jnp.ones(2)}, loc=jnp.array([2]), high=4)
    assert traces == [4]
    with pytest.raises(KVIndexError, match=r"\[0, 3\)"):
        step(None, jnp.array([3]), high=3)
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        step(None, jnp.array([3]), high=[3])


def test_static_argnums_and_another_shape():
    step = checked_jit(lambda high, loc: outside(loc, high=high), static_argnums=0, raise_sync=True)
    step(4, jnp.array([3]))
    for loc in ([3, 9], [9, 9, 9]):
        with pytest.raises(KVIndexError, match=f"of {len(loc)} "):
            step(4, jnp.array(loc))


def test_out_shardings_are_those_of_the_outputs():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    split, whole = jax.NamedSharding(mesh, jax.P("x")), jax.NamedSharding(mesh, jax.P())
    for out_shardings in ((split, whole), split, None):
        step = checked_jit(lambda x, loc: (x, outside(loc)), out_shardings=out_shardings, in_shardings=(whole, whole))
        x, loc = step(jnp.zeros(8), jnp.array([1, 2, 3, 99]))
        if out_shardings is not None:
            assert x.sharding == split
            assert loc.sharding == (whole if isinstance(out_shardings, tuple) else split)
        with pytest.raises(KVIndexError, match="max 99"):
            wait_for_checks()


def test_a_decorator_and_a_method():
    class Model:
        @checked_jit(static_argnums=0, raise_sync=True)
        def step(self, loc):
            """Steps."""
            return outside(loc)

    assert Model.step.__name__ == "step"
    assert Model.step.__doc__ == "Steps."
    assert Model().step(jnp.array([1])).tolist() == [1]
    with pytest.raises(KVIndexError, match="max 99"):
        Model().step(jnp.array([99]))


def test_ahead_of_time_compilation_shows_and_returns_the_outputs_and_reports():
    step = checked_jit(write, donate_argnums=0)
    pool, loc = jnp.zeros(BOUND, jnp.int32), jnp.array([3, 99])
    shape = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    assert step.eval_shape(pool, loc) == shape
    traced = step.trace(pool, loc)
    lowered = step.lower(pool, loc)
    compiled = lowered.compile()
    for stage in (traced, lowered, compiled):
        assert (stage.out_info.shape, stage.out_info.dtype) == (pool.shape, pool.dtype)
    assert compiled.out_tree == jax.tree.structure(0)
    assert isinstance(compiled.output_shardings, jax.sharding.Sharding)
    assert "input_output_alias" in compiled.as_text()
    pool = compiled(pool, loc)
    with pytest.raises(KVIndexError, match="max 99"):
        compiled(pool, loc)
    assert not pool.is_deleted()
    with enable_checks(False):
        assert step.eval_shape(pool, loc).shape == pool.shape


def test_clear_cache_and_other_attributes_are_the_jitted_functions():
    step = checked_jit(lambda loc: outside(loc))  # jax shares its cache between jits of one function
    step(jnp.array([1]))
    assert step._cache_size() == 1
    with enable_checks(False):
        assert step._cache_size() == 0
    step.clear_cache()
    assert step._cache_size() == 0
    assert not hasattr(step, "no_such")


def test_exported_with_checks_on_is_an_error():
    with pytest.raises(RuntimeError, match=r"^outside: .*can't be exported.*enable_checks\(False\)"):
        jax.export.export(checked_jit(outside))(jnp.array([1]))
    with pytest.raises(RuntimeError, match=r"^door: checks are on.*jkv.checked_jit"):
        jax.export.export(jax.jit(outside))(jnp.array([1]))


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.vmap,
        jax.make_jaxpr,
        lambda f: lambda x: jax.eval_shape(f, x),
        lambda f: lambda x: jax.lax.map(f, x),
    ],
)
def test_a_step_inside_a_plain_transformation_is_an_error(transform):
    with pytest.raises(RuntimeError, match=r"^outside: .*inside a plain jax.jit.*outermost"):
        transform(checked_jit(outside))(jnp.array([1, 2]))
    wait_for_checks()


def test_a_step_inside_a_step_reports_through_the_outer_one():
    inner = checked_jit(lambda loc: outside(loc, label="inner"), raise_sync=True)

    def outer(loc):
        return inner(outside(inner(loc), high=50, label="outer"))

    step = checked_jit(outer)
    step(jnp.array([99]))
    assert len(checked._pending) == 1
    with pytest.raises(KVIndexError, match=r"^inner: .* max 99"):
        wait_for_checks()


# State, memory, threads


def test_an_exception_in_the_step_leaves_everything_as_it_was():
    def step(loc, fail):
        outside(loc)
        if fail:
            raise KeyError("mid-trace")
        return loc

    step = checked_jit(step, static_argnums=1)
    with pytest.raises(KeyError, match="mid-trace"):
        step(jnp.array([1]), True)
    with pytest.raises(RuntimeError, match=r"jkv\.checked_jit"):
        jax.jit(outside)(jnp.array([1]))
    step(jnp.array([99]), False)
    with pytest.raises(KVIndexError, match="max 99"):
        wait_for_checks()


def test_a_part_of_a_step_can_be_left_unchecked():
    def step(loc):
        with enable_checks(False):
            outside(loc, label="unseen")
            with enable_checks():
                outside(loc, high=100, label="seen")
        return loc

    step = checked_jit(step, raise_sync=True)
    step(jnp.array([99]))
    with pytest.raises(KVIndexError, match=r"^seen"):
        step(jnp.array([100]))


def test_without_jit_a_step_still_reports():
    with jax.disable_jit():
        step = checked_jit(outside)
        step(jnp.array([99]))
        with pytest.raises(KVIndexError, match="max 99"):
            wait_for_checks()


def test_clean_verdicts_and_steps_that_are_gone_are_not_kept():
    big = jnp.zeros(1000)
    for _ in range(50):
        checked_jit(lambda loc, x: (outside(loc), x + 1))(jnp.array([1]), big)[0].block_until_ready()
    assert len(checked._pending) <= 2
    step = checked_jit(outside)
    for _ in range(50):
        step(jnp.array([1]))
    assert len(checked._pending) <= 2
    gone = weakref.ref(step)
    del step
    wait_for_checks()
    gc.collect()
    assert gone() is None


def test_steps_in_several_threads_lose_nothing():
    step = checked_jit(outside)
    seen: list[str] = []

    def work(worker):
        with enable_checks():
            for i in range(20):
                try:
                    step(jnp.array([1000 * worker + i]))
                except KVIndexError as error:
                    seen.append(str(error))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while checked._pending:
        try:
            wait_for_checks()
        except KVIndexError as error:
            seen.append(str(error))
    # A call that raises about the one before does not run: each report is of a different call.
    assert len(seen) == len(set(seen)) >= 30


def test_a_donated_pool_stays_in_place_whatever_its_size():
    temp = []
    for rows in (1 << 10, 1 << 14):

        def step(pool, loc, values, rows=rows):
            for layer in range(4):
                checks.probe_ids(loc, "door", bound=rows, how="rows", layer=layer, distinct=True)
                checks.probe_rows(values, loc, "door", what="k", layer=layer)
                pool = pool.at[loc + layer].set(values.view(jnp.uint32), mode="drop")
            return pool

        arguments = jnp.zeros((rows, 16), jnp.uint32), jnp.arange(32) * 4, jnp.ones((32, 16))
        memory = checked_jit(step, donate_argnums=0).lower(*arguments).compile().memory_analysis()
        assert memory.alias_size_in_bytes == rows * 16 * 4
        temp.append(memory.temp_size_in_bytes)
    assert temp[0] == temp[1]
    assert temp[0] < 1 << 16
