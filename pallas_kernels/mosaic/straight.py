"""The straight way: rows from memory to registers to memory."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic.launch import load, store, zeros
from pallas_kernels.mosaic.plan import IN_FLIGHT_BYTES, THREADS, Columns

_Pieces = list[tuple[int, int]]


def move(
    columns: Sequence[Columns],
    count: int,
    source: Callable[[int, int], tuple[Any, int, Any]],
    target: Callable[[int, int], tuple[Any, int, Any]],
    encode: Callable[[int, Any], Any],
) -> None:
    """Moves the columns of `count` rows, as many at a time as the registers take.

    Args:
      source, target: of a row and a place in `columns`: the reference to the row, the first column in it, and whether
        to read (zeros otherwise) or to write; None stands for yes.
      encode: what is stored for what was loaded.
    """
    for wave in _waves(columns, count):
        loaded = [_load(*source(t, c), pieces, columns[c].vector(staged=False)) for t, c, pieces in wave]
        for (t, c, pieces), values in zip(wave, loaded, strict=True):
            ref, first, condition = target(t, c)

            def write(ref=ref, first=first, c=c, pieces=pieces, values=values):
                for (at, size), value in zip(pieces, values, strict=True):
                    store(ref.at[pl.ds(first + at, size)], encode(c, value))

            write() if condition is None else pl.when(condition)(write)


def _load(ref: Any, first: int, condition: Any, pieces: _Pieces, vector: int) -> list[Any]:
    def read():
        return [load(ref.at[pl.ds(first + at, size)], vector) for at, size in pieces]

    def blank():
        return [zeros(size, ref.dtype, vector) for _, size in pieces]

    return read() if condition is None else lax.cond(condition, read, blank)


def _waves(columns: Sequence[Columns], count: int) -> Iterator[list[tuple[int, int, _Pieces]]]:
    """Rows, columns and pieces in groups of what a thread can have in flight."""
    wave: list[tuple[int, int, _Pieces]] = []
    in_flight = 0
    for t, (c, column) in itertools.product(range(count), enumerate(columns)):
        vector = column.vector(staged=False)
        for piece in column.pieces(staged=False):
            size = pl.cdiv(piece[1], THREADS * vector) * vector * column.dense_bytes
            if in_flight + size > IN_FLIGHT_BYTES:
                yield wave
                wave, in_flight = [], 0
            if not wave or wave[-1][:2] != (t, c):
                wave.append((t, c, []))
            wave[-1][2].append(piece)
            in_flight += size
    yield wave
