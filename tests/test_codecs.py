"""Casts, bit for bit against ml_dtypes on clamped values: every 16-bit source, float32 at random and at the edges."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import codecs

FP8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def float32_values() -> np.ndarray:
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    near = (rng.standard_normal(200_000) * rng.choice([1e-4, 1e-2, 1, 100, 1e4], 200_000)).astype(np.float32)
    edges = np.array([0, 448, 464, 464.5, 465, 1000, 57344, 61440, 1e6, np.inf, np.nan, 2.0**-9, 2.0**-10], np.float32)
    return np.concatenate([anything, near, edges, -edges])


def sources() -> dict[str, np.ndarray]:
    every = np.arange(65536, dtype=np.uint16)
    return {
        "float32": float32_values(),
        "bfloat16": every.view(ml_dtypes.bfloat16),
        "float16": every.view(np.float16),
        "float8_e4m3fn": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
        "float8_e5m2": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2),
    }


def clamped(x: np.ndarray, dtype) -> np.ndarray:
    largest = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(all="ignore"):
        return np.clip(x.astype(np.float32), -largest, largest).astype(dtype)


@pytest.mark.parametrize("source", sources())
@pytest.mark.parametrize("target", FP8)
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_fp8_saturates_and_rounds_to_nearest_even(source, target, jit):
    x = sources()[source]
    expected = clamped(x, FP8[target])
    got = np.asarray(jit(lambda x: codecs.to_words(x, target))(x)).view(FP8[target])
    nan = np.isnan(x.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got.view(np.uint8)[~nan], expected.view(np.uint8)[~nan])


@pytest.mark.parametrize("target", FP8)
@pytest.mark.parametrize("scale", [0.04, 0.25, 3.0])
def test_a_scale_divides_in_ieee_float32(target, scale):
    x = (np.random.default_rng(1).standard_normal(100_000) * 30).astype(np.float32)
    expected = clamped(x / np.float32(scale), FP8[target]).view(np.uint8)
    for traced in (False, True):
        encode = jax.jit(lambda x, s, traced=traced: codecs.to_words(x, target, s if traced else scale))
        np.testing.assert_array_equal(encode(x, np.float32(scale)), expected)


def test_exact_div_is_ieee_and_plain_division_by_a_scalar_is_not():
    x = np.random.default_rng(2).standard_normal(10_000).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(codecs.exact_div)(x, jnp.float32(448)), x / np.float32(448))
    # Should XLA ever divide by a broadcast scalar exactly, `exact_div` can become a division.
    assert (np.asarray(jax.jit(lambda x, s: x / s)(x, jnp.float32(448))) != x / np.float32(448)).any()


@pytest.mark.parametrize(("target", "dtype"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
def test_16_bit_rows_round_to_nearest_even(target, dtype):
    x = float32_values()
    with np.errstate(all="ignore"):
        expected = x.astype(dtype)
    got = np.asarray(jax.jit(lambda x: codecs.to_words(x, target))(x))
    nan = np.isnan(x)
    # XLA on CPU takes float32 subnormals for zero; no such value is distinguishable in a float16 cache.
    tiny = np.abs(x) < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(got[~nan & ~tiny], expected.view(np.uint16)[~nan & ~tiny])
    assert np.isnan(got.view(dtype)[nan].astype(np.float32)).all()


def test_words_keep_the_bits_of_their_own_dtype():
    for name, x in sources().items():
        words = codecs.to_words(x, name)
        assert words.dtype == codecs.word_dtype(name)
        kept = np.isfinite(x.astype(np.float32)) | (name not in FP8)
        np.testing.assert_array_equal(words[kept], x.view(words.dtype)[kept])
        words = x.view(words.dtype)
        np.testing.assert_array_equal(np.asarray(codecs.from_words(words, name)).view(words.dtype), x.view(words.dtype))


def test_reading_with_a_scale_multiplies_in_float32():
    x = np.array([24, 448, -0.5], np.float32)
    words = codecs.to_words(x, "float8_e4m3fn")
    got = codecs.from_words(words, "float8_e4m3fn", 0.04)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, (x * np.float32(0.04)).astype(ml_dtypes.bfloat16))
    exact = codecs.from_words(words, "float8_e4m3fn", 0.04, jnp.float32)
    np.testing.assert_array_equal(exact, x * np.float32(0.04))
