"""Checks of the integers and integer arrays that the host side takes: every message names the call and the argument."""

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

INT32_MAX = 2**31 - 1
_NAMED = 8  # ids that a message lists before it counts the rest


def integer(value: Any, where: str, name: str, *, low: int, high: int | None = None) -> int:
    """`value` as an int in `[low, high]`.

    Raises:
      ValueError: not an integer (a bool is not one either), or outside.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_):
        raise ValueError(f"{where}: {name} must be an integer, got {value!r}")
    if number < low:
        raise ValueError(f"{where}: {name} must be at least {low}, got {number}")
    if high is not None and number > high:
        raise ValueError(f"{where}: {name} must be at most {high}, got {number}")
    return number


def signed_array(
    value: npt.ArrayLike, where: str, name: str, *, length: int | None = None
) -> npt.NDArray[np.signedinteger]:
    """`value` as an array `[n]` of the dtype that it has; the caller's own memory where it is one.

    Args:
      value: signed integers, 1-D: an array or a sequence. An empty sequence has no dtype of its own and will do.
      length: the length that it must have.

    Raises:
      TypeError: not signed integers.
      ValueError: not 1-D, or of another length.
    """
    try:
        array = np.asarray(value)
    except ValueError as ragged:
        raise ValueError(f"{where}: {name} must have shape [n], got rows of different lengths") from ragged
    if array.size == 0 and not hasattr(value, "dtype"):
        array = array.astype(np.int64)
    if array.dtype.kind != "i":
        raise TypeError(f"{where}: {name} must hold signed integers (int32), got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{where}: {name} must have shape [n], got {array.shape}")
    if length is not None and array.size != length:
        raise ValueError(f"{where}: {name} must have length {length}, got {array.size}")
    return array


def int_array(value: npt.ArrayLike, where: str, name: str, *, length: int | None = None) -> npt.NDArray[np.int64]:
    """`signed_array` widened to int64, so that no sum and no bound check is done in 32 bits."""
    return signed_array(value, where, name, length=length).astype(np.int64, copy=False)


def named(ids: npt.NDArray[np.integer]) -> str:
    """The first few `ids` for a message, and how many more there are."""
    listed = ", ".join(str(i) for i in ids[:_NAMED])
    return listed if ids.size <= _NAMED else f"{listed} and {ids.size - _NAMED} more"
