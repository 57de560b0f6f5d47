"""scatter_kv in Pallas' Mosaic dialect, for NVIDIA GPUs from Hopper on."""

from pallas_kernels import mosaic
from pallas_kernels.mosaic import Source


def scatter_kv(k_buffer, v_buffer, loc, k, v, *, dtype, k_scale, v_scale, **options):
    sources = _sources(k, v, dtype, k_scale, v_scale)
    return mosaic.scatter("scatter_kv", (k_buffer, v_buffer), sources, loc, **options)


def unsupported(k_buffer, v_buffer, loc, k, v, *, dtype, k_scale=None, v_scale=None, config=None, **options):
    columns = [source.columns() for source in _sources(k, v, dtype, k_scale, v_scale)]
    return mosaic.refusal(columns, config, k_buffer, v_buffer, loc, k, v, k_scale, v_scale, options)


def _sources(k, v, dtype, k_scale, v_scale):
    parts = ((k, k_scale), (v, v_scale))
    return [Source(x, b, 0, x.shape[-2] * x.shape[-1], dtype, scale) for b, (x, scale) in enumerate(parts)]
