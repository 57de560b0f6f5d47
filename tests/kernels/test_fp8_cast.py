"""The kernels' FP8 cast and division against the codec's integer arithmetic and IEEE division, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.codecs import fp8, fp8_cast

FORMATS = {"float8_e4m3fn": (3, -9), "float8_e5m2": (2, -16)}  # mantissa bits, exponent of the least subnormal
SCALES = np.array([0.04, 0.37, 1.0, 3.0, 448.0, 1 / 448, 1e-30, 1e30, 2.0**-100, 2.0**127, 3.3e38], np.float32)
# Close to eighths a quotient of bits can come nearest to where float32 rounds onto a midpoint of FP8.
NEAR = [np.float32(k / 8) * np.float32(1 + d * 2.0**-23) for k in (8, 9, 13, 15) for d in (-3, -1, 1, 3, 8)]

encode = jax.jit(fp8_cast.encode, static_argnums=1)
exact = jax.jit(fp8.encode, static_argnums=1)


@functools.cache
def every(dtype: str) -> np.ndarray:
    """All values of an 8- or 16-bit float, infinities and NaNs with both signs among them."""
    bits = 8 * np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    return np.arange(1 << bits).astype(f"uint{bits}").view(getattr(ml_dtypes, dtype, dtype))


def assert_codes(x: np.ndarray, scale: np.float32 | None, dtype: str) -> None:
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / (np.float32(1) if scale is None else scale)
    want, got = (np.asarray(c) for c in (exact(quotient, dtype), encode(x, dtype, scale)))
    at = np.flatnonzero(want != got)
    assert not len(at), f"{len(at)} codes differ, the first {x[at[0]]!r} / {scale!r}: {got[at[0]]} not {want[at[0]]}"


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_every_value_of_a_narrow_float_gets_the_code_of_its_quotient(source: str, dtype: str):
    for scale in (None, *SCALES, *NEAR):
        assert_codes(every(source), scale, dtype)


@pytest.mark.parametrize("dtype", FORMATS)
def test_float32_of_all_bits_gets_the_code_of_its_quotient(dtype: str):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)
    for scale in (None, *SCALES):
        assert_codes(bits.view(np.float32), scale, dtype)


@pytest.mark.parametrize("dtype", FORMATS)
def test_float32_next_to_the_midpoints_gets_the_code_of_its_quotient(dtype: str):
    mantissa, least = FORMATS[dtype]
    midpoints = np.arange(2**mantissa, 2 ** (mantissa + 1)) + 0.5
    midpoints = np.concatenate([*(midpoints * 2.0**e for e in range(-8, 4)), (np.arange(4) + 0.5) * 2.0**least])
    for scale in (*SCALES[:6], *NEAR):
        middle = (midpoints * np.float64(scale)).astype(np.float32).view(np.uint32).astype(np.int64)
        near = np.concatenate([middle + step for step in range(-6, 7)]).astype(np.uint32).view(np.float32)
        assert_codes(np.resize(np.concatenate([near, -near]), 4096), scale, dtype)


def test_the_scale_may_be_traced_and_a_tie_goes_to_the_even_code():
    # 1 / 0.04 is 25 in float32, halfway between 24 and 26.
    code = encode(jnp.ones(1, jnp.bfloat16), "float8_e4m3fn", jnp.float32(0.04))
    assert code.view(ml_dtypes.float8_e4m3fn) == 24
