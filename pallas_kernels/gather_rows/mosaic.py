"""gather_rows in Pallas' Mosaic dialect, for NVIDIA GPUs from Hopper on: all buffers in one launch."""

import itertools
import math

from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import Columns


def gather_rows(buffers, loc, *, layer, split, **options):
    columns = _columns(buffers, layer, split)
    words = [mosaic.to_words(buffer) for buffer in buffers]
    parts = mosaic.gather("gather_rows", words, columns, loc, layer=layer, **options)
    results = []
    for b, buffer in enumerate(buffers):
        inner = buffer.shape[_lead(layer) : -1]
        mine = [part for part, column in zip(parts, columns, strict=True) if column.buffer == b]
        mine = [part.reshape(loc.shape[0], *inner, part.shape[-1] // math.prod(inner)) for part in mine]
        rows = [lax.bitcast_convert_type(part, buffer.dtype) for part in mine]
        if split is not None and len(rows) == 1:  # rows of several heads, or with nothing behind the split
            rows = [rows[0][..., :split], rows[0][..., split:]]
        results.append(rows[0] if split is None else tuple(rows))
    return tuple(results)


def unsupported(buffers, loc, *, layer=None, split=None, config=None, **options):
    reasons = filter(None, map(mosaic.refusal_of_words, buffers))
    columns = _columns(buffers, layer, split)
    return next(reasons, None) or mosaic.refusal(columns, config, buffers, loc, layer, options)


def _lead(layer):
    return 1 if layer is None else 2


def _columns(buffers, layer, split):
    columns = []
    for b, buffer in enumerate(buffers):
        shape, size = buffer.shape[_lead(layer) :], buffer.dtype.itemsize
        width = math.prod(shape)
        cuts = [0, width] if split in (None, width) or shape[-1] != width else [0, split, width]
        columns += [Columns(b, start, end - start, width, size, size) for start, end in itertools.pairwise(cuts)]
    return columns
