"""gather_dsa: rows of a buffer packed for sparse attention by slot id, dequantised."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import codecs, dispatch, index
from pallas_kernels.codecs import dsa


def gather_dsa(
    kv_buffer,
    loc,
    *,
    kv_lora_rank: int,
    dtype: Any = jnp.bfloat16,
    layer=None,
    dcp_size: int = 1,
    dcp_rank: Any = 0,
    interleave: int = 1,
    implementation: str | None = None,
    config: dispatch.KernelConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """nope and rope of this rank's rows by slot id; zeros where another rank owns the id or it is out of range.

    Args:
      kv_buffer: uint8 `[rows, 1, r + r / 32 + 2 * p]`, or with the layers in front with `layer`.
      loc: `[N]` signed integers, slot ids; they may repeat.
      kv_lora_rank: r, a multiple of 128.
      dtype: float dtype of the results.
      layer: None, or an index that may be traced; out of range reads zeros.
      dcp_size, dcp_rank, interleave, implementation, config: as in `scatter_rows`.

    Returns:
      `[N, 1, r]` and `[N, 1, p]`.

    Raises:
      TypeError: `loc` is not of signed integers. ValueError: shapes, dtypes or a slot option that do not fit.
    """
    where = "gather_dsa"
    loc = index.as_slot_ids(loc, where)
    index.check_buffers((kv_buffer,), "uint8", layer, where)
    dsa.rope_dim(kv_buffer.shape[-1], kv_lora_rank, where)
    rows = index.rows_of(kv_buffer, layer)
    slots = index.slot_options(where, rows, dcp_size=dcp_size, dcp_rank=dcp_rank, interleave=interleave)
    options = {"kv_lora_rank": int(kv_lora_rank), "dtype": codecs.as_float_dtype(dtype, where, "dtype")}
    return dispatch.run(where, implementation, kv_buffer, loc, **options, layer=layer, **slots, config=config)
