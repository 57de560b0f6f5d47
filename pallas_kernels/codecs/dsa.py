"""Packed rows of sparse MLA (DeepSeek Sparse Attention): FP8 latents with float32 scales, and the rotary part as is.

A row is bytes: r codes in e4m3 for the latent part (nope), one little-endian float32 scale for each tile of 128 of
them, and the p rotary elements (rope) in bfloat16; r = 512 and p = 64 give 656 bytes (the layout of FlashMLA's sparse
decoding, which SGLang's pools keep). A tile's scale is `amax / 448` in IEEE float32, and a code that of `x / scale`.

What is not finite: a NaN becomes the NaN of e4m3, itself only. An infinity counts as the largest float32. A tile whose
scale would be less than 2**-126, zeros among them, is stored as zeros, and so may be elements below 2**-126 in others
(they are on backends that flush subnormals).
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.codecs import fp8

TILE = 128
_LARGEST, _INFINITY = 0x7F7FFFFF, 0x7F800000
_LEAST = int(np.float32(448 * 2.0**-126).view(np.int32))


def row_bytes(kv_lora_rank: int, rope_dim: int) -> int:
    """Bytes of a packed row."""
    return kv_lora_rank + kv_lora_rank // TILE * 4 + 2 * rope_dim


def rope_dim(width: int, kv_lora_rank: int, where: str) -> int:
    """The p of packed rows of `width` bytes. ValueError where there is none."""
    rope = width - row_bytes(kv_lora_rank, 0) if isinstance(kv_lora_rank, int | np.integer) else 0
    if rope < 2 or rope % 2 or kv_lora_rank < TILE or kv_lora_rank % TILE:
        wanted = f"kv_lora_rank must be a multiple of {TILE}, and a row of it, its scales and a bfloat16 rope"
        raise ValueError(f"{where}: {wanted}; got {kv_lora_rank} in rows of {width} bytes")
    return rope // 2


def magnitudes(x):
    """int32 bits of `|x|` for the largest of a tile: zero for NaN, at most the largest finite float32."""
    magnitude = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    return jnp.where(magnitude > _INFINITY, 0, jnp.minimum(magnitude, _LARGEST))


def largest(magnitude):
    """The largest along the last axis, a power of two; by halves, as XLA on CPU reduces a long axis one by one."""
    while magnitude.shape[-1] > 8:
        half = magnitude.shape[-1] // 2
        magnitude = jnp.maximum(magnitude[..., :half], magnitude[..., half:])
    return magnitude.max(axis=-1)


def scales(amax):
    """float32 scales `amax / 448`, correctly rounded, from the largest `magnitudes` of tiles; zero where too small.

    Long division in integers: backends differ in what they make of a division by a constant.
    """
    mantissa = (amax & 0x7FFFFF) | 0x800000
    numerator = mantissa << 6
    quotient = numerator // 7
    # 27 or 28 bits, of which the last is made odd where a remainder is left; then rounded to 24, ties to even.
    quotient |= (numerator - quotient * 7 != 0).astype(jnp.int32)
    drop = 3 + (quotient >> 27)
    kept = quotient >> drop
    rest = quotient - (kept << drop)
    half = 1 << (drop - 1)
    kept += ((rest > half) | ((rest == half) & (kept & 1 == 1))).astype(jnp.int32)
    # amax / 448 = quotient * 2**(exponent - 150 - 6 - 6); the carry of the rounding moves on into the exponent.
    exponent = (amax >> 23) - 12 + drop
    bits = jnp.where(amax >= _LEAST, ((exponent - 1) << 23) + kept, 0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def codes(x, scale, divide, encode=fp8.encode):
    """uint8 e4m3 codes of `x / scale`, zero where the scale is; `divide(x, scale)` divides arrays of one shape.

    `encode` is for kernels, whose chip has an instruction for what `fp8.encode` does.
    """
    scale = jnp.broadcast_to(scale, x.shape)
    code = encode(divide(x, jnp.where(scale > 0, scale, np.float32(1))), jnp.float8_e4m3fn).astype(jnp.int32)
    return jnp.where((scale > 0) | (code & 0x7F == 0x7F), code, 0).astype(jnp.uint8)


def values(code, scale):
    """float32 values of int32 codes 0 to 255 by their tiles' scales; for kernels, where some chips convert no FP8."""
    magnitude = code & 0x7F
    # As float32 with another bias. A subnormal gets the leading one that it lacks, which is then taken off again.
    small = magnitude < 8
    bits = (magnitude << 20) + jnp.where(small, 121 << 23, 120 << 23)
    value = lax.bitcast_convert_type(bits, jnp.float32) - jnp.where(small, np.float32(2.0**-6), np.float32(0))
    value = jnp.where(magnitude == 0x7F, np.float32(np.nan), value)
    signed = lax.bitcast_convert_type(value, jnp.int32) | ((code & 0x80) << 24)
    return lax.bitcast_convert_type(signed, jnp.float32) * scale


def encode(nope, rope, divide):
    """The parts of packed rows, in order: codes, scales and rope.

    Args:
      nope: `[..., r]` floats of up to 32 bits, r a multiple of 128. rope: `[..., p]` floats, cast to bfloat16.
      divide: `divide(x, scale)`, IEEE float32 as far as e4m3 can tell.

    Returns:
      uint8 `[..., r]`, `[..., r / 32]` and `[..., 2 * p]`.
    """
    lead = nope.shape[:-1]
    tiles = nope.reshape(*lead, nope.shape[-1] // TILE, TILE)
    scale = scales(largest(magnitudes(tiles)))
    code = codes(tiles, scale[..., None], divide).reshape(nope.shape)
    return code, _bytes(scale, lead), _bytes(rope.astype(jnp.bfloat16), lead)


def _bytes(x, lead):
    words = lax.bitcast_convert_type(x, jnp.uint8)
    return words.reshape(*lead, x.shape[-1] * words.shape[-1])


def decode(rows, kv_lora_rank: int, dtype=jnp.bfloat16):
    """nope `[..., r]` and rope `[..., p]` as `dtype` from packed rows: code times scale in float32, then the cast."""
    r, lead = kv_lora_rank, rows.shape[:-1]
    split = r + r // TILE * 4
    code = lax.bitcast_convert_type(rows[..., :r], jnp.float8_e4m3fn).reshape(*lead, r // TILE, TILE)
    scale = lax.bitcast_convert_type(rows[..., r:split].reshape(*lead, r // TILE, 4), jnp.float32)
    nope = fp8.cast(code.astype(jnp.float32) * scale[..., None], dtype)
    rope = lax.bitcast_convert_type(rows[..., split:].reshape(*lead, (rows.shape[-1] - split) // 2, 2), jnp.bfloat16)
    return nope.reshape(*lead, r), fp8.cast(rope, dtype)
