"""Rows to the unsigned words that buffers hold, and back: once, for the kernels and for XLA."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.codecs import fp8, fp8_cast

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_READ_DTYPES = ("float64", *FLOAT_DTYPES)
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def word_dtype(dtype) -> jnp.dtype:
    """The unsigned word of the same width: uint32, uint16 or uint8."""
    return jnp.dtype(_WORDS[jnp.dtype(dtype).itemsize])


def is_fp8(dtype) -> bool:
    """Whether `dtype` is one of the two 8-bit floats, the only ones that take a scale."""
    return jnp.dtype(dtype).name in fp8.FORMATS


def exact_div(x, divisor):
    """`x / divisor` in IEEE float32; the divisor broadcasts.

    XLA on CPU turns a division by a broadcast scalar, traced or not, into a multiplication by its reciprocal, which is
    off by one ulp for half of all values. A divisor of full shape behind a barrier is divided as written.
    """
    x = x.astype(jnp.float32)
    full = jnp.broadcast_to(jnp.asarray(divisor, jnp.float32), x.shape)
    return lax.div(x, lax.optimization_barrier(full))


def divide_for_fp8(rows, scale):
    """`rows / scale` in float32 whose FP8 codes are the IEEE quotient's: XLA on CUDA divides with up to two ulp off."""
    return lax.platform_dependent(rows, scale, cuda=fp8_cast.divide, default=exact_div)


def to_words(rows, dtype, scale=None, divide=divide_for_fp8):
    """Casts float rows to `dtype` and returns its bits as unsigned words of the same shape.

    Rounds to nearest even straight from the source dtype. For the 8-bit formats: divides by `scale` in float32 where
    one is given, clamps to the finite range, keeps NaN. `divide` is for kernels, whose language has another division.
    """
    dtype = jnp.dtype(dtype)
    if is_fp8(dtype):
        if scale is not None:
            rows = divide(rows, scale)
        return fp8.encode(rows, dtype)
    return lax.bitcast_convert_type(rows.astype(dtype), word_dtype(dtype))


def from_words(words, dtype, scale=None, dst_dtype=None):
    """The rows that `words` hold, as `dst_dtype` (default: `dtype`; with a scale bfloat16, multiplied in float32)."""
    rows = lax.bitcast_convert_type(words, jnp.dtype(dtype))
    if scale is not None:
        rows = rows.astype(jnp.float32) * jnp.asarray(scale, jnp.float32).reshape(())
        dst_dtype = jnp.bfloat16 if dst_dtype is None else dst_dtype
    return rows if dst_dtype is None else fp8.cast(rows, dst_dtype)


def as_rows(rows, shapes: list[tuple[int, ...]], where: str, name: str) -> jax.Array:
    """Validates float rows of one of `shapes` and returns them in the first.

    float64 is rounded to float32 first, as JAX does where x64 is off; every other dtype stays as it is.

    Raises:
      ValueError: another shape, or a dtype that is neither that nor one of `FLOAT_DTYPES`.
    """
    if not isinstance(rows, jax.Array):
        try:
            host = np.asarray(rows)
        except ValueError as error:
            raise ValueError(f"{where}: {name} must have shape {shapes[0]}: {error}") from None
        # A copy: the caller may reuse its memory while the step is in flight. JAX takes native byte order only.
        rows = host.astype(host.dtype.newbyteorder("="))
    if rows.dtype == np.float64:
        with np.errstate(over="ignore"):
            rows = rows.astype(np.float32)
    if rows.shape not in shapes:
        raise ValueError(f"{where}: {name} must have shape {' or '.join(map(str, shapes))}, got {rows.shape}")
    if rows.dtype.name not in FLOAT_DTYPES:
        raise ValueError(f"{where}: {name} must be one of {', '.join(FLOAT_DTYPES)}, got {rows.dtype}")
    return rows.reshape(shapes[0])


def parse_dtype(dtype) -> jnp.dtype | None:
    """`dtype` as a numpy dtype, or None where it is none."""
    try:
        return jnp.dtype(dtype)
    except TypeError:
        return None


def as_float_dtype(dtype, where: str, name: str) -> jnp.dtype | None:
    """Validates a dtype that rows are to be read in; None stays None. ValueError for what no row can be read in."""
    if dtype is None:
        return None
    parsed = parse_dtype(dtype)
    if parsed is None or parsed.name not in _READ_DTYPES:
        raise ValueError(
            f"{where}: {name} must be a float dtype, got {dtype!r}; rows are read as {', '.join(_READ_DTYPES)}"
        )
    return parsed


def as_scale(scale, dtype, where: str, name: str) -> jax.Array | None:
    """Validates a scale: None, a positive number, or an array of shape () or (1,); float32 `()` comes back.

    Raises:
      ValueError: a scale for a dtype that takes none, a wrong shape, no real number, or (where that can be told without
        waiting for a device) a number that is not positive and finite.
    """
    if scale is None:
        return None
    if not is_fp8(dtype):
        raise ValueError(f"{where}: {name} is for FP8 rows only, and these are {jnp.dtype(dtype).name}")
    array = scale if isinstance(scale, jax.Array) else np.asarray(scale)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise ValueError(f"{where}: {name} must be a number or an array of one, got {scale!r}")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if array.shape not in ((), (1,)):
        raise ValueError(f"{where}: {name} must be a number or have shape () or (1,), got shape {array.shape}")
    # Judged as float32, which is what divides: 1e-50 is zero there and 1e300 infinite.
    # A subnormal one would be flushed to zero.
    if isinstance(array, np.ndarray) and not (np.finfo(np.float32).tiny <= array < np.inf).all():
        raise ValueError(f"{where}: {name} must be positive and finite in float32, got {scale} (2**-126 is the least)")
    return jnp.asarray(array).reshape(())
