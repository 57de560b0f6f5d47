"""move_rows in Pallas' Mosaic dialect, for NVIDIA GPUs from Hopper on: gather, exchange, scatter.

There is no barrier across the blocks of a launch, so reading all before writing any takes two; each treats all layers
of stacked buffers, and up to eight buffers.
"""

import math

import jax

from pallas_kernels import index, mosaic
from pallas_kernels.mosaic import Columns, Source

_BUFFERS = 8  # of a launch: each has code of its own


def move_rows(buffers, tgt_loc, src_loc, *, stacked, axis_name, skip_slot, **options):
    moved: list[jax.Array] = []
    options["layer"] = slice(None) if stacked else None
    for first in range(0, len(buffers), _BUFFERS):
        group = buffers[first : first + _BUFFERS]
        rows = mosaic.gather("move_rows_gather", group, _columns(group, stacked), src_loc, **options)
        if options["dcp_size"] > 1:
            rows = index.sum_rows(rows, axis_name)
        sources = [Source(row, b, 0, row.shape[-1], row.dtype) for b, row in enumerate(rows)]
        moved += mosaic.scatter("move_rows_scatter", group, sources, tgt_loc, skip_slot=skip_slot, **options)
    return tuple(moved)


def unsupported(buffers, tgt_loc, src_loc, *, stacked=False, config=None, **options):
    columns = _columns(buffers, stacked)
    reasons = (mosaic.refusal_of_words(buffer) for buffer in buffers)
    return next(filter(None, reasons), None) or mosaic.refusal(columns, config, buffers, tgt_loc, src_loc, options)


def _columns(buffers, stacked):
    sizes = [(math.prod(b.shape[2 if stacked else 1 :]), b.dtype.itemsize) for b in buffers]
    return [Columns(b, 0, width, width, size, size) for b, (width, size) in enumerate(sizes)]
