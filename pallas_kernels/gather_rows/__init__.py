"""gather_rows: rows of a buffer by slot id."""

from pallas_kernels import dispatch, index


def gather_rows(
    buffer,
    loc,
    *,
    layer=None,
    split: int | None = None,
    dcp_size: int = 1,
    dcp_rank=0,
    interleave: int = 1,
    implementation: str | None = None,
    config: dispatch.KernelConfig | None = None,
):
    """Rows of this rank's `buffer` by slot id; zeros where another rank owns the id or it is out of range.

    The sum over the ranks of a DCP group is thus the row of any id.

    Args:
      buffer: `[rows, ...]` of any dtype, or `[layers, rows, ...]` with `layer`.
      layer: None, or an index that may be traced; out of range reads zeros.
      loc: `[N]` signed integers, slot ids.
      split: None, or a width of the last axis (an MLA row's nope) to split the result at.
      dcp_size, dcp_rank, interleave, implementation, config: as in `scatter_rows`.

    Returns:
      `[N, ...]`, or with `split` the pair `[N, ..., split]`, `[N, ..., rest]`.

    Raises:
      TypeError: `loc` is not of signed integers. ValueError: `split` is not within the row, or a slot option.
    """
    loc = index.as_slot_ids(loc, "gather_rows")
    if split is not None and not 0 < split <= buffer.shape[-1]:
        raise ValueError(f"gather_rows: split must lie within the row of {buffer.shape[-1]}, got {split}")
    rows = index.rows_of(buffer, layer)
    slots = index.slot_options("gather_rows", rows, dcp_size=dcp_size, dcp_rank=dcp_rank, interleave=interleave)
    return dispatch.run("gather_rows", implementation, buffer, loc, layer=layer, split=split, **slots, config=config)
