"""scatter_dsa in Triton: codes, scales and rope in one launch."""

from pallas_kernels.codecs import dsa
from pallas_kernels.triton import quant


def unsupported(kv_buffer, loc, nope, rope=None, *, kv_lora_rank, config=None, **_):
    dense = [x for x in (nope, rope) if x is not None]
    return quant.refusal_of_dsa(kv_buffer, kv_lora_rank, [x.dtype for x in dense], config)


def scatter_dsa(kv_buffer, loc, nope, rope, *, kv_lora_rank, layer, config, interpret, **slots):
    p = dsa.rope_dim(kv_buffer.shape[-1], kv_lora_rank, "scatter_dsa")
    runs = quant.dsa_runs(kv_lora_rank, p, rope is None)
    options = {"layer": layer, "slots": slots, "config": config, "interpret": interpret}
    dense = [x for x in (nope, rope) if x is not None]
    return quant.scatter("scatter_dsa", [kv_buffer], [4], loc, runs, dense, **options)[0]
