"""Calls of the ops with the rows of real models: for the numeric suite, the compiled proofs and the benchmarks."""

import dataclasses
from typing import Any

import jax.numpy as jnp

BF16, F16, F32, E4M3, E5M2 = "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a model's cache: K and V by head, or MLA's nope and rope.

    Attributes:
      name: the model.
      parts: `(heads, width)` of K and V, or `(1, width)` of nope and rope.
      stored: format in the buffer. source: dtype of the rows that are written. scaled: whether a scale divides them.
    """

    name: str
    parts: tuple[tuple[int, int], ...]
    stored: str = BF16
    source: str = BF16
    scaled: bool = False

    @property
    def word(self) -> Any:
        """The unsigned word of the buffer."""
        return jnp.dtype(f"uint{8 * jnp.dtype(self.stored).itemsize}")


def _kv(name: str, heads: int, k: int, v: int | None = None, **options: Any) -> Rows:
    return Rows(name, ((heads, k), (heads, k if v is None else v)), **options)


def _mla(name: str, nope: int = 512, rope: int = 64, **options: Any) -> Rows:
    return Rows(name, ((1, nope), (1, rope)) if rope else ((1, nope),), **options)


KV = (
    _kv("llama-3-8b", 8, 128),
    _kv("llama-3-70b-tp8", 1, 128),
    _kv("llama-3-8b-fp8", 8, 128, stored=E4M3, scaled=True),
    _kv("qwen3-30b-a3b", 4, 128, source=F32),
    _kv("qwen3-8b-tp4-fp8", 2, 128, stored=E4M3),
    _kv("qwen3-fp8-rows", 4, 128, stored=E4M3, source=E4M3),
    _kv("smollm2-135m", 3, 64),
    _kv("smollm2-135m-f32", 3, 64, stored=F32),
    _kv("phi-2-f16", 4, 80, stored=F16, source=F16),
    _kv("phi-2-fp8", 4, 80, stored=E5M2, source=F16, scaled=True),
    _kv("phi-3-mini", 4, 96),
    _kv("gemma-2-tp4", 1, 256, source=F32, stored=E4M3),
    _kv("deepseek-v3-unabsorbed", 2, 192, 128),
    _kv("odd-head", 1, 5, 3),
    _kv("odd-head-fp8", 1, 5, 3, stored=E4M3, scaled=True),
)
MLA = (
    _mla("deepseek-v3"),
    _mla("deepseek-v3-fp8", stored=E4M3, scaled=True),
    _mla("kimi-linear", source=F32),
    _mla("kimi-linear-nope", rope=0),
    _mla("kimi-linear-fp8-rows", stored=E4M3, source=E4M3),
    _mla("tiny-mla-f32", 24, 8, stored=F32, source=BF16),
)
