"""gather_rows in XLA."""

from pallas_kernels import index


def gather_rows(buffer, loc, *, layer, split, **slots):
    row = index.local_row(loc, index.rows_of(buffer, layer), **slots)
    rows = index.take_rows(buffer, row, layer=layer)
    return rows if split is None else (rows[..., :split], rows[..., split:])
