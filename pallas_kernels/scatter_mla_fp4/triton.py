"""scatter_mla_fp4 in Triton: nope and rope, codes and scales, in one launch."""

from pallas_kernels.codecs import fp4
from pallas_kernels.triton import quant


def _plan(kv_scale_buffer, nope, rope):
    dense = [x for x in (nope, rope) if x is not None]
    widths = [x.shape[-1] for x in dense]
    to = [(0, 0), (0, widths[0] // fp4.BLOCK)][: len(dense)]
    runs = quant.fp4_runs(widths, to, [kv_scale_buffer.shape[-1]])
    return dense, runs, [4, runs[0].scale_word]


def unsupported(kv_buffer, kv_scale_buffer, loc, nope, rope=None, *, config=None, **_):
    dense, runs, words = _plan(kv_scale_buffer, nope, rope)
    return quant.refusal([kv_buffer, kv_scale_buffer], words, runs, [x.dtype for x in dense], config)


def scatter_mla_fp4(kv_buffer, kv_scale_buffer, loc, nope, rope, *, layer, config, interpret, **slots):
    dense, runs, words = _plan(kv_scale_buffer, nope, rope)
    options = {"layer": layer, "slots": slots, "config": config, "interpret": interpret}
    buffers = (kv_buffer, kv_scale_buffer)
    return quant.scatter("scatter_mla_fp4", buffers, words, loc, runs, dense, **options)
