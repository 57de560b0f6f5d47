"""move_rows: rows of many buffers from slots to slots, all read before any is written."""

import jax

from pallas_kernels import dispatch, index


def move_rows(
    buffers,
    tgt_loc,
    src_loc,
    *,
    stacked: bool = False,
    axis_name=None,
    dcp_size: int = 1,
    dcp_rank=0,
    interleave: int = 1,
    skip_slot: int | None = None,
    implementation: str | None = None,
    config: dispatch.KernelConfig | None = None,
) -> tuple[jax.Array, ...]:
    """Copies the row of slot `src_loc[i]` to slot `tgt_loc[i]` in every buffer, across ranks where their owners differ.

    All sources are read before any target is written, so that the two may overlap. A source out of range reads zeros,
    which are written; a target that is out of range or `skip_slot` is dropped. Sources may repeat.

    Args:
      buffers: a sequence of arrays of unsigned words, `[rows, ...]` or, with `stacked`, `[layers, rows, ...]`.
      tgt_loc, src_loc: `[N]` signed integers, slot ids; no two targets alike apart from dropped ones.
      axis_name: the mesh axis (or axes) of the DCP group; required in a shard_map when `dcp_size` > 1.
      dcp_size, dcp_rank, interleave, skip_slot, implementation, config: as in `scatter_rows`.

    Returns:
      The new buffers, as a tuple. Temporary memory is the moved rows.

    Raises:
      TypeError: ids that are not signed integers. ValueError: lengths differ, or a DCP group without its axis.
    """
    tgt_loc = index.as_slot_ids(tgt_loc, "move_rows", "tgt_loc")
    src_loc = index.as_slot_ids(src_loc, "move_rows", "src_loc")
    if tgt_loc.shape != src_loc.shape:
        raise ValueError(f"move_rows: {tgt_loc.shape[0]} targets (tgt_loc) but {src_loc.shape[0]} sources (src_loc)")
    if dcp_size > 1 and axis_name is None:
        raise ValueError(f"move_rows: axis_name must name the mesh axis of the {dcp_size} ranks")
    rows = buffers[0].shape[1 if stacked else 0]
    slots = index.slot_options(
        "move_rows", rows, dcp_size=dcp_size, dcp_rank=dcp_rank, interleave=interleave, skip_slot=skip_slot
    )
    options = {"stacked": stacked, "axis_name": axis_name, "config": config}
    return dispatch.run("move_rows", implementation, tuple(buffers), tgt_loc, src_loc, **options, **slots)
