"""gather_fp4: rows of FP4 buffers by slot id, dequantised."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels import codecs, dispatch, index
from pallas_kernels.codecs import fp4


def gather_fp4(
    buffers: tuple,
    scale_buffers: tuple,
    loc,
    *,
    dtype: Any = jnp.bfloat16,
    layer=None,
    split: int | None = None,
    dcp_size: int = 1,
    dcp_rank: Any = 0,
    interleave: int = 1,
    implementation: str | None = None,
    config: dispatch.KernelConfig | None = None,
) -> tuple:
    """Values of this rank's rows by slot id; zeros where another rank owns the id or it is out of range.

    Args:
      buffers: uint8 `[rows, heads, dim / 2]` each (K and V, or an MLA row), or with the layers in front with `layer`.
      scale_buffers: uint8 `[rows, heads * dim / 16]` each, or with the layers in front.
      loc: `[N]` signed integers, slot ids; they may repeat.
      dtype: float dtype of the result.
      layer: None, or an index that may be traced; out of range reads zeros.
      split: None, or a multiple of 16 (an MLA row's nope) to split the results at.
      dcp_size, dcp_rank, interleave, implementation, config: as in `scatter_rows`.

    Returns:
      For each buffer `[N, heads, dim]`, or with `split` the pair `[N, heads, split]`, `[N, heads, rest]`.

    Raises:
      TypeError: `loc` is not of signed integers. ValueError: shapes, dtypes or a slot option that do not fit.
    """
    where = "gather_fp4"
    loc = index.as_slot_ids(loc, where)
    index.check_buffers(buffers, "uint8", layer, where)
    for packed, scales in zip(buffers, scale_buffers, strict=True):
        fp4.check_scales(packed, scales, where, "a buffer")
        if split is not None and not (0 < split < 2 * packed.shape[-1] and split % fp4.BLOCK == 0):
            wanted = f"a multiple of {fp4.BLOCK} within the row of {2 * packed.shape[-1]}"
            raise ValueError(f"{where}: split must be {wanted}, got {split}")
    rows = index.rows_of(buffers[0], layer)
    slots = index.slot_options(where, rows, dcp_size=dcp_size, dcp_rank=dcp_rank, interleave=interleave)
    options = {"dtype": codecs.as_float_dtype(dtype, where, "dtype"), "layer": layer, "split": split} | slots
    return dispatch.run(where, implementation, buffers, scale_buffers, loc, **options, config=config)
