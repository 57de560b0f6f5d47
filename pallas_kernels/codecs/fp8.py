"""The two 8-bit floats of the OCP specification (OFP8, 2023): e4m3fn and e5m2, encoded by integer arithmetic.

XLA's own casts do not saturate (465 becomes NaN in e4m3fn, 61440 infinity in e5m2), and on CPU they are slower than
this. Values are clamped to the finite range (448, 57344), infinities too; NaN stays NaN with its sign.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax


class Format(NamedTuple):
    """What tells the two formats apart."""

    mantissa: int  # explicit mantissa bits
    bias: int  # exponent bias
    largest: float  # largest finite value
    nan: int  # code of the positive NaN


FORMATS = {"float8_e4m3fn": Format(3, 7, 448.0, 0x7F), "float8_e5m2": Format(2, 15, 57344.0, 0x7E)}


def encode(x, dtype):
    """uint8 codes of `x` (float32, bfloat16, float16 or the other FP8) in `dtype`, same shape.

    Every source is a subset of float32, so that the one rounding is from the float32 bits to the format: to nearest,
    ties to even, subnormals included.
    """
    fmt = FORMATS[jnp.dtype(dtype).name]
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    largest = lax.bitcast_convert_type(jnp.float32(fmt.largest), jnp.uint32)
    clamped = jnp.minimum(magnitude, largest)
    drop = 23 - fmt.mantissa
    rounded = (clamped + ((1 << (drop - 1)) - 1) + ((clamped >> drop) & 1)) >> drop
    normal = rounded - jnp.uint32((127 - fmt.bias) << fmt.mantissa)
    # Adding 2**(23 + exponent of the smallest subnormal) leaves the count of subnormal steps in the low mantissa bits,
    # rounded to nearest even by the addition itself.
    step = jnp.float32(2.0 ** (24 - fmt.bias - fmt.mantissa))
    steps = lax.bitcast_convert_type(lax.bitcast_convert_type(clamped, jnp.float32) + step, jnp.uint32)
    subnormal = steps - lax.bitcast_convert_type(step, jnp.uint32)
    smallest_normal = (128 - fmt.bias) << 23
    code = jnp.where(clamped < smallest_normal, subnormal, normal)
    return (jnp.where(is_nan, jnp.uint32(fmt.nan), code) | sign).astype(jnp.uint8)
