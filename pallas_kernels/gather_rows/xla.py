"""gather_rows in XLA."""

from pallas_kernels import index


def gather_rows(buffers, loc, *, layer, split, **slots):
    row = index.local_row(loc, index.rows_of(buffers[0], layer), **slots)
    rows = tuple(index.take_rows(buffer, row, layer=layer) for buffer in buffers)
    return rows if split is None else tuple((r[..., :split], r[..., split:]) for r in rows)
