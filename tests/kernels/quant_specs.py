"""Rows of models as FP4 and packed FP8 buffers hold them: for the numeric suite, the compiled proofs and figures."""

import dataclasses

from specs import BF16, F16, F32


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows that are quantised in blocks.

    Attributes:
      name: the model.
      kind: "kv" (FP4, K and V by head), "mla" (FP4, one row) or "dsa" (an FP8 latent with its scales, and a rope).
      parts: `(heads, width)` of K and V, or `(1, width)` of nope and rope.
      source: dtype of the rows that are written.
      whole: whether nope and rope are written as one array.
    """

    name: str
    kind: str
    parts: tuple[tuple[int, int], ...]
    source: str = BF16
    whole: bool = False

    @property
    def width(self) -> int:
        """Elements of a row of all parts."""
        return sum(heads * width for heads, width in self.parts)

    @property
    def values(self) -> tuple[tuple[int, int], ...]:
        """`(heads, width)` of the arrays that are written."""
        return ((1, self.width),) if self.whole else self.parts

    @property
    def buffers(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a row in the uint8 buffers, in the order of the ops' arguments: codes, then scales."""
        if self.kind == "dsa":
            (_, r), (_, p) = self.parts
            return ((1, r + r // 128 * 4 + 2 * p),)
        rows = self.parts if self.kind == "kv" else ((1, self.width),)
        return tuple((h, w // 2) for h, w in rows) + tuple((h * w // 16,) for h, w in rows)

    @property
    def scatter(self) -> str:
        """The op that writes them."""
        return {"kv": "scatter_kv_fp4", "mla": "scatter_mla_fp4", "dsa": "scatter_dsa"}[self.kind]

    @property
    def gather(self) -> str:
        """The op that reads them."""
        return "gather_dsa" if self.kind == "dsa" else "gather_fp4"


def _kv(name: str, heads: int, k: int, v: int | None = None, source: str = BF16) -> Rows:
    return Rows(name, "kv", ((heads, k), (heads, k if v is None else v)), source)


def _latent(name: str, kind: str, nope: int, rope: int, source: str = BF16, whole: bool = False) -> Rows:
    return Rows(name, kind, ((1, nope), (1, rope)), source, whole)


KV = (
    _kv("llama-3-8b", 8, 128),
    _kv("llama-3-70b-tp8", 1, 128),
    _kv("qwen3-30b-a3b", 4, 128, source=F32),
    _kv("smollm2-135m", 3, 64),
    _kv("phi-2", 4, 80, source=F16),
    _kv("phi-3-mini", 4, 96),
    _kv("gemma-2-tp4", 1, 256, source=F32),
    _kv("deepseek-v3-unabsorbed", 2, 192, 128),
    _kv("one-block", 1, 16, 48),
)
MLA = (
    _latent("deepseek-v3-fp4", "mla", 512, 64),
    _latent("deepseek-v3-fp4-whole", "mla", 512, 64, whole=True),
    _latent("kimi-linear-fp4", "mla", 512, 64, source=F32),
    _latent("tiny-mla-fp4", "mla", 48, 16, source=F16),
)
DSA = (
    _latent("deepseek-v3.2", "dsa", 512, 64),
    _latent("deepseek-v3.2-whole", "dsa", 512, 64, whole=True),
    _latent("deepseek-v3.2-f32", "dsa", 512, 64, source=F32),
    _latent("tiny-dsa", "dsa", 128, 16, source=F16),
    _latent("tiny-dsa-whole", "dsa", 256, 8, source=F32, whole=True),
)
ALL = (*KV, *MLA, *DSA)


def named(name: str) -> Rows:
    """The rows of that name."""
    return next(rows for rows in ALL if rows.name == name)
