"""scatter_mla in XLA: two slice scatters, cheaper than concatenating the row first."""

from pallas_kernels import codecs, index


def scatter_mla(kv_buffer, loc, nope, rope, *, dtype, layer, scale, **slots):
    row = index.local_row(loc, index.rows_of(kv_buffer, layer), **slots)
    if rope is None:
        return index.set_rows(kv_buffer, row, codecs.to_words(nope, dtype, scale), layer=layer)
    split = nope.shape[-1]
    kv_buffer = index.set_rows(
        kv_buffer, row, codecs.to_words(nope, dtype, scale), layer=layer, columns=slice(0, split)
    )
    return index.set_rows(
        kv_buffer, row, codecs.to_words(rope, dtype, scale), layer=layer, columns=slice(split, kv_buffer.shape[-1])
    )
