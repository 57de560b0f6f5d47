"""The quantised formats: SGLang's bytes for SGLang's rows, and what becomes of values that have no bytes."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import quant
from jkv.testing import DSACodec, FP4Codec, PlainCodec

DATA = pathlib.Path(__file__).parent / "data"
FP4 = np.load(DATA / "fp4_block16.npz")
DSA = np.load(DATA / "dsa_rows.npz")
FP4_CASES = sorted({name.split("_x_")[0] for name in FP4.files if "_x_" in name})
DSA_CASES = sorted({name.split("_x_")[0] for name in DSA.files if "_x_" in name})
HOW = {"eagerly": lambda fn: fn, "under jit": jax.jit}
BF16 = jnp.dtype(jnp.bfloat16)


def in_jit(fn: Any, how: str) -> Any:
    return HOW[how](fn)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("source", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("case", FP4_CASES)
def test_fp4_bytes_and_values_are_sglangs(case, source, how):
    x = FP4[f"{case}_x_bf16bits"].view(BF16)
    with np.errstate(over="ignore"):
        rows = x.astype(jnp.dtype(source))
    if (rows.astype(np.float32) != x.astype(np.float32)).any():
        pytest.skip("float16 does not hold these rows")
    packed, scales = in_jit(quant.fp4_encode, how)(rows)
    np.testing.assert_array_equal(packed, FP4[f"{case}_packed"])
    np.testing.assert_array_equal(scales, FP4[f"{case}_scale"])
    values = in_jit(quant.fp4_decode, how)(packed, scales)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint16), FP4[f"{case}_deq_bf16bits"])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", DSA_CASES)
def test_dsa_bytes_are_sglangs(case, source, how):
    x, want = DSA[f"{case}_x_bf16bits"].view(BF16).astype(jnp.dtype(source)), DSA[f"{case}_row_bytes"]
    np.testing.assert_array_equal(in_jit(quant.dsa_encode, how)(x), want)
    np.testing.assert_array_equal(in_jit(quant.dsa_encode, how)(x[:, :512], x[:, 512:]), want)


@pytest.mark.parametrize("case", DSA_CASES)
def test_dsa_values_are_codes_times_scales(case):
    rows = DSA[f"{case}_row_bytes"]
    codes = rows[:, :512].view(jnp.float8_e4m3fn).astype(np.float32).reshape(6, 4, 128)
    scales = np.ascontiguousarray(rows[:, 512:528]).view("<f4")[..., None]
    got = np.asarray(quant.dsa_decode(rows))
    np.testing.assert_array_equal(got[:, :512], (codes * scales).astype(BF16).reshape(6, 512))
    np.testing.assert_array_equal(got[:, 512:].view(np.uint16), DSA[f"{case}_x_bf16bits"][:, 512:])


def magnitudes(seed: int, shape: tuple[int, ...], low: int, high: int, per: int) -> np.ndarray:
    """Values of any magnitude, alike within `per` of them, with exact powers of two, ties and zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).reshape(-1, per)
    exact = np.array([0, 0.25, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -6, -0.0])
    x[::2] = rng.choice(exact, x[::2].shape)
    return (x * np.exp2(rng.integers(low, high, (len(x), 1)))).astype(np.float32).reshape(shape)


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_fp4_of_every_magnitude_is_that_of_the_formula_in_float64(source):
    x = magnitudes(1, (500, 2, 32), *((-14, 12) if source == "float16" else (-60, 124)), per=16).astype(source)
    want = FP4Codec().encode(x)
    packed, scales = quant.fp4_encode(x)
    np.testing.assert_array_equal(scales, want["scale_buffer"])
    np.testing.assert_array_equal(packed, want["buffer"])
    np.testing.assert_array_equal(quant.fp4_decode(packed, scales, jnp.float32), FP4Codec().decode(want))


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_dsa_of_every_magnitude_is_that_of_the_formula_in_float32(source):
    x = magnitudes(2, (300, 272), *((-14, 12) if source == "float16" else (-100, 120)), per=16).astype(source)
    want = DSACodec(256).encode(x)["buffer"]
    np.testing.assert_array_equal(quant.dsa_encode(x, kv_lora_rank=256), want)


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_fp4_of_what_is_not_finite_stays_within_its_block(source):
    x = np.full((1, 1, 64), 1.5, np.float32)
    x[..., 3], x[..., 17], x[..., 30], x[..., 40] = np.nan, np.inf, -np.inf, -np.nan
    packed, scales = map(np.asarray, quant.fp4_encode(x.astype(source)))
    assert scales.ravel().tolist() == [255, 253, 255, 127 - 2]
    values = np.asarray(quant.fp4_decode(packed, scales, jnp.float32)).ravel()
    assert np.isnan(values[:16]).all()
    assert values[16:32].tolist() == [0, np.inf, *[0] * 12, -np.inf, 0]
    assert np.isnan(values[32:48]).all()
    assert (values[48:] == 1.5).all()
    assert not packed.ravel()[[0, 1, 2, 3, 4, 5, 6, 7, *range(16, 24)]].any(), "a block of NaN has no other content"
    np.testing.assert_array_equal(np.asarray(quant.fp4_decode(packed, scales)).astype(np.float32).ravel(), values)


def test_dsa_of_what_is_not_finite_stays_itself():
    x = np.full((1, 3 * 128 + 4), 1.5, np.float32)
    x[:, 5], x[:, 130], x[:, 131], x[:, 300], x[:, -1] = np.nan, np.inf, -np.inf, -np.nan, np.inf
    rows = np.asarray(quant.dsa_encode(x, kv_lora_rank=384))
    scales = np.ascontiguousarray(rows[:, 384:396]).view("<f4")[0]
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(scales, np.array([1.5, largest, 1.5], np.float32) / np.float32(448))
    assert (rows[0, :384] & 0x7F == 0x7F).nonzero()[0].tolist() == [5, 300]
    assert rows[0, [130, 131]].tolist() == [0x7E, 0xFE]
    values = np.asarray(quant.dsa_decode(rows, kv_lora_rank=384, dtype=jnp.float32))[0]
    assert np.isnan(values).nonzero()[0].tolist() == [5, 300]
    assert values[-1] == np.inf
    np.testing.assert_allclose(values[[0, 127, 256, 383]], 1.5, rtol=1e-6)
    assert not np.delete(values[128:256], [2, 3]).any()


def test_zeros_and_what_is_too_small_for_a_scale():
    packed, scales = quant.fp4_encode(np.array([[[0.0] * 16 + [1e-12] * 16 + [-1e-38] * 16]], np.float32))
    assert np.asarray(scales).ravel().tolist() == [94, 94, 94]
    assert not np.asarray(packed)[..., :16].any()
    assert not np.asarray(quant.fp4_decode(packed, scales)).any()
    rows = np.zeros((3, 130), np.float32)
    rows[1, :128], rows[2, :128] = 1e-37, 1e-35
    packed_rows = np.asarray(quant.dsa_encode(rows, kv_lora_rank=128))
    assert not packed_rows[:2].any()
    np.testing.assert_array_equal(packed_rows[2, :128], 0x7E)


def test_bytes_that_were_never_written_are_zeros():
    assert not np.asarray(quant.fp4_decode(np.zeros((2, 1, 8), np.uint8), np.zeros((2, 1), np.uint8))).any()
    assert not np.asarray(quant.dsa_decode(np.zeros((2, 656), np.uint8))).any()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_codes_are_those_of_a_pool(dtype):
    x = np.concatenate([magnitudes(3, (64, 16), -12, 16, per=16), [[np.nan, np.inf, -np.inf, 0, -0.0, *[465] * 11]]])
    codes = np.asarray(quant.fp8_encode(x, dtype))
    np.testing.assert_array_equal(codes, PlainCodec(dtype).encode(x.astype(np.float32))["buffer"])
    np.testing.assert_array_equal(
        quant.fp8_encode(x.astype(np.float32), dtype, 0.3),
        PlainCodec(dtype).encode(x.astype(np.float32), 0.3)["buffer"],
    )


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dst", [None, "bfloat16", "float32", "float16"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_values_are_those_of_all_256_codes(name, dst, how):
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(name).astype(np.float32)
    options = {} if dst is None else {"dst_dtype": dst}
    for source in (codes, codes.view(name)):
        got = in_jit(lambda x: quant.fp8_decode(x, name, **options), how)(source)
        assert got.dtype == (dst or "bfloat16")
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), values)
        scaled = np.asarray(in_jit(lambda x: quant.fp8_decode(x, name, 0.3, **options), how)(source))
        with np.errstate(over="ignore"):
            want = (values * np.float32(0.3)).astype(scaled.dtype)
        np.testing.assert_array_equal(scaled.astype(np.float32), want.astype(np.float32))
    assert np.isnan(values).sum() == (2 if name == "float8_e4m3fn" else 6)
    finite = np.isfinite(values)
    back = in_jit(lambda x: quant.fp8_encode(quant.fp8_decode(x, name), name), how)(codes)
    np.testing.assert_array_equal(np.asarray(back)[finite], codes[finite])
    np.testing.assert_array_equal(np.isnan(np.asarray(back).view(name).astype(np.float32)), np.isnan(values))


def test_fp8_codes_name_their_own_format():
    codes = np.array([[0x3C], [0x7E]], np.uint8)
    np.testing.assert_array_equal(np.asarray(quant.fp8_decode(codes), np.float32), [[1.5], [448]])
    for values in (codes.view("float8_e5m2"), jnp.asarray(codes.view("float8_e5m2"))):
        np.testing.assert_array_equal(np.asarray(quant.fp8_decode(values), np.float32), [[1], [np.nan]])
    assert quant.fp8_decode(codes, dst_dtype=jnp.float8_e4m3fn).dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(quant.fp8_decode(codes, scale=np.array([2.0]), dst_dtype="float32"), [[3], [896]])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: quant.fp8_decode(np.zeros(3)), r"fp8_decode: codes must be uint8, float8_e4m3fn or .*, got float32"),
        (lambda: quant.fp8_decode(np.zeros(3, np.uint8), jnp.bfloat16), r"fp8_decode: dtype must be float8_e4m3fn or"),
        (lambda: quant.fp8_decode(np.zeros(3, np.uint8), "e4m3"), r"fp8_decode: dtype must be a float dtype, got"),
        (
            lambda: quant.fp8_decode(np.zeros(3, "float8_e5m2"), "float8_e4m3fn"),
            r"fp8_decode: dtype must be that of the codes, float8_e5m2, got 'float8_e4m3fn'",
        ),
        (lambda: quant.fp8_decode(np.zeros(3, np.uint8), scale=-1.0), r"fp8_decode: scale must be positive"),
        (lambda: quant.fp8_decode(np.zeros(3, np.uint8), dst_dtype=int), r"fp8_decode: dst_dtype must be a float dt"),
        (lambda: quant.fp4_encode(np.zeros((2, 1, 24), np.float32)), r"fp4_encode: the last axis of x must be"),
        (lambda: quant.fp4_encode(np.zeros((2, 1, 0), np.float32)), r"a multiple of 16, got shape \(2, 1, 0\)"),
        (lambda: quant.dsa_encode(np.float32(3)), r"dsa_encode: nope must be .* with at least 1 axis"),
        *[
            (call, rf"dsa_{name}: kv_lora_rank must be a positive integer, got {rank!r}$")
            for rank in (512.0, "512", True, -512, 0)
            for name, call in [
                ("encode", lambda r=rank: quant.dsa_encode(np.zeros((2, 576), np.float32), kv_lora_rank=r)),
                ("encode", lambda r=rank: quant.dsa_encode(np.zeros((2, 512)), np.zeros((2, 64)), kv_lora_rank=r)),
                ("decode", lambda r=rank: quant.dsa_decode(np.zeros((2, 656), np.uint8), kv_lora_rank=r)),
            ]
        ],
        (lambda: quant.dsa_decode(np.zeros((2, 656), np.uint8), kv_lora_rank=None), "dsa_decode: kv_lora_rank must be"),
        (lambda: quant.dsa_decode(np.zeros((2, 656), np.uint8), kv_lora_rank=500), "must be a multiple of 128, .* 500"),
        (lambda: quant.fp8_encode(np.zeros(3), scale=1e-38), r"got 1e-38 \(2\*\*-126 is the least\)"),
        (lambda: quant.fp4_encode(np.zeros(16, np.float32)), r"fp4_encode: x must be .* with at least 2 axes"),
        (lambda: quant.fp4_encode(np.zeros((1, 16), np.int32)), r"x must be one of .*, got int32 \(1, 16\)"),
        (lambda: quant.fp4_decode(np.zeros((2, 1, 8), np.int8), np.zeros((2, 1), np.uint8)), r"packed must be uint8"),
        (
            lambda: quant.fp4_decode(np.zeros((2, 1, 8), np.uint8), np.zeros((2, 2), np.uint8)),
            r"fp4_decode: the scales of packed must be uint8 of shape \(2, 1\), got uint8 \(2, 2\)",
        ),
        (
            lambda: quant.fp4_decode(np.zeros((2, 1, 4), np.uint8), np.zeros((2, 1), np.uint8)),
            r"packed must have rows of a multiple of 16 elements, got 8",
        ),
        (
            lambda: quant.fp4_decode(np.zeros((2, 1, 8), np.uint8), np.zeros((2, 1), np.uint8), jnp.int8),
            "fp4_decode: dtype must be a float dtype",
        ),
        (lambda: quant.dsa_encode(np.zeros((2, 500), np.float32)), r"kv_lora_rank must be a multiple of 128"),
        (lambda: quant.dsa_encode(np.zeros((2, 128)), np.zeros((3, 4))), r"nope and rope must be alike"),
        (
            lambda: quant.dsa_encode(np.zeros((2, 128)), np.zeros((2, 4)), kv_lora_rank=256),
            r"must be \[..., 256\] and \[..., p\], got \(2, 128\) and \(2, 4\)",
        ),
        (lambda: quant.dsa_encode(np.zeros((2, 130), np.int8), kv_lora_rank=128), r"dsa_encode: nope must be one of"),
        (lambda: quant.dsa_decode(np.zeros((2, 656), np.int8)), r"dsa_decode: rows must be uint8"),
        (lambda: quant.dsa_decode(np.zeros((2, 529), np.uint8)), r"got 512 in rows of 529 bytes"),
        (lambda: quant.fp8_encode(np.zeros(3), jnp.bfloat16), r"fp8_encode: dtype must be float8_e4m3fn or"),
        (lambda: quant.fp8_encode(np.zeros(3), scale=0.0), r"fp8_encode: scale must be positive"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_no_rows_have_no_bytes():
    packed, scales = quant.fp4_encode(np.zeros((0, 2, 32), np.float32))
    assert (packed.shape, scales.shape) == ((0, 2, 16), (0, 4))
    assert quant.fp4_decode(packed, scales).shape == (0, 2, 32)
    assert (
        quant.dsa_decode(quant.dsa_encode(np.zeros((0, 130), np.float32), kv_lora_rank=128), kv_lora_rank=128).size == 0
    )
