"""The two 8-bit floats of the OCP specification (OFP8, 2023): e4m3fn and e5m2, encoded by integer arithmetic.

XLA's own casts do not saturate (465 becomes NaN in e4m3fn, 61440 infinity in e5m2), and on CPU they are slower than
this. Values are clamped to the finite range (448, 57344), infinities too; NaN stays NaN with its sign.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


class Format(NamedTuple):
    """A binary format with a sign bit and an exponent of what the mantissa leaves of the other seven bits."""

    mantissa: int  # explicit mantissa bits
    bias: int  # exponent bias
    largest: float  # largest finite value
    nan: float  # what the code of the positive NaN would be worth were it a number


FORMATS = {"float8_e4m3fn": Format(3, 7, 448.0, 480.0), "float8_e5m2": Format(2, 15, 57344.0, 98304.0)}


def _bits(x: float) -> np.uint32:
    return np.float32(x).view(np.uint32)


def codes(x, dtype):
    """uint32 that hold the codes of float32 `x` in `dtype`, same shape; see `encode`."""
    fmt = FORMATS[jnp.dtype(dtype).name]
    drop = 23 - fmt.mantissa
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    clamped = jnp.minimum(magnitude, _bits(fmt.largest))
    value = jnp.where(magnitude > _bits(np.inf), _bits(fmt.nan), clamped)
    exponent = jnp.maximum(value & _bits(np.inf), _bits(2.0 ** (1 - fmt.bias)))
    # Adding 2**(drop + exponent) leaves the count of steps of the format at that exponent in the low mantissa bits,
    # rounded to nearest even by the addition itself; for subnormals too, whose exponent is that of the least normal.
    unit = exponent + np.uint32(drop << 23)
    total = lax.bitcast_convert_type(value, jnp.float32) + lax.bitcast_convert_type(unit, jnp.float32)
    steps = lax.bitcast_convert_type(total, jnp.uint32) - unit
    return (steps + (exponent >> drop) - np.uint32((128 - fmt.bias) << fmt.mantissa)) | ((bits >> 24) & 0x80)


def encode(x, dtype):
    """uint8 codes of `x` (float32, bfloat16, float16 or the other FP8) in `dtype`, same shape.

    Every source is a subset of float32, so that the one rounding is from the float32 bits to the format: to nearest,
    ties to even, subnormals included.
    """
    return codes(x.astype(jnp.float32), dtype).astype(jnp.uint8)


def cast(rows, dtype):
    """`rows.astype(dtype)`, but to another 8-bit float by `encode`: a finite number never becomes NaN."""
    if jnp.dtype(dtype).name in FORMATS and rows.dtype != dtype:
        return lax.bitcast_convert_type(encode(rows, dtype), dtype)
    return rows.astype(dtype)
