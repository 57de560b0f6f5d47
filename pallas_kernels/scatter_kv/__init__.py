"""scatter_kv: the K and V rows of one layer into their buffers."""

import jax

from pallas_kernels import codecs, dispatch, index


def scatter_kv(
    k_buffer,
    v_buffer,
    loc,
    k,
    v,
    *,
    dtype,
    layer=None,
    k_scale=None,
    v_scale=None,
    dcp_size: int = 1,
    dcp_rank=0,
    interleave: int = 1,
    skip_slot: int | None = None,
    implementation: str | None = None,
    config: dispatch.KernelConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Casts K and V to `dtype` and writes row i to slot `loc[i]` of this rank's buffers.

    Ids out of range, of another rank, or equal to `skip_slot` are dropped; so is every row if `layer` is out of range.

    Args:
      k_buffer, v_buffer: `[rows, heads, dim]` unsigned words of `dtype`'s width (K and V may differ in dim), or
        `[layers, rows, heads, dim]` with `layer`.
      loc: `[N]` signed integers, slot ids in `[0, rows * dcp_size)`; no two alike apart from dropped ones.
      k, v: `[N, heads, dim]` floats.
      dtype: the format of the rows: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.
      layer: index into stacked buffers, may be traced; None for buffers of one layer.
      k_scale, v_scale: divide in float32 before an FP8 cast; a number or an array of shape () or (1,).
      dcp_size, dcp_rank, interleave, skip_slot, implementation, config: as in `scatter_rows`.

    Returns:
      The new buffers.

    Raises:
      TypeError: `loc` is not of signed integers. ValueError: shapes, dtypes or scales that do not fit.
    """
    loc = index.as_slot_ids(loc, "scatter_kv")
    n = loc.shape[0]
    k = codecs.as_rows(k, [(n, *k_buffer.shape[-2:])], "scatter_kv", "k")
    v = codecs.as_rows(v, [(n, *v_buffer.shape[-2:])], "scatter_kv", "v")
    index.check_buffers((k_buffer, v_buffer), codecs.word_dtype(dtype), layer, "scatter_kv")
    k_scale = codecs.as_scale(k_scale, dtype, "scatter_kv", "k_scale")
    v_scale = codecs.as_scale(v_scale, dtype, "scatter_kv", "v_scale")
    slots = index.slot_options(
        "scatter_kv",
        index.rows_of(k_buffer, layer),
        dcp_size=dcp_size,
        dcp_rank=dcp_rank,
        interleave=interleave,
        skip_slot=skip_slot,
    )
    options = {"dtype": dtype, "layer": layer, "k_scale": k_scale, "v_scale": v_scale}
    return dispatch.run("scatter_kv", implementation, k_buffer, v_buffer, loc, k, v, **options, **slots, config=config)
