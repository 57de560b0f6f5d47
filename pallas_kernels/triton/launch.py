"""What all triton kernels share: where a program's rows are, references to them, words, and the launch itself."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import dispatch, index
from pallas_kernels.dispatch import KernelConfig

MOST_ROWS, MOST_WARPS = 128, 16
_MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}  # by compute capability


def refusal_of_config(config: KernelConfig | None) -> str | None:
    """Why a triton kernel cannot follow `config`, or None."""
    config = config or KernelConfig()
    if config.stages is not None:
        return "config.stages is for mosaic"
    for name, most in (("rows", MOST_ROWS), ("warps", MOST_WARPS)):
        value = getattr(config, name)
        if value is not None and not (0 < value <= most and value & (value - 1) == 0):
            return f"config.{name} must be a power of two up to {most}, got {value}"
    return None


def refusal_of_words(buffers: Sequence[Any], words: Sequence[int]) -> str | None:
    """Why buffers cannot be addressed by words of so many bytes, or None."""
    for buffer, word in zip(buffers, words, strict=True):
        # The backend counts offsets in signed 32-bit words up to 2**32 bytes, and in 64-bit ones beyond.
        if word == 1 and 2**31 < buffer.size <= 2**32:
            return f"it would address {buffer.size} single bytes in 32 bits"
    return None


def multiprocessors() -> int:
    """Of the chip that the program being traced is for; those of an H100 where that is not known."""
    return _MULTIPROCESSORS.get(dispatch.compute_capability(dispatch.device_kind()) or 0, 132)


def divide(x, scale):
    """IEEE float32: a plain division compiles to `div.full.f32`, which is off by up to two ulp."""
    args = [x.astype(jnp.float32), jnp.broadcast_to(scale, x.shape)]
    shape = [jax.ShapeDtypeStruct(x.shape, jnp.float32)]
    return plgpu.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;", args=args, constraints="=f,f,f", pack=1, result_shape_dtypes=shape
    )[0]


def as_dtype(words, dtype):
    return lax.bitcast_convert_type(words, dtype)


def uint(size: int) -> np.dtype:
    return jnp.dtype(f"uint{8 * size}")


def to_words(x, shape: tuple[int, ...], size: int):
    """The bits of `x` as words of `size` bytes in `shape`, whose last axis is -1; on a GPU a view."""
    own, lead = x.dtype.itemsize, len(shape) - 1
    x = as_dtype(x, uint(own)).reshape(*shape)
    if size > own:
        x = x.reshape(*x.shape[:lead], -1, size // own)
    return as_dtype(x, uint(size)).reshape(*x.shape[:lead], -1)


def from_words(words, shape: tuple[int, ...], dtype):
    """The inverse of `to_words`."""
    own, size = jnp.dtype(dtype).itemsize, words.dtype.itemsize
    if size < own:
        words = words.reshape(*words.shape[:-1], -1, own // size)
    return as_dtype(as_dtype(words, uint(own)).reshape(shape), dtype)


def locate(loc_ref, rows: int, n: int, layer: Any, layers: int, count: int, slots: dict[str, Any]) -> tuple[Any, ...]:
    """In a kernel: where the rows of this program are.

    Args:
      rows: of a program. n: rows of the call.
      layer: a number, possibly traced, or None for the only one. layers, count: how many there are, and rows of each.
      slots: options of `index.local_row`.

    Returns:
      For each row its number in the call and whether it is one, its row in the buffers and whether it is here, where
      all others are masked; and the layer.
    """
    token = pl.program_id(0) * rows + lax.iota(jnp.int32, rows)
    live = token < n
    loc = plgpu.load(loc_ref.at[token], mask=live)
    row = index.local_row(loc, count, **slots)
    here = live & (row >= 0)
    zero = pl.program_id(0) * 0  # the interpreter knows no literal indices
    if layer is None:
        layer = zero
    else:
        layer = zero + layer
        inside = (layer >= 0) & (layer < layers)
        here, layer = here & inside, jnp.where(inside, layer, 0).astype(jnp.int32)
    # What is not here is masked. Its row lies past the end for an interpreter, which drops that, masked or not.
    return token, live, jnp.where(here, row, count).astype(jnp.int32), here, layer


def window(ref, first, row, start: int, width: int):
    """In a kernel: `[rows, width]` of a `[first, row, column]` reference."""
    return ref.at[first, row[:, None], (start + lax.iota(jnp.int32, width))[None, :]]


def call(
    name: str,
    kernel: Callable[..., None],
    operands: Sequence[Any],
    out: Sequence[Any],
    grid: tuple[int, ...],
    warps: int,
    *,
    aliased: int,
    interpret: bool,
) -> Sequence[jax.Array]:
    """Runs a kernel on references to whole arrays. The last `aliased` operands become the results, in place."""
    first = len(operands) - aliased
    with contextlib.nullcontext() if interpret else dispatch.for_gpu():
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[pl.no_block_spec] * len(operands),
            out_specs=[pl.no_block_spec] * len(out),
            out_shape=out,
            input_output_aliases={first + i: i for i in range(aliased)},
            compiler_params=plgpu.CompilerParams(num_warps=warps),
            interpret=interpret,
            name=name,
        )(*operands)


def vary(x, axes: frozenset):
    """`x` as varying over these axes of a shard_map that checks them."""
    missing = axes - dispatch.varying_axes(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else x
