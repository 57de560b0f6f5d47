"""scatter_mla: the latent (nope) and rotary (rope) part of MLA tokens into one row each."""

import jax

from pallas_kernels import codecs, dispatch, index


def scatter_mla(
    kv_buffer,
    loc,
    nope,
    rope=None,
    *,
    dtype,
    layer=None,
    scale=None,
    dcp_size: int = 1,
    dcp_rank=0,
    interleave: int = 1,
    skip_slot: int | None = None,
    implementation: str | None = None,
    config: dispatch.KernelConfig | None = None,
) -> jax.Array:
    """Casts to `dtype` and writes `[nope | rope]` of token i to slot `loc[i]` of this rank's buffer.

    Args:
      kv_buffer: `[rows, 1, r + p]` unsigned words of `dtype`'s width, or `[layers, rows, 1, r + p]` with `layer`.
      loc: `[N]` signed integers, slot ids in `[0, rows * dcp_size)`; no two alike apart from dropped ones.
      nope: `[N, 1, r]` floats. rope: `[N, 1, p]` floats, or None when `nope` is the whole row (p = 0).
      dtype, layer, scale: as `dtype`, `layer` and `k_scale` in `scatter_kv`; one scale serves the whole row.
      dcp_size, dcp_rank, interleave, skip_slot, implementation, config: as in `scatter_rows`.

    Returns:
      The new buffer.

    Raises:
      TypeError: `loc` is not of signed integers. ValueError: shapes, dtypes or a scale that do not fit.
    """
    loc = index.as_slot_ids(loc, "scatter_mla")
    n, width = loc.shape[0], kv_buffer.shape[-1]
    rope_width = 0 if rope is None else rope.shape[-1]
    nope = codecs.as_rows(nope, [(n, 1, width - rope_width)], "scatter_mla", "nope")
    if rope is not None:
        rope = codecs.as_rows(rope, [(n, 1, rope_width)], "scatter_mla", "rope")
    index.check_buffers((kv_buffer,), codecs.word_dtype(dtype), layer, "scatter_mla")
    scale = codecs.as_scale(scale, dtype, "scatter_mla", "scale")
    slots = index.slot_options(
        "scatter_mla",
        index.rows_of(kv_buffer, layer),
        dcp_size=dcp_size,
        dcp_rank=dcp_rank,
        interleave=interleave,
        skip_slot=skip_slot,
    )
    options = {"dtype": dtype, "layer": layer, "scale": scale}
    return dispatch.run("scatter_mla", implementation, kv_buffer, loc, nope, rope, **options, **slots, config=config)
