"""Rows to the bytes of quantised pools, and back: pure functions, eagerly and under jit alike.

The formats, and what becomes of NaN and infinities in them, are described in `pallas_kernels.codecs`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jkv.slots import positive_int
from pallas_kernels import codecs
from pallas_kernels.codecs import dsa, fp4


def fp4_encode(x: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """FP4 codes of rows, two in a byte, and the scale bytes of their blocks of 16.

    A block's scale is the power of two `2**e`, `e = ceil(log2(max(amax / 6, 1e-10)))`, stored as `e + 127`; an element
    becomes the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 times that, ties away from zero, the even element in the low half
    of its byte (the block-16 format of SGLang's FP4 pools). Any NaN makes its block NaN (scale byte 255); an infinity
    stays one and leaves little but zeros of the rest of its block.

    Args:
      x: `[..., heads, dim]` floats of up to 32 bits, dim a multiple of 16.

    Returns:
      uint8 `[..., heads, dim / 2]` and uint8 `[..., heads * dim / 16]`, as the buffers of an FP4 pool hold them.

    Raises:
      ValueError: another shape or dtype.
    """
    x = _floats(x, "fp4_encode", "x", least=2)
    if not x.shape[-1] or x.shape[-1] % fp4.BLOCK:
        raise ValueError(f"fp4_encode: the last axis of x must be a multiple of {fp4.BLOCK}, got shape {x.shape}")
    packed, scales = _fp4_encode(x)
    return packed, fp4.flat(scales)


def fp4_decode(packed: ArrayLike, scales: ArrayLike, dtype: Any = jnp.bfloat16) -> jax.Array:
    """The rows that `fp4_encode` stored.

    Args:
      packed: uint8 `[..., heads, dim / 2]`. scales: uint8 `[..., heads * dim / 16]`.
      dtype: float dtype of the result. bfloat16 holds every value exactly, but that 2**128 and more are infinite.

    Returns:
      `[..., heads, dim]`.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    packed, scales = jnp.asarray(packed), jnp.asarray(scales)
    if packed.dtype != jnp.uint8 or packed.ndim < 2:
        raise ValueError(f"fp4_decode: packed must be uint8 [..., heads, dim / 2], got {packed.dtype} {packed.shape}")
    fp4.check_scales(packed, scales, "fp4_decode", "packed")
    return _fp4_decode(packed, scales, codecs.as_float_dtype(dtype, "fp4_decode", "dtype"))


def dsa_encode(nope: ArrayLike, rope: ArrayLike | None = None, *, kv_lora_rank: int | None = None) -> jax.Array:
    """Rows of a sparse-attention pool: e4m3 codes, one float32 scale `amax / 448` a tile of 128, and rope in bfloat16.

    An all-zero tile stores scale 0 and zeros (as does one whose scale is below 2**-126). A NaN stays NaN by itself; an
    infinity counts as the largest float32. Byte order is little-endian, as FlashMLA's sparse decoding reads it.

    Args:
      nope: `[..., kv_lora_rank]` floats of up to 32 bits; or, without `rope`, whole rows `[..., kv_lora_rank + p]`.
      rope: `[..., p]` floats.
      kv_lora_rank: a multiple of 128; when None the width of `nope` where `rope` is given, otherwise 512.

    Returns:
      uint8 `[..., r + 4 * r / 128 + 2 * p]`.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a `kv_lora_rank` that is no such integer.
    """
    where = "dsa_encode"
    nope = _floats(nope, where, "nope", least=1)
    if kv_lora_rank is not None:
        kv_lora_rank = positive_int(kv_lora_rank, where, "kv_lora_rank")
    if rope is None:
        r = 512 if kv_lora_rank is None else kv_lora_rank
        nope, rope = nope[..., :r], nope[..., r:]
    rope, r = _floats(rope, where, "rope", least=1), nope.shape[-1]
    if nope.shape[:-1] != rope.shape[:-1] or r != (r if kv_lora_rank is None else kv_lora_rank):
        wanted = "alike but in the last axis" if kv_lora_rank is None else f"[..., {kv_lora_rank}] and [..., p]"
        raise ValueError(f"{where}: nope and rope must be {wanted}, got {nope.shape} and {rope.shape}")
    dsa.rope_dim(dsa.row_bytes(r, rope.shape[-1]), r, where)
    return _dsa_encode(nope, rope)


def dsa_decode(rows: ArrayLike, *, kv_lora_rank: int = 512, dtype: Any = jnp.bfloat16) -> jax.Array:
    """The rows that `dsa_encode` packed: code times scale in float32, then cast.

    Args:
      rows: uint8 `[..., r + 4 * r / 128 + 2 * p]`.
      kv_lora_rank: r, a multiple of 128.
      dtype: float dtype of the result.

    Returns:
      `[..., r + p]`.

    Raises:
      ValueError: shapes or dtypes that do not fit, or a `kv_lora_rank` that is no such integer.
    """
    where, rows = "dsa_decode", jnp.asarray(rows)
    if rows.dtype != jnp.uint8 or not rows.ndim:
        raise ValueError(f"{where}: rows must be uint8 [..., bytes], got {rows.dtype} {rows.shape}")
    r = positive_int(kv_lora_rank, where, "kv_lora_rank")
    dsa.rope_dim(rows.shape[-1], r, where)
    return _dsa_decode(rows, r, codecs.as_float_dtype(dtype, where, "dtype"))


def fp8_encode(x: ArrayLike, dtype: Any = jnp.float8_e4m3fn, scale: Any = None) -> jax.Array:
    """Codes of `x`, or of `x / scale`, in an 8-bit float: divided in float32, clamped to the finite range, cast once.

    Args:
      x: floats of up to 32 bits, any shape. dtype: float8_e4m3fn or float8_e5m2.
      scale: None, a positive number, or an array of shape () or (1,).

    Returns:
      uint8, the shape of `x`, for `fp8_decode`. NaN stays NaN.

    Raises:
      ValueError: dtypes or a scale that do not fit.
    """
    x = _floats(x, "fp8_encode", "x")
    parsed = _fp8_dtype(dtype, "fp8_encode")
    return _fp8_encode(x, parsed, codecs.as_scale(scale, parsed, "fp8_encode", "scale"))


def fp8_decode(codes: ArrayLike, dtype: Any = None, scale: Any = None, dst_dtype: Any = jnp.bfloat16) -> jax.Array:
    """The values of `fp8_encode`'s codes, times `scale` in float32 where one is given.

    Args:
      codes: uint8, or values of float8_e4m3fn or float8_e5m2, any shape.
      dtype: the format of the codes; when None float8_e4m3fn, or of float8 values their own.
      scale: None, a positive number, or an array of shape () or (1,).
      dst_dtype: float dtype of the result. bfloat16 holds every unscaled value exactly.

    Returns:
      `dst_dtype`, the shape of `codes`. NaN stays NaN, and so do the infinities that e5m2 has.

    Raises:
      ValueError: dtypes or a scale that do not fit.
    """
    where, codes = "fp8_decode", jnp.asarray(codes)
    own = codes.dtype if codecs.is_fp8(codes.dtype) else None
    if own is None and codes.dtype != jnp.uint8:
        raise ValueError(f"{where}: codes must be uint8, float8_e4m3fn or float8_e5m2, got {codes.dtype}")
    parsed = _fp8_dtype(own or jnp.float8_e4m3fn if dtype is None else dtype, where)
    if own not in (None, parsed):
        raise ValueError(f"{where}: dtype must be that of the codes, {own}, got {dtype!r}")
    scale = codecs.as_scale(scale, parsed, where, "scale")
    words = lax.bitcast_convert_type(codes, jnp.uint8)
    return _fp8_decode(words, parsed, scale, codecs.as_float_dtype(dst_dtype, where, "dst_dtype"))


def _fp8_dtype(dtype: Any, where: str) -> jnp.dtype:
    parsed = codecs.as_float_dtype(dtype, where, "dtype")
    if parsed is None or not codecs.is_fp8(parsed):
        raise ValueError(f"{where}: dtype must be float8_e4m3fn or float8_e5m2, got {dtype!r}")
    return parsed


def _floats(x: ArrayLike, where: str, name: str, least: int = 0) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype.name not in codecs.FLOAT_DTYPES or x.ndim < least:
        axes = f" with at least {least} ax{'i' if least == 1 else 'e'}s" if least else ""
        wanted = f"one of {', '.join(codecs.FLOAT_DTYPES)}{axes}"
        raise ValueError(f"{where}: {name} must be {wanted}, got {x.dtype} {x.shape}")
    return x


_fp4_encode = jax.jit(fp4.encode)
_fp4_decode = jax.jit(fp4.decode, static_argnums=2)
_fp8_encode = jax.jit(codecs.to_words, static_argnums=1)
_fp8_decode = jax.jit(codecs.from_words, static_argnums=(1, 3))


@jax.jit
def _dsa_encode(nope, rope):
    return jnp.concatenate(dsa.encode(nope, rope, codecs.divide_for_fp8), axis=-1)


def _dsa_rows(rows, kv_lora_rank, dtype):
    return jnp.concatenate(dsa.decode(rows, kv_lora_rank, dtype), axis=-1)


_dsa_decode = jax.jit(_dsa_rows, static_argnums=(1, 2))
