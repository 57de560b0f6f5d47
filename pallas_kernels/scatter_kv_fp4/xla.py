"""scatter_kv_fp4 in XLA."""

from pallas_kernels import index
from pallas_kernels.codecs import fp4


def scatter_kv_fp4(k_buffer, v_buffer, k_scale_buffer, v_scale_buffer, loc, k, v, *, layer, **slots):
    row = index.local_row(loc, index.rows_of(k_buffer, layer), **slots)
    (k_codes, k_scales), (v_codes, v_scales) = (fp4.encode(x) for x in (k, v))
    words = (k_codes, v_codes, fp4.flat(k_scales), fp4.flat(v_scales))
    buffers = (k_buffer, v_buffer, k_scale_buffer, v_scale_buffer)
    return tuple(index.set_rows(b, row, w, layer=layer) for b, w in zip(buffers, words, strict=True))
