"""gather_fp4 in Triton: all buffers, codes and scales, in one launch."""

import math

from pallas_kernels.codecs import fp4
from pallas_kernels.triton import quant


def _plan(buffers, scale_buffers, split):
    """Runs, their widths, and words. A row of one head is split in the kernel: only there the parts are ranges."""
    widths, to = [], []
    for i, (buffer, scales) in enumerate(zip(buffers, scale_buffers, strict=True)):
        width = fp4.BLOCK * scales.shape[-1]
        parts = [width] if split is None or buffer.shape[-2] > 1 else [split, width - split]
        starts = [0, parts[0] // fp4.BLOCK][: len(parts)]
        widths += parts
        to += [(i, start) for start in starts]
    runs = quant.fp4_runs(widths, to, [b.shape[-1] for b in scale_buffers])
    word = {run.buffers[1]: run.scale_word for run in runs}
    return runs, widths, [4] * len(buffers) + [word[len(buffers) + i] for i in range(len(buffers))]


def unsupported(buffers, scale_buffers, loc, *, dtype, split=None, config=None, **_):
    runs, _, words = _plan(buffers, scale_buffers, split)
    return quant.refusal([*buffers, *scale_buffers], words, runs, [dtype], config)


def gather_fp4(buffers, scale_buffers, loc, *, dtype, layer, split, config, interpret, **slots):
    runs, widths, words = _plan(buffers, scale_buffers, split)
    options = {"dtype": dtype, "layer": layer, "slots": slots, "config": config, "interpret": interpret}
    parts = quant.gather("gather_fp4", [*buffers, *scale_buffers], words, loc, runs, widths, **options)
    n, heads = loc.shape[0], [b.shape[-2] for b in buffers]
    if len(parts) > len(buffers):
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return tuple(tuple(x.reshape(n, 1, x.shape[-1]) for x in pair) for pair in pairs)
    rows = [x.reshape(n, h, math.prod(x.shape[1:]) // h) for x, h in zip(parts, heads, strict=True)]
    return tuple(rows) if split is None else tuple((r[..., :split], r[..., split:]) for r in rows)
