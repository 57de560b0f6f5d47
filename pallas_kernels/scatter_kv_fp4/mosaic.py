"""scatter_kv_fp4 in Pallas' Mosaic dialect, for NVIDIA GPUs from Hopper on: K and V, codes and scales in one launch."""

from pallas_kernels.mosaic import quant


def scatter_kv_fp4(k_buffer, v_buffer, k_scale_buffer, v_scale_buffer, loc, k, v, **options):
    packed, scales = (k_buffer, v_buffer), (k_scale_buffer, v_scale_buffer)
    return quant.scatter_fp4("scatter_kv_fp4", packed, scales, _parts(k, v), loc, **options)


def unsupported(k_buffer, v_buffer, k_scale_buffer, v_scale_buffer, loc, k, v, *, config=None, **options):
    buffers = (k_buffer, v_buffer, k_scale_buffer, v_scale_buffer)
    return quant.refusal_of(_parts(k, v), config, buffers, loc, k, v, options)


def _parts(k, v):
    return [quant.Blocks.of(x, b, 2 + b, 0, x.shape[-2] * x.shape[-1] // 16) for b, x in enumerate((k, v))]
