"""scatter_mla in Triton: both parts of the row in one launch, the cast to FP8 included."""

import jax.numpy as jnp

from pallas_kernels import triton


def _plan(dtype, nope, rope, scale):
    parts = [(0, nope)] if rope is None else [(0, nope), (nope.shape[-1], rope)]
    parts = [(start, x) for start, x in parts if x.shape[-1]]
    dtype = jnp.dtype(dtype)
    columns = [triton.Columns(0, start, x.shape[-1], jnp.dtype(x.dtype), dtype, scale) for start, x in parts]
    return columns, [x for _, x in parts]


def unsupported(kv_buffer, loc, nope, rope, *, dtype, layer=None, scale=None, config=None, **_):
    columns, _ = _plan(dtype, nope, rope, scale)
    return triton.refusal([kv_buffer], columns, loc.shape[0], 1 if layer is None else 2, config)


def scatter_mla(kv_buffer, loc, nope, rope, *, dtype, layer, scale, config, interpret, **slots):
    columns, rows = _plan(dtype, nope, rope, scale)
    options = {"layer": layer, "slots": slots, "config": config, "interpret": interpret}
    return triton.move("scatter_mla", [kv_buffer], loc, columns, rows, **options)[0]
