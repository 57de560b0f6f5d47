"""scatter_kv in Triton: K and V in one launch, the cast to FP8 included."""

import math

import jax.numpy as jnp

from pallas_kernels import triton


def _plan(dtype, k, v, k_scale, v_scale):
    return [
        triton.Columns(i, 0, math.prod(x.shape[1:]), jnp.dtype(x.dtype), jnp.dtype(dtype), scale)
        for i, (x, scale) in enumerate([(k, k_scale), (v, v_scale)])
    ]


def unsupported(k_buffer, v_buffer, loc, k, v, *, dtype, layer=None, k_scale=None, v_scale=None, config=None, **_):
    columns = _plan(dtype, k, v, k_scale, v_scale)
    return triton.refusal([k_buffer, v_buffer], columns, loc.shape[0], 1 if layer is None else 2, config)


def scatter_kv(k_buffer, v_buffer, loc, k, v, *, dtype, layer, k_scale, v_scale, config, interpret, **slots):
    columns = _plan(dtype, k, v, k_scale, v_scale)
    options = {"layer": layer, "slots": slots, "config": config, "interpret": interpret}
    return triton.move("scatter_kv", [k_buffer, v_buffer], loc, columns, [k, v], **options)
