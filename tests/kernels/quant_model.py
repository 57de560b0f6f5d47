"""FP4 blocks and packed FP8 rows by their formulas, in NumPy; what they must be is said in `pallas_kernels.codecs`."""

import jax.numpy as jnp
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)
BLOCK, NAN_SCALE, TILE = 16, 255, 128
E4M3 = jnp.float8_e4m3fn


def fp4_encode(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes `[..., D / 2]` and scale bytes `[..., D / 16]` of floats `[..., D]`."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    blocks = np.where(np.isinf(blocks), np.copysign(2.0**128, blocks), blocks)
    amax = np.abs(blocks).max(axis=-1)
    bad = np.isnan(amax)
    mantissa, exponent = np.frexp(np.maximum(np.where(bad, 0, amax) / 6, 1e-10))
    exponent = exponent - (mantissa == 0.5)  # of a power of two: no rounding up
    scaled = np.ldexp(blocks, -exponent[..., None])
    code = sum((np.abs(scaled) >= t).astype(np.uint8) for t in THRESHOLDS) + 8 * (scaled < 0).astype(np.uint8)
    code = code.reshape(x.shape)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, np.where(bad, NAN_SCALE, exponent + 127).astype(np.uint8)


def fp4_decode(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 `[..., D]` of what `fp4_encode` returned, the scales flat or not."""
    code = np.stack([packed & 15, packed >> 4], axis=-1)
    code = code.reshape(*packed.shape[:-1], packed.shape[-1] // (BLOCK // 2), BLOCK)
    scales = scales.reshape(code.shape[:-1])[..., None].astype(np.int32)
    value = np.where(code > 7, -1.0, 1.0) * np.ldexp(E2M1[code & 7], np.where(scales == 0, 0, scales - 127))
    with np.errstate(over="ignore"):
        return (
            np.where(scales == NAN_SCALE, np.nan, value)
            .astype(np.float32)
            .reshape(*packed.shape[:-1], 2 * packed.shape[-1])
        )


def fp4_open(scales: np.ndarray) -> np.ndarray:
    """Which bytes of codes `[..., D / 2]` may be anything, those of blocks of NaNs, by flat scales `[..., D / 16]`."""
    return np.repeat(scales == NAN_SCALE, BLOCK // 2, axis=-1)


def dsa_encode(nope: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """Rows of bytes `[..., r + r / 32 + 2 * p]`."""
    with np.errstate(all="ignore"):
        x = nope.astype(np.float32).reshape(*nope.shape[:-1], nope.shape[-1] // TILE, TILE)
        amax = np.minimum(np.where(np.isnan(x), 0, np.abs(x)).max(axis=-1), np.finfo(np.float32).max)
        scale = amax.astype(np.float32) / np.float32(448)
        scale = np.where(scale < np.finfo(np.float32).tiny, 0, scale).astype("<f4")[..., None]
        quotient = np.where(scale > 0, x / np.where(scale > 0, scale, np.float32(1)), x * 0)
        code = np.clip(quotient, -448, 448).astype(E4M3).view(np.uint8)
        code = np.where((scale > 0) | (code & 0x7F == 0x7F), code, 0).astype(np.uint8)
        tail = rope.astype(jnp.bfloat16)
    parts = [code.reshape(nope.shape), scale[..., 0].view(np.uint8), np.ascontiguousarray(tail).view(np.uint8)]
    return np.concatenate(parts, axis=-1)


def dsa_decode(rows: np.ndarray, r: int) -> np.ndarray:
    """float32 `[..., r + p]`."""
    lead, split = rows.shape[:-1], r + r // TILE * 4
    code = np.ascontiguousarray(rows[..., :r]).view(E4M3).astype(np.float32).reshape(*lead, r // TILE, TILE)
    scale = np.ascontiguousarray(rows[..., r:split]).view("<f4")[..., None]
    rope = np.ascontiguousarray(rows[..., split:]).view(jnp.bfloat16).astype(np.float32)
    return np.concatenate([(code * scale).reshape(*lead, r), rope], axis=-1)


def dsa_open(rows: np.ndarray, r: int) -> np.ndarray:
    """Which bytes belong to a NaN, of which another one would do: its code, or both bytes of the rope."""
    split = r + r // TILE * 4
    rope = np.isnan(np.ascontiguousarray(rows[..., split:]).view(jnp.bfloat16).astype(np.float32))
    scales = np.zeros((*rows.shape[:-1], split - r), bool)
    return np.concatenate([rows[..., :r] & 0x7F == 0x7F, scales, np.repeat(rope, 2, axis=-1)], axis=-1)
