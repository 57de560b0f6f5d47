"""gather_dsa in Triton: codes, scales and rope in one launch."""

from pallas_kernels.codecs import dsa
from pallas_kernels.triton import quant


def unsupported(kv_buffer, loc, *, kv_lora_rank, dtype, config=None, **_):
    return quant.refusal_of_dsa(kv_buffer, kv_lora_rank, [dtype], config)


def gather_dsa(kv_buffer, loc, *, kv_lora_rank, dtype, layer, config, interpret, **slots):
    p = dsa.rope_dim(kv_buffer.shape[-1], kv_lora_rank, "gather_dsa")
    runs = quant.dsa_runs(kv_lora_rank, p, False)
    options = {"dtype": dtype, "layer": layer, "slots": slots, "config": config, "interpret": interpret}
    widths = (kv_lora_rank, p)
    parts = quant.gather("gather_dsa", [kv_buffer], [4], loc, runs, widths, **options)
    return tuple(x.reshape(loc.shape[0], 1, width) for x, width in zip(parts, widths, strict=True))
