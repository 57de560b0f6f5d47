"""`checked_jit`: a jitted step that reports what its probes find after the call, and `wait_for_checks`."""

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import checkify

from jkv import _shim
from jkv.checks import PROBE_KEYWORD, KVIndexError, checks_enabled

# Reports that nobody has read yet, in the order of the calls. They come and go by single dict operations, so that
# threads need no lock.
_pending: dict[int, _shim.Report] = {}
_tickets = itertools.count()


def checked_jit(fn: Callable | None = None, *, raise_sync: bool = False, **jit_options: Any) -> Any:
    """`jax.jit` for steps that use a pool: with checks on it also reports what the probes in `fn` find.

    The switch (`jkv.enable_checks`, or `JKV_ENABLE_ASYNC_ASSERT=1`) is read at each call; with checks off, a call is
    one of `jax.jit(fn, **jit_options)`. With checks on a call returns the outputs at once, without waiting for the
    device. The error surfaces in `wait_for_checks()`, or in the next call of the step: that one waits for the verdict
    on the call before and raises before it runs, so that its donated arguments are untouched and it can be repeated.
    Nothing is lost: the outputs of the failed call are the caller's, valid, without the bad rows. Of several checks
    that fail in one call the first speaks, and in a `shard_map` that of the lowest rank.

    Probes may stand in scan, loops, cond, nested jit, remat and any number of shard_maps. The step is the outermost
    transformation; a step called inside another reports through that one. A `checkify.check` of the caller's own in
    `fn` surfaces in the same way, as a `checkify.JaxRuntimeError`. Where `fn` takes the gradient of a scan or loop that
    has probes, JAX itself drops them.

    Args:
      fn: the function. Without it, a decorator.
      raise_sync: wait for each call and raise from it, with its outputs in the error's `outputs`.
      **jit_options: `jax.jit`'s: `donate_argnums`, `static_argnames`, `out_shardings` and so on.

    Returns:
      A callable with the methods of a jitted function: `trace`, `lower`, `eval_shape`, `clear_cache`.

    Raises:
      KVIndexError: from a call, about the call before, or with `raise_sync` about itself.
      RuntimeError: from a call with checks on inside another transformation (`jax.jit`, `vmap`, `grad`), and from
        `jax.export` of the step with checks on.
    """
    if fn is None:
        return functools.partial(checked_jit, raise_sync=raise_sync, **jit_options)
    return _Step(fn, raise_sync, jit_options)


def wait_for_checks() -> None:
    """Waits for the checked steps called so far, by any thread, and raises what their probes found.

    Raises:
      KVIndexError: the earliest error. Later ones stay pending, for the next call of this function.
    """
    for ticket in list(_pending):
        _settle(ticket)


class _Step:
    """A jitted function and its twin that also returns a report; the switch chooses, at each use."""

    def __init__(self, fn: Callable, raise_sync: bool, options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fn)
        self._name = getattr(fn, "__name__", repr(fn))
        self._plain: Any = jax.jit(fn, **options)
        if "out_shardings" in options:
            options = {**options, "out_shardings": (None, options["out_shardings"])}
        self._checked: Any = jax.jit(_shim.functionalise(fn), **options)
        self._raise_sync = raise_sync
        self._ticket = -1  # of the last call

    def _reports(self) -> bool:
        # While an outer step is traced, the plain twin hands its checks to that step.
        return checks_enabled() and not _shim.functionalising()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._checked, args, kwargs) if self._reports() else self._plain(*args, **kwargs)

    def _run(self, program: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        _settle(self._ticket)
        report, outputs = program(*args, **kwargs)
        if any(isinstance(flag, jax.core.Tracer) for flag in report.flags):
            raise RuntimeError(
                f"{self._name}: with checks on, a jkv.checked_jit step can't be called inside a plain jax.jit, vmap, "
                "grad or eval_shape, which would drop its report. Make the outermost function the jkv.checked_jit, or "
                "turn the checks off with jkv.enable_checks(False)"
            )
        if self._raise_sync:
            if failure := _failure(report):
                failure.outputs = outputs  # type: ignore[attr-defined]
                raise failure
        elif report.flags:
            _forget_clean()
            self._ticket = next(_tickets)
            _pending[self._ticket] = report
        return outputs

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As of a jitted function; with checks on, of the program that reports."""
        if self._reports():
            return _Stage(self, self._checked.trace(*args, **kwargs))
        return self._plain.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As of a jitted function; with checks on, the compiled program reports as the step does."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As of a jitted function: the shapes of the outputs."""
        if self._reports():
            return self._checked.eval_shape(*args, **kwargs)[1]
        return self._plain.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """As of a jitted function."""
        self._plain.clear_cache()
        self._checked.clear_cache()

    def __getattr__(self, name: str) -> Any:
        if name in ("_plain", "_checked"):  # not there yet: nothing to delegate to
            raise AttributeError(name)
        return getattr(self._checked if self._reports() else self._plain, name)

    def __repr__(self) -> str:
        return f"<checked_jit of {self._name}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class _Stage:
    """A `jax.stages` Traced, Lowered or Compiled of a program that reports, without the report among its outputs."""

    _OF_OUTPUTS = frozenset({"out_info", "out_avals", "output_shardings", "output_formats"})

    def __init__(self, step: _Step, stage: Any) -> None:
        self._step, self._stage = step, stage

    def lower(self, *, lowering_platforms: tuple[str, ...] | None = None, **export: Any) -> "_Stage":
        if export:
            raise RuntimeError(
                f"{self._step._name}: with checks on, a jkv.checked_jit step can't be exported, for nobody would read "
                "its report. Export it under jkv.enable_checks(False)"
            )
        return _Stage(self._step, self._stage.lower(lowering_platforms=lowering_platforms))

    def compile(self, *args: Any, **kwargs: Any) -> "_Stage":
        return _Stage(self._step, self._stage.compile(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step._run(self._stage, args, kwargs)

    @property
    def out_tree(self) -> Any:
        return self._stage.out_tree.children()[1]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        return value[1] if name in self._OF_OUTPUTS else value


def _failure(report: _shim.Report) -> Exception | None:
    """What went wrong, None where nothing did; waits for the call."""
    failed = report.first_failed()
    if failed is None:
        return None
    message = failed.fmt_string.format(*failed.args, **failed.kwargs)
    return (KVIndexError if PROBE_KEYWORD in failed.kwargs else checkify.JaxRuntimeError)(message)


def _settle(ticket: int) -> None:
    report = _pending.pop(ticket, None)
    if report and (failure := _failure(report)):
        raise failure


def _forget_clean() -> None:
    """Drops reports that are in and clean, so that steps that are never called again leave nothing behind."""
    for ticket, report in _pending.copy().items():
        if all(flag.is_ready() for flag in report.flags) and not _failure(report):  # type: ignore[attr-defined]
            _pending.pop(ticket, None)
