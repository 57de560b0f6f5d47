"""checkify that works through any number of shard_maps: the only file that uses private JAX.

checkify's own rule for `shard_map` turns the error into one value per device. The next check then cannot merge with it
(`select cases must have the same shapes`), nor can a scan carry it, nor an Explicit mesh or `jax.set_mesh` type it. The
rule here runs checkify inside the shard_map, lets the lowest rank that failed speak, and returns one replicated scalar
error. It stands in for JAX's rule only in a thread that is inside `functionalise`: other users of checkify see JAX's.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec

# True while this thread traces a function whose checks become an output. It is part of jit's cache key, so that an
# inner jit traced in here, checks and all, is never reused outside, nor the reverse.
_functionalising = jax.make_user_context(False)

_SHARD_MAP_PARAMS = {"jaxpr", "mesh", "in_specs", "out_specs", "check_vma", "newly_manual_axes"}
_ERROR_FIELDS = ["_pred", "_code", "_metadata", "_payload"]


def functionalising() -> bool:
    """Whether this thread is tracing inside `functionalise`, where `checkify.check` may be called."""
    return _functionalising.value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What the checks of a call found: checkify's error as a few arrays, for its own PyTree is slow to build each time.

    All are replicated, so that each process has its own copy where a mesh spans several.
    """

    flags: tuple[jax.Array, ...]  # bool scalars, one for each kind of check in the program: whether one failed
    details: tuple[jax.Array, ...]
    tree: Any = dataclasses.field(metadata={"static": True})

    def first_failed(self) -> Any | None:
        """The check that failed first, with its `fmt_string`, `args` and `kwargs`, or None; waits for the call."""
        if not any(np.asarray(flag) for flag in self.flags):
            return None
        values = [np.asarray(x) for x in self.flags + self.details]
        return jax.tree.unflatten(self.tree, values).get_exception()


def functionalise(fn: Callable) -> Callable:
    """`fn` with its `checkify.check` calls turned into an output: it returns a `Report` and what `fn` returns.

    Raises:
      RuntimeError: at the first trace, on a JAX whose checkify is not the one that this file was written for.
    """

    @functools.wraps(fn)
    def functionalised(*args: Any, **kwargs: Any) -> tuple[Report, Any]:
        with _functionalising(True), _shard_map_rule():
            error, out = checkify.checkify(fn, errors=checkify.user_checks)(*args, **kwargs)
        values, tree = jax.tree.flatten(error)
        kinds = len(error._pred)
        return Report(tuple(values[:kinds]), tuple(values[kinds:]), tree), out

    return functionalised


class _Ground(NamedTuple):
    """What this file uses of private JAX."""

    rules: dict[Any, Callable]  # by primitive
    shard_map_p: Any
    error_effect: type  # among the effects of a jaxpr that has checks
    checkify_flat: Callable  # runs a jaxpr on top of an error
    takes_context: bool  # whether rules and checkify_flat get a namespace of check codes first, as in newer JAX


def _unknown_jax(why: object) -> RuntimeError:
    return RuntimeError(
        f"jkv's checks know the checkify of JAX 0.10.2 to 0.12, and that of JAX {jax.__version__} differs ({why}): "
        "use a JAX in that range, or turn the checks off (JKV_ENABLE_ASYNC_ASSERT=0)"
    )


@functools.cache
def _ground() -> _Ground:
    # Not imported at the top: a JAX that moved these names must not take down programs that run without checks.
    try:
        from jax._src import checkify as private
        from jax._src import shard_map

        primitive, rules, flat = shard_map.shard_map_p, private.error_checks, private.checkify_jaxpr_flat
        rule_takes = list(inspect.signature(rules[primitive]).parameters)
        context = rule_takes[:1] if rule_takes[0] == "ctx" else []
        found = rule_takes[: len(context) + 2], list(inspect.signature(flat).parameters)
        known = (
            [*context, "error", "enabled_errors"],
            [*context, "jaxpr", "consts", "enabled_errors", "err_tree", "args"],
        )
        if found != known:
            raise AttributeError(f"rules and checkify_jaxpr_flat take {found}, not {known}")
        if [field.name for field in dataclasses.fields(checkify.Error)] != _ERROR_FIELDS:
            raise AttributeError(f"an error has {dataclasses.fields(checkify.Error)}")
        return _Ground(rules, primitive, private.ErrorEffect, flat, bool(context))
    except (ImportError, AttributeError, KeyError) as e:
        raise _unknown_jax(repr(e)) from e


_lock = threading.Lock()
_scopes = 0  # open now, over all threads
_stock: Callable  # JAX's rule, while a scope is open


@contextlib.contextmanager
def _shard_map_rule() -> Iterator[None]:
    """Keeps our rule in checkify's table while a scope is open in any thread; `_dispatch` gives each thread its own."""
    global _scopes, _stock
    ground = _ground()
    with _lock:
        if not _scopes:
            _stock = ground.rules[ground.shard_map_p]
            ground.rules[ground.shard_map_p] = functools.partial(_dispatch, _stock)
        _scopes += 1
    try:
        yield
    finally:
        with _lock:
            _scopes -= 1
            if not _scopes:
                ground.rules[ground.shard_map_p] = _stock


def _dispatch(stock: Callable, *args: Any, **params: Any) -> tuple[checkify.Error, list]:
    return (_rule if functionalising() else stock)(*args, **params)


def _rule(*args: Any, **params: Any) -> tuple[checkify.Error, list]:
    """checkify's rule for shard_map, called as checkify does: `([context,] error, enabled, *operands, **params)`."""
    ground = _ground()
    if set(params) != _SHARD_MAP_PARAMS:
        raise _unknown_jax(f"a shard_map has {sorted(params)}")
    context, (error, enabled, *operands) = args[: ground.takes_context], args[ground.takes_context :]
    jaxpr, mesh = params["jaxpr"], params["mesh"]
    effects = {effect for effect in jaxpr.effects if isinstance(effect, ground.error_effect)}
    if not effects:
        as_it_was = ground.shard_map_p.get_bind_params(params)
        return error, list(ground.shard_map_p.bind(*operands, **as_it_was))
    axes = tuple(axis for axis in mesh.axis_names if axis in params["newly_manual_axes"])  # in the order of ranks
    error_values, tree = jax.tree.flatten(error._add_placeholder_effects(effects))

    def body(error_values: list[jax.Array], *operands: Any) -> tuple[checkify.Error, tuple]:
        # Each rank has its own error from here on, also by its type: a loop or a cond in here can then hand it on,
        # whether or not what it checks differs between ranks.
        error_values = [lax.pcast(x, axes, to="varying") for x in error_values]
        consts = getattr(jaxpr, "consts", ())
        error, out = ground.checkify_flat(*context, jaxpr, consts, enabled, tree, *error_values, *operands)
        return _lowest_rank_speaks(error, axes), tuple(out)

    error, out = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(PartitionSpec(), *params["in_specs"]),
        out_specs=(PartitionSpec(), tuple(params["out_specs"])),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )([jnp.asarray(x) for x in error_values], *operands)
    return error, list(out)


def _lowest_rank_speaks(error: checkify.Error, axes: tuple[str, ...]) -> checkify.Error:
    """The error of the lowest rank over `axes` that has one, on every rank."""
    rank, ranks = lax.axis_index(axes), lax.axis_size(axes)
    pred: dict[Any, Any] = {}
    code: dict[Any, Any] = {}
    payload: dict[Any, Any] = {}
    for effect, failed in error._pred.items():
        first = lax.pmin(jnp.where(failed, rank, ranks), axes)

        def of_first(x: Any, speaks: jax.Array = rank == first) -> jax.Array:
            return lax.psum(jnp.where(speaks, x, jnp.zeros_like(x)), axes).astype(x.dtype)

        pred[effect] = first < ranks
        code[effect] = of_first(error._code[effect])
        payload[effect] = [of_first(x) for x in error._payload[effect]]
    return checkify.Error(pred, code, error._metadata, payload)
