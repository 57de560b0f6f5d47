"""What the ops promise of one rank's buffers, as loops over NumPy rows."""

from typing import Any

import numpy as np

from jkv.testing import PlainCodec


def place(loc: int, rows: int, dcp_size: int, interleave: int, skip_slot: int | None) -> tuple[int, int] | None:
    """Rank and row of a slot id, None where it is out of range or skipped."""
    if loc == skip_slot or not 0 <= loc < rows * dcp_size:
        return None
    turn, within = divmod(loc, interleave)
    block, rank = divmod(turn, dcp_size)
    return rank, block * interleave + within


def words(row: np.ndarray, stored: Any, scale: float | None) -> np.ndarray:
    """Words of one row."""
    return PlainCodec(stored).encode(row, scale)["buffer"]


def scatter(buffer: np.ndarray, loc: Any, rows: list[np.ndarray], *, rank: int, layer: int | None = None, **slots: Any):
    """A new buffer with `rows[i]` (words, in pieces along the last axis) at the row of slot `loc[i]`."""
    new = buffer.copy()
    layers = new[None] if layer is None else new
    at = 0 if layer is None else layer
    if not 0 <= at < len(layers):
        return new
    for i, slot in enumerate(loc):
        where = place(int(slot), layers.shape[1], **slots)
        if where is not None and where[0] == rank:
            layers[at, where[1]] = np.concatenate([piece[i] for piece in rows], axis=-1)
    return new


def gather(buffer: np.ndarray, loc: Any, *, rank: int, layer: int | None = None, **slots: Any) -> np.ndarray:
    """Rows by slot id; zeros where another rank's or no slot's."""
    layers = buffer[None] if layer is None else buffer
    at = 0 if layer is None else layer
    out = np.zeros((len(loc), *layers.shape[2:]), buffer.dtype)
    for i, slot in enumerate(loc):
        where = place(int(slot), layers.shape[1], skip_slot=None, **slots)
        if where is not None and where[0] == rank and 0 <= at < len(layers):
            out[i] = layers[at, where[1]]
    return out
