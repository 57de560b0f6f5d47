"""scatter_kv in XLA."""

from pallas_kernels import codecs, index


def scatter_kv(k_buffer, v_buffer, loc, k, v, *, dtype, layer, k_scale, v_scale, **slots):
    row = index.local_row(loc, index.rows_of(k_buffer, layer), **slots)
    return (
        index.set_rows(k_buffer, row, codecs.to_words(k, dtype, k_scale), layer=layer),
        index.set_rows(v_buffer, row, codecs.to_words(v, dtype, v_scale), layer=layer),
    )
