"""Probes of slot ids and rows, and the switch that turns them on.

Off (the default) a probe does nothing, and the program is the one without it. On, a probe of concrete values raises at
once; inside `jkv.checked_jit` it becomes a scalar output of the program, read later and without a sync at the call.
Every probe of a program reports the same four integers, so that one error value serves them all.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.typing import ArrayLike

from jkv import _shim

# The keyword by which a probe hands its four numbers to checkify (a check of the caller's own has others), and where a
# message shows them. The first number counts what is wrong; 0 is silence.
PROBE_KEYWORD = "jkv"
_COUNT, _FIRST, _SECOND, _LAYER = "{jkv[0]}", "{jkv[1]}", "{jkv[2]}", "{jkv[3]}"

# Part of jit's cache key: an inner jit traced without checks must not silence those of a checked step, nor the reverse.
_switch = jax.make_user_context(os.environ.get("JKV_ENABLE_ASYNC_ASSERT", "").lower() in ("1", "true"))


class KVIndexError(IndexError):
    """A slot id, a layer or a row that no pool can hold, reported by a probe.

    Attributes:
      outputs: what the step returned, where it was made with `checked_jit(..., raise_sync=True)`; None otherwise. The
        outputs are valid: what was out of range was dropped.
    """

    outputs: Any = None


@contextlib.contextmanager
def enable_checks(enabled: bool = True) -> Iterator[None]:
    """Turns the probes on, or off, in this thread for a `with` block or for a decorated function.

    Outside of any such block the environment decides: on with `JKV_ENABLE_ASYNC_ASSERT=1` at import. Blocks nest.
    """
    with _switch(bool(enabled)):
        yield


def checks_enabled() -> bool:
    """Whether probes are on in this thread."""
    return _switch.value


def maybe_detect_oob(loc: ArrayLike, low: int, high: int, label: str) -> None:
    """Reports ids outside `[low, high)`, where checks are on.

    Args:
      loc: integer ids of any shape.
      low: the smallest id that is fine.
      high: one more than the largest.
      label: who asks; the message begins with it.

    Raises:
      KVIndexError: at once for concrete ids; inside `jkv.checked_jit` from `jkv.wait_for_checks` or the next call.
      TypeError: ids that are not integers.
      RuntimeError: the ids are traced, and not by `jkv.checked_jit`.
    """
    if checks_enabled() and (ids := _ids(loc, label)).size:
        _report_outside(label, None, ids, low, high, f"[{low}, {high})")


def maybe_detect_page_aligned(loc: ArrayLike, page_size: int, label: str) -> None:
    """Reports ids that no page begins with (`loc % page_size != 0`), where checks are on.

    Args:
      loc: integer ids of any shape, as a kernel takes that addresses whole pages.
      page_size: ids of a page, positive.
      label: who asks; the message begins with it.

    Raises:
      KVIndexError, TypeError, RuntimeError: as `maybe_detect_oob`.
    """
    if checks_enabled() and (ids := _ids(loc, label)).size:
        text = f"{_COUNT} of {ids.size} slot ids are no multiple of page_size {page_size}; smallest {_FIRST}"
        _report(label, None, text, _measure_misaligned, ids, page_size)


def maybe_detect_nan(x: ArrayLike, label: str) -> None:
    """Reports NaN in `x` (any shape; integers have none), where checks are on.

    Raises:
      KVIndexError, RuntimeError: as `maybe_detect_oob`.
    """
    if checks_enabled() and _may_hold_nan(x):
        _report(label, None, f"{_COUNT} of {np.size(x)} values are NaN", _measure_nan, x)


def probe_ids(
    loc: ArrayLike,
    label: str,
    *,
    bound: int,
    how: str,
    padding_slot: int = 0,
    layer: ArrayLike | None = None,
    distinct: bool = False,
) -> None:
    """A door's probe of its slot ids: all but padding in `[0, bound)`, and `distinct` ones written once.

    Args:
      loc: integer ids `[N]`.
      label: the door.
      bound: ids of the slot space.
      how: how `bound` comes about, for the message.
      padding_slot: an id that is skipped, as 0 always is.
      layer: the layer addressed, a number or a traced one; None where the door addresses all.
      distinct: also report ids that occur more than once. Out of range goes first.

    Raises:
      KVIndexError, TypeError, RuntimeError: as `maybe_detect_oob`.
    """
    if not checks_enabled() or not (ids := _ids(loc, label)).size:
        return
    padding = _padding(padding_slot)
    _report_outside(label, layer, ids, 0, bound, f"[0, {bound}) = {how}", padding)
    if distinct:
        text = f"{_COUNT} of {ids.size} slot ids are written twice; smallest {_FIRST}"
        _report(label, layer, text, functools.partial(_measure_repeated, padding=padding), ids, bound)


def probe_rows(
    rows: ArrayLike,
    loc: ArrayLike,
    label: str,
    *,
    padding_slot: int = 0,
    what: str,
    layer: ArrayLike | None = None,
) -> None:
    """A door's probe of the rows that it writes: no NaN, except in rows whose id is padding.

    Args:
      rows: `[N, ...]`; of integers there is nothing to probe.
      loc: integer ids `[N]`.
      label: the door.
      padding_slot: an id whose rows are skipped, as those of 0 always are.
      what: the argument that holds the rows.
      layer: as for `probe_ids`.

    Raises:
      KVIndexError, RuntimeError: as `maybe_detect_oob`.
    """
    if checks_enabled() and _may_hold_nan(rows):
        ids = _ids(loc, label)
        text = f"{_COUNT} of {ids.size} rows of {_literal(what)} hold NaN; first at slot id {_FIRST}"
        _report(label, layer, text, functools.partial(_measure_nan_rows, padding=_padding(padding_slot)), rows, ids)


def probe_layer(layer_id: ArrayLike, start: int, count: int, label: str) -> None:
    """A door's probe of a (traced) layer number: `start <= layer_id < start + count`.

    Raises:
      KVIndexError, RuntimeError: as `maybe_detect_oob`.
    """
    if checks_enabled():
        text = f"layer {_FIRST} outside [{start}, {start + count})"
        _report(label, None, text, _measure_layer, layer_id, start, start + count - 1)


def _report_outside(
    label: str,
    layer: ArrayLike | None,
    ids: ArrayLike,
    low: int,
    high: int,
    span: str,
    padding: tuple[int, ...] = (),
) -> None:
    text = f"{_COUNT} of {np.size(ids)} slot ids outside {_literal(span)}; min {_FIRST}, max {_SECOND}"
    # The last id rather than the bound: that is one more than an id, and may not fit.
    limits = np.iinfo(_dtype())
    low, last = max(low, int(limits.min)), min(high - 1, int(limits.max))
    _report(label, layer, text, functools.partial(_measure_outside, padding=padding), ids, low, last)


def _report(
    label: str, layer: ArrayLike | None, text: str, measure: Callable[..., jax.Array], *operands: ArrayLike
) -> None:
    """Fails with `text`, formatted with `jkv=measure(*operands, layer)`, where the first of these numbers is not 0."""
    # A layer that is known here stays out of the program, so that XLA sees where all layers probe the same.
    where = "" if layer is None else f", layer {layer}"
    if isinstance(layer, jax.core.Tracer):
        operands, where = (*operands, layer), f", layer {_LAYER}"
    else:
        operands = (*operands, 0)
    template = f"{_literal(label)}{where}: {text}"
    if _shim.functionalising():
        numbers = measure(*operands)
        if isinstance(numbers, jax.core.Tracer):
            checkify.check(numbers[0] == 0, template, jkv=numbers)
            return
    elif any(isinstance(x, jax.core.Tracer) for x in operands) or jax.sharding.get_abstract_mesh().manual_axes:
        raise RuntimeError(
            f"{label}: checks are on, and a plain jax.jit, shard_map, vmap, grad, eval_shape or export is tracing this "
            "call. Make the whole step a jkv.checked_jit, or trace it under jkv.enable_checks(False)"
        )
    else:
        # One small program, not one per operation; and run now, even if somebody's trace surrounds these values.
        with jax.ensure_compile_time_eval():
            numbers = measure(*operands)
    if (host := np.asarray(numbers))[0]:
        raise KVIndexError(template.format(jkv=host))


def _ids(loc: ArrayLike, label: str) -> jax.Array | np.ndarray:
    ids = loc if isinstance(loc, jax.Array) else np.asarray(loc)
    if ids.size and not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{label}: slot ids must be integers, got {ids.dtype}")
    if isinstance(ids, np.ndarray) and ids.size:
        # JAX would wrap a 64-bit id into 32 bits, where it may look valid. Saturated, it is still out of range.
        own, limits = np.iinfo(ids.dtype), np.iinfo(_dtype())
        ids = ids.clip(max(own.min, limits.min), min(own.max, limits.max)).astype(limits.dtype)
    return ids


def _dtype() -> np.dtype:
    """Of the numbers that a probe reports: int64 where x64 is on, so that every id fits."""
    return jax.dtypes.canonicalize_dtype(np.int64)


def _may_hold_nan(x: ArrayLike) -> bool:
    return np.size(x) > 0 and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _padding(padding_slot: int) -> tuple[int, ...]:
    return tuple(sorted({0, padding_slot}))


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


# The measurements. jit serves the eager path; a trace inlines them. They are elementwise operations, reductions and one
# sort, so that ids and rows may have any sharding, only not the ids that are sorted on an Explicit mesh.


def _numbers(count: ArrayLike, first: ArrayLike, second: ArrayLike, layer: ArrayLike) -> jax.Array:
    return jnp.stack([jnp.asarray(x, _dtype()).reshape(()) for x in (count, first, second, layer)])


def _is_live(ids: jax.Array, padding: tuple[int, ...]) -> jax.Array | bool:
    live: jax.Array | bool = True
    for slot in padding:
        live = live & (ids != slot)
    return live


@functools.partial(jax.jit, inline=True, static_argnames="padding")
def _measure_outside(
    ids: jax.Array, low: ArrayLike, last: ArrayLike, layer: ArrayLike, *, padding: tuple[int, ...]
) -> jax.Array:
    ids, limits = ids.astype(_dtype()), jnp.iinfo(_dtype())
    live = _is_live(ids, padding)
    bad = live & ((ids < low) | (ids > last))
    smallest, largest = jnp.where(live, ids, limits.max).min(), jnp.where(live, ids, limits.min).max()
    return _numbers(bad.sum(), smallest, largest, layer)


@functools.partial(jax.jit, inline=True)
def _measure_misaligned(ids: jax.Array, page_size: ArrayLike, layer: ArrayLike) -> jax.Array:
    ids = ids.astype(_dtype())
    bad = ids % page_size != 0
    return _numbers(bad.sum(), jnp.where(bad, ids, jnp.iinfo(_dtype()).max).min(), 0, layer)


@functools.partial(jax.jit, inline=True, static_argnames="padding")
def _measure_repeated(ids: jax.Array, bound: ArrayLike, layer: ArrayLike, *, padding: tuple[int, ...]) -> jax.Array:
    ids, none = ids.astype(_dtype()), jnp.iinfo(_dtype()).max
    ids = jnp.sort(jnp.where(_is_live(ids, padding) & (ids >= 0) & (ids < bound), ids, none))
    again = (ids[1:] == ids[:-1]) & (ids[1:] != none)
    # An id that occurs three times counts once.
    count = again.sum() - (again[1:] & again[:-1]).sum()
    return _numbers(count, jnp.where(again, ids[1:], none).min(initial=none), 0, layer)


@functools.partial(jax.jit, inline=True)
def _measure_nan(x: jax.Array, layer: ArrayLike) -> jax.Array:
    return _numbers(jnp.isnan(x).sum(), 0, 0, layer)


@functools.partial(jax.jit, inline=True, static_argnames="padding")
def _measure_nan_rows(rows: jax.Array, ids: jax.Array, layer: ArrayLike, *, padding: tuple[int, ...]) -> jax.Array:
    bad = jnp.isnan(rows).any(axis=tuple(range(1, rows.ndim))) & _is_live(ids, padding)
    order = jnp.arange(ids.size)
    first = jnp.where(bad, order, ids.size).min()
    return _numbers(bad.sum(), jnp.where(order == first, ids.astype(_dtype()), 0).sum(), 0, layer)


@functools.partial(jax.jit, inline=True)
def _measure_layer(layer_id: jax.Array, first: jax.Array, last: jax.Array, layer: ArrayLike) -> jax.Array:
    return _numbers((layer_id < first) | (layer_id > last), layer_id, 0, layer)
