"""move_rows in Triton: two launches for all layers of a stacked pool, gather and scatter, with the exchange between."""

import jax

from pallas_kernels import index, triton

# Separate arrays are operands of one kernel, each with code of its own: so many at a time.
_GROUP = 32


def _groups(buffers, stacked):
    """Buffers that move in one launch: those of one number of rows, all of them where they are stacked."""
    return [buffers] if stacked else [buffers[i : i + _GROUP] for i in range(0, len(buffers), _GROUP)]


def unsupported(buffers, tgt_loc, src_loc, *, stacked=False, config=None, **_):
    lead = 1 + stacked
    n = tgt_loc.shape[0]
    reasons = (triton.refusal(g, triton.whole_rows(g, lead), n, lead, config) for g in _groups(buffers, stacked))
    return next(filter(None, reasons), None)


def move_rows(buffers, tgt_loc, src_loc, *, stacked, axis_name, skip_slot, config, interpret, **slots):
    options = {"over": "layers" if stacked else "columns", "config": config, "interpret": interpret}
    moved: list[jax.Array] = []
    for group in _groups(buffers, stacked):
        columns = triton.whole_rows(group, 1 + stacked)
        rows = triton.move("gather_rows", group, src_loc, columns, None, slots=slots, **options)
        if slots["dcp_size"] > 1:
            rows = index.sum_rows(rows, axis_name)
        to = slots | {"skip_slot": skip_slot}
        moved += triton.move("scatter_rows", group, tgt_loc, columns, rows, slots=to, **options)
    return tuple(moved)
