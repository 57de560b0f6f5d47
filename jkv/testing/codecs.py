"""How rows become stored words, in plain NumPy: the formats of all pools, from their formulas.

A codec names the parts that a tensor of the pool is stored as: the ends of their buffers' names.
"""

from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

Parts = dict[str, np.ndarray]
WORDS: dict[int, np.dtype] = {4: np.dtype(np.uint32), 2: np.dtype(np.uint16), 1: np.dtype(np.uint8)}
E4M3 = np.dtype(jnp.float8_e4m3fn)
BFLOAT16 = np.dtype(jnp.bfloat16)


class Codec(Protocol):
    """What a model asks of a format.

    Attributes:
      dtype: that rows read as by default.
    """

    dtype: np.dtype

    def parts(self, row_shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and word type of each part of a row of `row_shape` values."""

    def encode(self, row: np.ndarray, scale: float | None = None) -> Parts:
        """Words of one row, or of an array of rows, of values."""

    def decode(self, parts: Parts) -> np.ndarray:
        """Values of stored words, in a dtype that holds them exactly."""


class PlainCodec:
    """Rows cast to `dtype`: the bits as unsigned words of the same width."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.is_fp8 = self.dtype.itemsize == 1

    def parts(self, row_shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """One part, as wide as the row."""
        return {"buffer": (row_shape, WORDS[self.dtype.itemsize])}

    def encode(self, row: np.ndarray, scale: float | None = None) -> Parts:
        """FP8: divided by `scale` in float32, clamped to the finite range, cast once."""
        if self.is_fp8:
            largest = np.float32(jnp.finfo(self.dtype).max)
            row = row.astype(np.float32)  # exact from every float type of at most 32 bits
            if scale is not None:
                row = row / np.float32(scale)
            row = np.where(np.isnan(row), row, np.clip(row, -largest, largest))
        with np.errstate(over="ignore"):
            return {"buffer": np.ascontiguousarray(row.astype(self.dtype)).view(WORDS[self.dtype.itemsize])}

    def decode(self, parts: Parts) -> np.ndarray:
        """The bits as `dtype`."""
        return parts["buffer"].view(self.dtype)


class FP4Codec:
    """e2m1 codes in blocks of 16 that share a power of two: two codes in a byte, and a scale byte a block."""

    dtype = BFLOAT16
    block = 16
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    thresholds = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    nan_scale = 255

    def parts(self, row_shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Codes by head, and scales of all heads in a row."""
        *lead, heads, dim = row_shape
        codes, scales = (*lead, heads, dim // 2), (*lead, heads * dim // self.block)
        return {"buffer": (codes, WORDS[1]), "scale_buffer": (scales, WORDS[1])}

    def encode(self, row: np.ndarray, scale: float | None = None) -> Parts:
        """By the formula, in float64; an infinity counts as 2**128, and a NaN makes its block NaN."""
        del scale
        blocks = row.astype(np.float64).reshape(-1, self.block)
        blocks = np.where(np.isinf(blocks), np.copysign(2.0**128, blocks), blocks)
        amax = np.abs(blocks).max(axis=-1, initial=0)
        mantissa, exponent = np.frexp(np.maximum(amax / 6, 1e-10))
        exponent = exponent - (mantissa == 0.5)  # of a power of two: no rounding up
        exponent = np.where(np.isnan(amax), self.nan_scale - 127, exponent).astype(np.int64)
        scaled = np.ldexp(blocks, -exponent[:, None])
        code = sum((np.abs(scaled) >= t).astype(np.uint8) for t in self.thresholds) + 8 * (scaled < 0).astype(np.uint8)
        shapes = self.parts(row.shape)
        packed = code[:, 0::2] | (code[:, 1::2] << 4)
        return {
            "buffer": packed.reshape(shapes["buffer"][0]),
            "scale_buffer": (exponent + 127).astype(np.uint8).reshape(shapes["scale_buffer"][0]),
        }

    def decode(self, parts: Parts) -> np.ndarray:
        """float32, which holds all but what passes 2**128."""
        packed, scales = parts["buffer"], parts["scale_buffer"]
        code = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, self.block)
        scale = scales.reshape(-1, 1).astype(np.int64)
        value = np.ldexp(self.magnitudes[code & 7], np.clip(scale, 1, 254) - 127)
        value = np.where(scale == self.nan_scale, np.nan, np.where(code > 7, -value, value))
        with np.errstate(over="ignore"):
            return value.astype(np.float32).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


class DSACodec:
    """Packed rows of sparse MLA: `rank` e4m3 codes, a float32 scale for each 128 of them, bfloat16 rope, as bytes."""

    dtype = BFLOAT16
    tile = 128

    def __init__(self, rank: int) -> None:
        self.rank, self.split = rank, rank + rank // self.tile * 4

    def parts(self, row_shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """One part, of bytes."""
        return {"buffer": ((*row_shape[:-1], self.split + 2 * (row_shape[-1] - self.rank)), WORDS[1])}

    def encode(self, row: np.ndarray, scale: float | None = None) -> Parts:
        """Scale `amax / 448` in float32, without NaN and at most of the largest float32; zeros where below 2**-126."""
        del scale
        tiles = row[..., : self.rank].astype(np.float32).reshape(-1, self.tile)
        limits = np.finfo(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            amax = np.minimum(np.where(np.isnan(tiles), 0, np.abs(tiles)).max(axis=-1, initial=0), limits.max)
            scales = amax[:, None] / np.float32(448)
            scales = np.where(scales < limits.tiny, 0, scales).astype("<f4")
            quotient = np.where(scales > 0, tiles / np.where(scales > 0, scales, np.float32(1)), tiles * 0)
            codes = np.where(np.isnan(quotient), quotient, np.clip(quotient, -448, 448)).astype(E4M3).view(np.uint8)
            rope = np.ascontiguousarray(row[..., self.rank :].astype(BFLOAT16))
        codes = np.where((scales > 0) | np.isnan(tiles), codes, 0).astype(np.uint8)
        lead = row.shape[:-1]
        scale_bytes = scales.view(np.uint8).reshape(*lead, self.split - self.rank)
        parts = [codes.reshape(*lead, self.rank), scale_bytes, rope.view(np.uint8)]
        return {"buffer": np.concatenate(parts, axis=-1)}

    def decode(self, parts: Parts) -> np.ndarray:
        """float32: code times scale, rounded once, and rope."""
        rows = np.ascontiguousarray(parts["buffer"])
        lead = rows.shape[:-1]
        scales = np.ascontiguousarray(rows[..., self.rank : self.split]).view("<f4").reshape(-1, 1)
        codes = np.ascontiguousarray(rows[..., : self.rank]).view(E4M3).astype(np.float32).reshape(-1, self.tile)
        with np.errstate(invalid="ignore", over="ignore"):
            nope = (codes * scales).reshape(*lead, self.rank)
        rope = np.ascontiguousarray(rows[..., self.split :]).view(BFLOAT16).astype(np.float32)
        return np.concatenate([nope, rope], axis=-1)
