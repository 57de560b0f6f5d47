"""scatter_kv_fp4 in Triton: K and V, codes and scales, in one launch."""

import math

from pallas_kernels.triton import quant


def _plan(buffers, k, v):
    widths = [math.prod(x.shape[1:]) for x in (k, v)]
    runs = quant.fp4_runs(widths, [(0, 0), (1, 0)], [b.shape[-1] for b in buffers[2:]])
    return runs, [4, 4, *(run.scale_word for run in runs)]


def unsupported(k_buffer, v_buffer, k_scale_buffer, v_scale_buffer, loc, k, v, *, config=None, **_):
    buffers = (k_buffer, v_buffer, k_scale_buffer, v_scale_buffer)
    runs, words = _plan(buffers, k, v)
    return quant.refusal(buffers, words, runs, [k.dtype, v.dtype], config)


def scatter_kv_fp4(k_buffer, v_buffer, k_scale_buffer, v_scale_buffer, loc, k, v, *, layer, config, interpret, **slots):
    buffers = (k_buffer, v_buffer, k_scale_buffer, v_scale_buffer)
    runs, words = _plan(buffers, k, v)
    options = {"layer": layer, "slots": slots, "config": config, "interpret": interpret}
    return quant.scatter("scatter_kv_fp4", buffers, words, loc, runs, [k, v], **options)
