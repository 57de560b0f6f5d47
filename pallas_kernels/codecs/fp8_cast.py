"""FP8 codes inside a GPU kernel: the same bits as `fp8.encode`, by the chip's conversion instruction.

Two traps of the chip are dealt with here. A float32 division compiles to `div.full.f32`, which is off by up to two ulp
(XLA sets that for every kernel of the process): enough to move a quotient off a tie. And the conversion gives every NaN
one positive code.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.codecs.fp8 import FORMATS

_EXPONENT = np.uint32(0x7F800000)
_SIGN = np.uint32(0x80000000)
# Significant bits of a source times these bits of the reciprocal fit the 24 of float32: such a product is exact.
_RECIPROCAL_BITS = {"bfloat16": 16, "float16": 13, "float8_e4m3fn": 16, "float8_e5m2": 16}
# Past this, divided by a scale below 4, every format saturates; within it no product overflows.
_SATURATES = 2.0**19


def encode(x, dtype, scale=None, *, clamp: bool = True):
    """uint8 codes of `x` (a float array), or of its IEEE float32 quotient by `scale`, in the 8-bit float `dtype`.

    Args:
      scale: None, or a positive scalar of at least 2**-126, which may be traced.
      clamp: whether to clamp to the finite range, which a conversion that saturates (NVIDIA's does) needs not.
    """
    x = x.astype(jnp.float32) if scale is None else divide(x, scale)
    name = jnp.dtype(dtype).name
    largest = np.float32(FORMATS[name].largest)
    # The sign of a NaN would be lost; every other code has its sign already.
    sign = (_bits(x) >> 24).astype(jnp.uint8) & np.uint8(0x80)
    finite = jnp.clip(x, -largest, largest) if clamp else x
    code = lax.bitcast_convert_type(finite.astype(dtype), jnp.uint8)
    if name == "float8_e5m2":  # has codes past the largest value, 0x7B, of which the chip takes another for NaN
        wide = code.astype(jnp.uint32)
        code = jnp.where(wide & 0x7F > 0x7B, np.uint32(0x7E), wide).astype(jnp.uint8)
    return code | sign


def divide(x, scale):
    """float32 `x / scale` whose FP8 code is that of the IEEE quotient; contraction to FMA leaves it as it is.

    The scale is brought into [1, 4) by a power of two, and its reciprocal computed to 40 bits. A source of at most 11
    significant bits times the reciprocal is then known to 36 bits, which decides every rounding that FP8 can see: a
    quotient of so few bits is never that close to where float32 rounds onto or off a midpoint of FP8.
    """
    narrow = _RECIPROCAL_BITS.get(jnp.dtype(x.dtype).name)
    x = x.astype(jnp.float32)
    scale = jnp.broadcast_to(scale, x.shape)
    power = _float(np.uint32(254 << 23) - jnp.minimum(_bits(scale) & _EXPONENT, np.uint32(253 << 23)))
    x, scale = x * power, scale * power
    reciprocal = 1 / scale
    correction = reciprocal * _remainder(jnp.ones_like(scale), reciprocal, scale)
    if narrow is None:
        return _divide_exactly(x, scale, reciprocal + correction)
    # One unit less than the leading bits, so that the rest is positive: an infinity or a negative zero stays one.
    unit = np.uint32(1 << (24 - narrow))
    leading = _float((_bits(reciprocal) & ~(unit - np.uint32(1))) - unit)
    return x * leading + x * ((reciprocal - leading) + correction)


def _divide_exactly(x, scale, reciprocal):
    """The IEEE float32 quotient of any float32 within FP8's range: an estimate within one ulp, and its remainder."""
    sign = _bits(x) & _SIGN
    x = jnp.clip(x, -_SATURATES, _SATURATES)
    quotient = x * reciprocal
    quotient = quotient + _remainder(x, quotient, scale) * reciprocal
    remainder = _remainder(x, quotient, scale)
    half_ulp = _float(jnp.maximum(_bits(quotient) & _EXPONENT, np.uint32(25 << 23)) - np.uint32(24 << 23))
    half = scale * half_ulp
    step = jnp.where(remainder > half, half_ulp, jnp.where(remainder < -half, -half_ulp, np.float32(0)))
    return _float(_bits(quotient + (step + step)) | sign)


def _remainder(x, quotient, divisor):
    """`x - quotient * divisor`, exact where the quotient is within a few ulp of `x / divisor`.

    Each factor is split into 12 leading bits and the rest, so that all four products are exact, and so are the sums
    (T. J. Dekker, A floating-point technique for extending the available precision, 1971).
    """
    q1, d1 = _leading(quotient), _leading(divisor)
    q2, d2 = quotient - q1, divisor - d1
    return (((x - q1 * d1) - q1 * d2) - q2 * d1) - q2 * d2


def _leading(x):
    return _float(_bits(x) & np.uint32(0xFFFFF000))


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)
