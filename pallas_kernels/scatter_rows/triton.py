"""scatter_rows in Triton."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels import triton

_CAST = ("float32", "bfloat16", "float16")  # by the kernel; other casts are XLA's, before it


def _plan(cache, rows):
    (columns,) = triton.whole_rows([cache], 1)
    dense = jnp.dtype(rows.dtype)
    if dense.name in _CAST and jnp.dtype(cache.dtype).name in _CAST:
        columns = dataclasses.replace(columns, dense=dense, raw=dense == columns.stored)
    return columns


def unsupported(cache, loc, rows, *, config=None, **_):
    return triton.refusal([cache], [_plan(cache, rows)], loc.shape[0], 1, config)


def scatter_rows(cache, loc, rows, *, config, interpret, **slots):
    columns = _plan(cache, rows)
    rows = rows.astype(columns.dense)
    options = {"slots": slots, "config": config, "interpret": interpret}
    return triton.move("scatter_rows", [cache], loc, [columns], [rows], **options)[0]
