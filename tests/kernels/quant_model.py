"""FP4 blocks and packed FP8 rows by their formulas, as arrays of rows, and which of their bytes are open."""

import jax.numpy as jnp
import numpy as np

from jkv.testing import DSACodec, FP4Codec

BLOCK, NAN_SCALE, TILE = 16, 255, 128


def fp4_encode(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes `[..., heads, D / 2]` and flat scale bytes of floats `[..., heads, D]`."""
    parts = FP4Codec().encode(x)
    return parts["buffer"], parts["scale_buffer"]


def fp4_decode(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 `[..., heads, D]` of what `fp4_encode` returned."""
    return FP4Codec().decode({"buffer": packed, "scale_buffer": scales})


def fp4_open(scales: np.ndarray) -> np.ndarray:
    """Which bytes of codes `[..., D / 2]` may be anything, those of blocks of NaNs, by flat scales `[..., D / 16]`."""
    return np.repeat(scales == NAN_SCALE, BLOCK // 2, axis=-1)


def dsa_encode(nope: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """Rows of bytes `[..., r + r / 32 + 2 * p]`."""
    return DSACodec(nope.shape[-1]).encode(np.concatenate([nope, rope], axis=-1))["buffer"]


def dsa_decode(rows: np.ndarray, r: int) -> np.ndarray:
    """float32 `[..., r + p]`."""
    return DSACodec(r).decode({"buffer": rows})


def dsa_open(rows: np.ndarray, r: int) -> np.ndarray:
    """Which bytes belong to a NaN, of which another one would do: its code, or both bytes of the rope."""
    split = r + r // TILE * 4
    rope = np.isnan(np.ascontiguousarray(rows[..., split:]).view(jnp.bfloat16).astype(np.float32))
    scales = np.zeros((*rows.shape[:-1], split - r), bool)
    return np.concatenate([rows[..., :r] & 0x7F == 0x7F, scales, np.repeat(rope, 2, axis=-1)], axis=-1)
