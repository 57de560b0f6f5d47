"""Every index rule of the slot space, once: for the kernels, for XLA and for numpy.

A logical slot id addresses one token of a sequence that is striped over c = `dcp_size` ranks. With interleave I::

    owner(loc) = (loc // I) % c
    row(loc)   = loc // (I * c) * I + loc % I

(decode context parallelism with interleaved storage, as in SGLang and vLLM). All functions take numpy or jax integer
arrays and answer in kind. Ids are made safe *before* any division: the kernel language truncates where numpy and jnp
floor, so a negative id would be owned by different ranks in different implementations.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

INT32_MAX = np.iinfo(np.int32).max


def _xp(*arrays: Any):
    return jnp if any(isinstance(a, jax.Array) for a in arrays) else np


def owner(loc, dcp_size: int, interleave: int = 1):
    """Rank that stores slot `loc` (>= 0)."""
    return loc // interleave % dcp_size


def row(loc, dcp_size: int, interleave: int = 1):
    """Row of slot `loc` (>= 0) in its owner's buffers."""
    return loc // (interleave * dcp_size) * interleave + loc % interleave


def slot(row, rank, dcp_size: int, interleave: int = 1):
    """The slot id stored at `row` (>= 0) of `rank`: the inverse of `owner` and `row`."""
    return (row // interleave * dcp_size + rank) * interleave + row % interleave


def local_row(loc, rows: int, *, dcp_size: int = 1, dcp_rank=0, interleave: int = 1, skip_slot: int | None = None):
    """Row of each id on `dcp_rank`, or -1 where the id is out of range, skipped, or another rank's.

    Args:
      loc: integer array of slot ids, any shape, any values.
      rows: rows of one rank's buffer; ids in `[0, rows * dcp_size)` are in range.
      dcp_rank: this rank; a Python int or a scalar array.
      skip_slot: an id to treat as out of range (the padding slot), or None.
    """
    xp = _xp(loc, dcp_rank)
    if rows * dcp_size > INT32_MAX:  # int32 ids are fine, but not their comparison with such a bound
        loc = loc.astype(np.int64)
    ok = (loc >= 0) & (loc < rows * dcp_size)
    if skip_slot is not None:
        ok &= loc != skip_slot
    safe = xp.where(ok, loc, 0)
    if dcp_size > 1:
        ok &= owner(safe, dcp_size, interleave) == dcp_rank
        safe = row(safe, dcp_size, interleave)
    return xp.where(ok, safe, -1)


def local_lens(lens, rank, *, dcp_size: int, interleave: int = 1, start=None):
    """How many of the positions `[start, start + lens)` (start 0 when None) belong to `rank`."""

    def below(n):
        full = n // (interleave * dcp_size) * interleave
        return full + _xp(n, rank).clip(n % (interleave * dcp_size) - rank * interleave, 0, interleave)

    return below(lens) if start is None else below(start + lens) - below(start)


def as_slot_ids(loc, where: str, name: str = "loc"):
    """Validates an array of slot ids and returns it as int32 (int64 where x64 is on and it came so).

    Args:
      loc: `[N]` signed integers; a numpy array or a list is checked against int32 and copied, so that the caller may
        reuse its memory while the step is in flight.
      where: the door or op, for messages.

    Raises:
      TypeError: the dtype is not a signed integer.
      ValueError: not one-dimensional, or an id that int32 would truncate (JAX does so silently: 2**32 + 5 becomes 5).
    """
    if not isinstance(loc, jax.Array):
        try:
            host = np.asarray(loc)
        except ValueError as error:
            raise ValueError(f"{where}: {name} must have shape [N]: {error}") from None
        loc = host.astype(np.int32) if host.size == 0 and isinstance(loc, list | tuple) else host
    if not jnp.issubdtype(loc.dtype, jnp.signedinteger):
        raise TypeError(f"{where}: {name} must hold signed integers (int32), got {loc.dtype}")
    if loc.ndim != 1:
        raise ValueError(f"{where}: {name} must have shape [N], got {loc.shape}")
    wide = jax.dtypes.canonicalize_dtype(loc.dtype) if loc.dtype.itemsize > 4 else np.dtype(np.int32)
    if loc.dtype.itemsize > 4 and wide == np.int32 and not isinstance(loc, jax.core.Tracer):
        loc = np.asarray(loc)
        truncated = loc[loc != loc.astype(np.int32)]
        if truncated.size:
            raise ValueError(
                f"{where}: {name} holds id {truncated[0]}, which does not fit int32 and would be truncated"
            )
    return loc.astype(wide)


def slot_options(where: str, rows: int, *, dcp_size, dcp_rank, interleave, **skip: int | None) -> dict:
    """Validates how an op's slot ids map to the `rows` of a rank, and returns it as options of `local_row`.

    Raises:
      ValueError: sizes that are not positive, a concrete rank outside `[0, dcp_size)`, rows that are no multiple of
        `interleave`.
    """
    for name, value in (("dcp_size", dcp_size), ("interleave", interleave)):
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{where}: {name} must be a positive integer, got {value!r}")
    if not isinstance(dcp_rank, jax.core.Tracer) and not (np.isscalar(dcp_rank) and dcp_rank in range(dcp_size)):
        raise ValueError(f"{where}: dcp_rank must be in [0, {dcp_size}), got {dcp_rank}")
    if rows * dcp_size > INT32_MAX and jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        raise ValueError(f"{where}: slot ids of {rows} rows on {dcp_size} ranks do not fit int32; enable x64")
    if rows % interleave:
        raise ValueError(f"{where}: interleave {interleave} must divide the {rows} rows of a rank")
    for name, value in skip.items():
        if not isinstance(value, int | np.integer | None):
            raise ValueError(f"{where}: {name} must be an integer or None, got {value!r}")
    return {"dcp_size": int(dcp_size), "dcp_rank": dcp_rank, "interleave": int(interleave), **skip}


def rows_of(buffer, layer) -> int:
    """Rows of one layer of `buffer`: `[rows, ...]`, or `[layers, rows, ...]` when a layer is addressed."""
    return buffer.shape[0 if layer is None else 1]


def check_buffers(buffers, word, layer, where: str) -> None:
    """Raises ValueError unless all `buffers` are `[rows, heads, dim]` (`[layers, ...]` with a layer) of `word`."""
    ndim, shape = (3, "[rows, heads, dim]") if layer is None else (4, "[layers, rows, heads, dim]")
    for buffer in buffers:
        if buffer.ndim != ndim or buffer.dtype != word:
            raise ValueError(f"{where}: a buffer must be {shape} of {word}, got {buffer.shape} of {buffer.dtype}")
        if rows_of(buffer, layer) != rows_of(buffers[0], layer):
            raise ValueError(f"{where}: buffers differ in rows: {[b.shape for b in buffers]}")


def _address(buffer, row, layer) -> tuple[jax.Array, tuple]:
    """`row` with -1 where the layer does not exist, and the index in front of it. `layer` may be a slice."""
    row = jnp.asarray(row)
    if layer is None or isinstance(layer, slice):
        return row, () if layer is None else (layer,)
    inside = (layer >= 0) & (layer < buffer.shape[0])
    return jnp.where(inside, row, -1), (jnp.where(inside, layer, 0),)


def set_rows(buffer, row, rows, *, layer=None, columns: slice | None = None):
    """Writes `rows[i]` to row `row[i]` of one layer where `row[i] >= 0`; everything else keeps its bits.

    Args:
      buffer: `[rows, ...]`, or `[layers, rows, ...]` with `layer`: a (possibly traced) index, or a slice.
      row: int `[N]`, -1 where nothing is to be written; no two alike apart from -1.
      columns: the part of the last axis that `rows` fills; all of it by default.
    """
    count, n = rows_of(buffer, layer), row.shape[0]
    if count + n > INT32_MAX:
        raise ValueError(f"{count} rows a rank and {n} ids pass the range of int32 row numbers")
    row, lead = _address(buffer, row, layer)
    # Each dropped row gets an index of its own past the end: `unique_indices` is a promise about them too, and what
    # makes a scatter on CUDA plain stores instead of a compare-and-swap loop.
    row = jnp.where(row < 0, count + jnp.arange(n, dtype=row.dtype), row)
    where = (*lead, row) if columns is None else (*lead, row, ..., columns)
    return buffer.at[where].set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)


def take_rows(buffer, row, *, layer=None):
    """Rows `[N, ...]` of one layer; zeros where `row[i]` is -1 or the (possibly traced) layer does not exist."""
    row, lead = _address(buffer, row, layer)
    row = jnp.where(row < 0, rows_of(buffer, layer), row)
    return buffer.at[(*lead, row)].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def sum_rows(rows, axis_name):
    """Sum over a mesh axis of words that at most one rank has non-zero: the owner's row, exactly, on every rank.

    16- and 8-bit words travel as uint32 where the row allows: fewer elements, and a type that every backend reduces.
    """

    def total(words):
        pack = 4 // words.dtype.itemsize
        if pack == 1 or words.shape[-1] % pack:
            return lax.psum(words, axis_name)
        packed = lax.bitcast_convert_type(words.reshape(*words.shape[:-1], words.shape[-1] // pack, pack), jnp.uint32)
        return lax.bitcast_convert_type(lax.psum(packed, axis_name), words.dtype).reshape(words.shape)

    return jax.tree.map(total, rows)
