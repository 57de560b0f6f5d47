"""move_rows in XLA: gather, exchange, scatter."""

from pallas_kernels import index


def move_rows(buffers, tgt_loc, src_loc, *, stacked, axis_name, skip_slot, **slots):
    count = buffers[0].shape[1 if stacked else 0]
    layer = slice(None) if stacked else None
    src = index.local_row(src_loc, count, **slots)
    tgt = index.local_row(tgt_loc, count, skip_slot=skip_slot, **slots)
    rows = [index.take_rows(buffer, src, layer=layer) for buffer in buffers]
    if slots["dcp_size"] > 1:
        rows = index.sum_rows(rows, axis_name)
    return tuple(index.set_rows(buffer, tgt, r, layer=layer) for buffer, r in zip(buffers, rows, strict=True))
