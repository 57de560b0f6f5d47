"""scatter_mla_fp4 in Pallas' Mosaic dialect, for NVIDIA GPUs from Hopper on: codes and scales in one launch."""

from pallas_kernels.mosaic import quant


def scatter_mla_fp4(kv_buffer, kv_scale_buffer, loc, nope, rope, **options):
    parts = _parts(nope, rope)
    return quant.scatter_fp4("scatter_mla_fp4", (kv_buffer,), (kv_scale_buffer,), parts, loc, **options)


def unsupported(kv_buffer, kv_scale_buffer, loc, nope, rope=None, *, config=None, **options):
    return quant.refusal_of(_parts(nope, rope), config, kv_buffer, kv_scale_buffer, loc, nope, rope, options)


def _parts(nope, rope):
    rows = [nope] if rope is None else [nope, rope]
    blocks = [x.shape[-1] // 16 for x in rows]
    return [quant.Blocks.of(x, 0, 1, sum(blocks[:i]), sum(blocks)) for i, x in enumerate(rows)]
