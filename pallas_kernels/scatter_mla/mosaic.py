"""scatter_mla in Pallas' Mosaic dialect, for NVIDIA GPUs from Hopper on."""

from pallas_kernels import mosaic
from pallas_kernels.mosaic import Source


def scatter_mla(kv_buffer, loc, nope, rope, *, dtype, scale, **options):
    (kv_buffer,) = mosaic.scatter("scatter_mla", (kv_buffer,), _sources(nope, rope, dtype, scale), loc, **options)
    return kv_buffer


def unsupported(kv_buffer, loc, nope, rope=None, *, dtype, scale=None, config=None, **options):
    columns = [source.columns() for source in _sources(nope, rope, dtype, scale)]
    return mosaic.refusal(columns, config, kv_buffer, loc, nope, rope, scale, options)


def _sources(nope, rope, dtype, scale):
    parts = [(0, nope)] if rope is None else [(0, nope), (nope.shape[-1], rope)]
    width = sum(rows.shape[-1] for _, rows in parts)
    return [Source(rows, 0, start, width, dtype, scale) for start, rows in parts]
