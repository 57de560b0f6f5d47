"""gather_fp4 in Pallas' Mosaic dialect, for NVIDIA GPUs from Hopper on: codes and scales to floats in one launch."""

import math

from pallas_kernels.codecs import fp4
from pallas_kernels.mosaic import dequant
from pallas_kernels.mosaic.units import words_of


def gather_fp4(buffers, scale_buffers, loc, *, dtype, layer, split, **options):
    lead = 1 if layer is None else 2
    parts, words = _parts(buffers, dtype, layer, split), [words_of(b, lead) for b in buffers]
    made = iter(dequant.gather("gather_fp4", [*words, *scale_buffers], parts, loc, layer=layer, **options))
    results = []
    for buffer in buffers:
        heads, width = buffer.shape[-2], 2 * buffer.shape[-1]
        count = 1 if split is None or heads > 1 else 2
        flat = [next(made) for _ in range(count)]
        rows = [x.reshape(x.shape[0], heads, x.shape[1] // heads) for x in flat]
        if split is not None and heads > 1:
            rows = [rows[0][..., :split], rows[0][..., split:width]]
        results.append(rows[0] if split is None else tuple(rows))
    return tuple(results)


def unsupported(buffers, scale_buffers, loc, *, dtype="bfloat16", layer=None, split=None, config=None, **options):
    parts = _parts(buffers, dtype, layer, split)
    return dequant.refusal_of(parts, config, buffers, scale_buffers, loc, layer, options)


def _parts(buffers, dtype, layer, split):
    """One for each buffer, or two where the one head of its rows is split."""
    parts = []
    for b, buffer in enumerate(buffers):
        blocks = math.prod(buffer.shape[1 if layer is None else 2 :]) * 2 // fp4.BLOCK
        cut = blocks if split is None or buffer.shape[-2] > 1 else split // fp4.BLOCK
        for start, end in ((0, cut), (cut, blocks)):
            if start < end:
                parts.append(dequant.Blocks.of(b, len(buffers) + b, start, end - start, blocks, dtype))
    return parts
