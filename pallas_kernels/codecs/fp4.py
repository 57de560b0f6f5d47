"""FP4 rows: e2m1 codes in blocks of 16 that share a power of two (the shape of OCP's MXFP4, with blocks of 16).

A block's exponent is `e = ceil(log2(max(amax / 6, 1e-10)))`, its scale byte `e + 127`, and an element's code the count
of `|x| / 2**e >= 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5`, plus 8 where `x < 0` (the block-16 format of SGLang's KV pools).
Codes stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6; the even element of a pair is the low half of its byte.

All of it is integer arithmetic on the bits of float32, and sums that are exact, the same on every backend: logarithms
and powers are off by an ulp at some powers of two, and some backends flush subnormals.

What is not finite: a block that holds a NaN has the exponent 128, the scale byte 255, and decodes to NaN, all 16
elements; a NaN's own code is 0. An infinity counts as 2**128: it decodes to itself, and what is finite beside it mostly
to zero. Neither touches another block.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.codecs import fp8

BLOCK = 16
_LEAST_EXPONENT, _NAN_EXPONENT = -33, 128  # the first is ceil(log2(1e-10))
_INFINITY = 0x7F800000


def _bits(x: float) -> np.int32:
    return np.float32(x).view(np.int32)


def magnitudes(x):
    """int32 bits of `|x|`, which are in the order of the values, and whether `x < 0`; any float of up to 32 bits."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    magnitude = (bits & 0x7FFFFFFF).astype(jnp.int32)
    return magnitude, bits - np.uint32(0x80000001) < _INFINITY  # not -0.0, nor NaN


def exponents(amax):
    """int32 exponents of blocks from the `magnitudes` of their largest elements, NaN counting as the largest."""
    # The number of doublings from 6 to the largest element, rounded up: exactly log2 of IEEE's amax / 6.
    exponent = jnp.maximum((amax - _bits(6.0) + 0x7FFFFF) >> 23, _LEAST_EXPONENT)
    return jnp.where(amax > _INFINITY, _NAN_EXPONENT, exponent)


def scale_bytes(exponent):
    """int32 scale bytes of blocks."""
    return exponent + 127


def codes(magnitude, negative, exponent):
    """int32 codes 0 to 15 of elements, by the `exponents` of their blocks."""
    # The bits of the scaled element; below zero, which is past all, for a tiny one, and past 1 for a NaN.
    scaled = (magnitude - (exponent << 23)).astype(jnp.uint32)
    most = jnp.where(exponent == _NAN_EXPONENT, _bits(1.0), _bits(6.0)).astype(jnp.uint32)
    scaled = jnp.where(scaled > most, np.uint32(0), scaled)
    # To one bit of mantissa, rounded half up; below 1, where codes are multiples of a half, that of its sum with 1. The
    # larger of y + 1 and 2 * y is whichever counts, and exact without the bits that no threshold has.
    y = lax.bitcast_convert_type(scaled & np.uint32(0xFFFFE000), jnp.float32)
    shifted = lax.bitcast_convert_type(jnp.maximum(y + np.float32(1), y + y), jnp.int32)
    return ((shifted - (_bits(1.0) - (1 << 21))) >> 22) + jnp.where(negative, 8, 0)


def flat(scales):
    """Scale bytes by head, `[..., heads, blocks]`, as they lie in buffers: `[..., heads * blocks]`."""
    return scales.reshape(*scales.shape[:-2], math.prod(scales.shape[-2:]))


def check_scales(packed, scales, where: str, name: str) -> None:
    """Raises ValueError unless `scales` are the uint8 buffer that goes with `packed`, `[..., heads, dim / 2]`."""
    *lead, heads, half = packed.shape
    if 2 * half % BLOCK:
        raise ValueError(f"{where}: {name} must have rows of a multiple of {BLOCK} elements, got {2 * half}")
    expected = (*lead, heads * 2 * half // BLOCK)
    if scales.shape != expected or scales.dtype != jnp.uint8:
        wanted, got = f"uint8 of shape {expected}", f"{scales.dtype} {scales.shape}"
        raise ValueError(f"{where}: the scales of {name} must be {wanted}, got {got}")


def encode(x):
    """Packed codes and scale bytes of float rows.

    Args:
      x: `[..., D]` floats of up to 32 bits, D a multiple of 16.

    Returns:
      uint8 `[..., D / 2]` and uint8 `[..., D / 16]`.
    """
    even, odd = (magnitudes(half) for half in _halves(x))
    exponent = exponents(jnp.maximum(even[0], odd[0]).max(axis=-1))
    low, high = (codes(half[0], half[1], exponent[..., None]) for half in (even, odd))
    packed = (low | (high << 4)).astype(jnp.uint8).reshape(*x.shape[:-1], x.shape[-1] // 2)
    return packed, scale_bytes(exponent).astype(jnp.uint8)


def _halves(x):
    """The even and the odd elements of rows as float32 `[..., D / 16, 8]`."""
    shape = (*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK // 2)
    if x.dtype == jnp.bfloat16:  # as words of two elements, whose upper halves are float32: no strided access
        words = lax.bitcast_convert_type(x.reshape(*shape, 2), jnp.uint32)
        return (lax.bitcast_convert_type(bits, jnp.float32) for bits in (words << 16, words & np.uint32(0xFFFF0000)))
    x = x.astype(jnp.float32).reshape(*shape, 2)
    return x[..., 0], x[..., 1]


def values(code, scale):
    """float32 values of codes 0 to 15 by their blocks' scale bytes, both int32; exact but for what passes 2**128."""
    halves = (np.uint32(0xC8643210) >> ((code & 7) << 2).astype(jnp.uint32)) & 15  # twice the value, a digit a code
    # A byte below 2 is no block's but that of a row never written, whose codes are zero.
    half = lax.bitcast_convert_type(jnp.clip(scale - 1, 1, 253) << 23, jnp.float32)
    half = jnp.where(scale == scale_bytes(_NAN_EXPONENT), np.float32(np.nan), half)
    value = lax.bitcast_convert_type(halves.astype(jnp.int32).astype(jnp.float32) * half, jnp.int32)
    return lax.bitcast_convert_type(value ^ ((code & 8) << 28), jnp.float32)


def decode(packed, scales, dtype=jnp.bfloat16):
    """Rows of `dtype` from what `encode` returned: `[..., D / 2]` and `[..., D / 16]` (also flat) to `[..., D]`."""
    *lead, half = packed.shape
    scales = scales.astype(jnp.int32).reshape(*lead, 2 * half // BLOCK, 1)
    packed = packed.astype(jnp.int32).reshape(*lead, 2 * half // BLOCK, BLOCK // 2)
    even, odd = (values(code, scales) for code in (packed & 15, packed >> 4))
    if dtype == jnp.bfloat16:  # as in `_halves`: of every value the upper half of float32 is all
        low, high = (lax.bitcast_convert_type(x, jnp.uint32) for x in (even, odd))
        pairs = lax.bitcast_convert_type((low >> 16) | (high & np.uint32(0xFFFF0000)), jnp.bfloat16)
    else:
        pairs = fp8.cast(jnp.stack([even, odd], axis=-1), dtype)
    return pairs.reshape(*lead, 2 * half)
