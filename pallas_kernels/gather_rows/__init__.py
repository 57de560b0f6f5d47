"""gather_rows: rows of buffers by slot id."""

import jax

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
      buffer: `[rows, ...]` of any dtype, or `[layers, rows, ...]` with `layer`; or a tuple of them that have the same
        rows (K and V), which are then read in one launch.
      layer: None, or an index that may be traced; out of range reads zeros.
      loc: `[N]` signed integers, slot ids.
      split: None, or a width of the last axis (an MLA row's nope) to split the result at.
      dcp_size, dcp_rank, interleave, implementation, config: as in `scatter_rows`.

    Returns:
      `[N, ...]`, or with `split` the pair `[N, ..., split]`, `[N, ..., rest]`; for a tuple of buffers a tuple of those.

    Raises:
      TypeError: `loc` is not of signed integers. ValueError: `split` is not within the row, buffers that differ in
        rows, or a slot option.
    """
    loc = index.as_slot_ids(loc, "gather_rows")
    buffers = tuple(map(jax.numpy.asarray, buffer)) if isinstance(buffer, tuple) else (jax.numpy.asarray(buffer),)
    for one in buffers:
        if split is not None and not 0 < split <= one.shape[-1]:
            raise ValueError(f"gather_rows: split must lie within the row of {one.shape[-1]}, got {split}")
        if index.rows_of(one, layer) != index.rows_of(buffers[0], layer):
            raise ValueError(f"gather_rows: buffers differ in rows: {[b.shape for b in buffers]}")
    rows = index.rows_of(buffers[0], layer)
    slots = index.slot_options("gather_rows", rows, dcp_size=dcp_size, dcp_rank=dcp_rank, interleave=interleave)
    options = {"layer": layer, "split": split} | slots
    result = dispatch.run("gather_rows", implementation, buffers, loc, **options, config=config)
    return result if isinstance(buffer, tuple) else result[0]
