"""The pool of multi-head latent attention (MLA, DeepSeek-V2): one latent and one rotary part a token."""

from typing import Any, ClassVar, Self, Unpack

import jax
from jax.typing import ArrayLike

from jkv.layout import Buffer, Layout
from jkv.pools import programs
from jkv.pools.base import Pool, PoolOptions, Scale, register
from jkv.pools.dtypes import float_dtype
from jkv.slots import LayerId, SlotIds, positive_int
from pallas_kernels import codecs, scatter_mla


@register
class MLATokenToKVPool(Pool):
    """Rows `[dcp_size * rows, 1, kv_lora_rank + qk_rope_head_dim]` of every layer: nope, then rope."""

    kv_buffer: tuple[jax.Array, ...] | jax.Array
    layout: Layout
    label: ClassVar[str] = "MLA"

    @classmethod
    def create(
        cls,
        *,
        size: int,
        page_size: int,
        dtype: Any,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        **options: Unpack[PoolOptions],
    ) -> Self:
        """An empty (zero) pool.

        Args:
          size: tokens that one DCP rank holds, a multiple of `page_size` (tokens of a page on one rank).
          dtype: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.
          kv_lora_rank: elements of the latent part (nope). qk_rope_head_dim: elements of the rotary part (rope).
          layer_num: layers of this pool.
          **options: see `PoolOptions`; over `tp_axis` the rows are replicated.

        Raises:
          ValueError: sizes that are not positive or do not divide, an unknown dtype or mesh axis.
        """
        dtype = float_dtype(dtype, cls.__name__)
        parts = (
            positive_int(kv_lora_rank, cls.__name__, "kv_lora_rank"),
            positive_int(qk_rope_head_dim, cls.__name__, "qk_rope_head_dim"),
        )
        buffers = [Buffer("kv_buffer", 1, parts, codecs.word_dtype(dtype))]
        return cls._create(buffers, size=size, page_size=page_size, dtype=dtype, layer_num=layer_num, **options)

    @property
    def kv_lora_rank(self) -> int:
        """Elements of the latent part of a row."""
        return self.layout.buffers[0].parts[0]

    @property
    def qk_rope_head_dim(self) -> int:
        """Elements of the rotary part of a row."""
        return self.layout.buffers[0].parts[1]

    def set_kv_buffer(self, layer_id: LayerId, loc: SlotIds, cache_k: ArrayLike, k_scale: Scale = None) -> Self:
        """Writes whole rows of N tokens to their slots; padding and ids out of range are dropped.

        Args:
          layer_id: the model's layer number; may be traced when the pool is stacked.
          loc: `[N]` signed integers, distinct apart from padding.
          cache_k: `[N, 1, kv_lora_rank + qk_rope_head_dim]` floats (the 1 may be absent), cast to the pool's dtype.
          k_scale: pools of an FP8 dtype only (FP4 and DSA pools take none): divide the row by it in float32 first; a
            number, or an array of shape () or (1,).

        Returns:
          The new pool; in place when this one is donated to the jitted caller.

        Raises:
          IndexError: the layer. TypeError: `loc` is not of signed integers. ValueError: shapes, dtypes, the scale.
          KVIndexError: with checks on, ids out of range or repeated, NaN in a row.
        """
        rows = {"cache_k": (cache_k, self.kv_lora_rank + self.qk_rope_head_dim)}
        return self._store(f"set_kv_buffer ({self.label})", layer_id, loc, rows, {"k_scale": k_scale})

    def set_mla_kv_buffer(
        self,
        layer_id: LayerId,
        loc: SlotIds,
        cache_k_nope: ArrayLike,
        cache_k_rope: ArrayLike,
        k_scale: Scale = None,
    ) -> Self:
        """As `set_kv_buffer`, the row in its two parts: `[N, 1, kv_lora_rank]` and `[N, 1, qk_rope_head_dim]`."""
        rows = {
            "cache_k_nope": (cache_k_nope, self.kv_lora_rank),
            "cache_k_rope": (cache_k_rope, self.qk_rope_head_dim),
        }
        return self._store(f"set_mla_kv_buffer ({self.label})", layer_id, loc, rows, {"k_scale": k_scale})

    def get_kv(
        self, layer_id: LayerId, loc: SlotIds, k_scale: Scale = None, dst_dtype: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Rows of N slots, any rank's, and their first `kv_lora_rank` columns (the value); zeros for ids out of range.

        Args:
          layer_id, loc: as in `set_kv_buffer`; ids may repeat.
          k_scale: pools of an FP8 dtype only (FP4 and DSA pools take none): multiply by it in float32.
          dst_dtype: dtype of the result; the pool's (of DSA bfloat16), or bfloat16 with a scale, when None.

        Returns:
          `[N, 1, kv_lora_rank + qk_rope_head_dim]`, `[N, 1, kv_lora_rank]`.

        Raises:
          As `set_kv_buffer`.
        """
        return self._fetch(f"get_kv ({self.label})", layer_id, loc, {"k_scale": k_scale}, dst_dtype)

    def get_mla_kv_buffer(
        self, layer_id: LayerId, loc: SlotIds, dst_dtype: Any = None, k_scale: Scale = None
    ) -> tuple[jax.Array, jax.Array]:
        """As `get_kv`, the row in its two parts: `[N, 1, kv_lora_rank]` and `[N, 1, qk_rope_head_dim]`."""
        door = f"get_mla_kv_buffer ({self.label})"
        return self._fetch(door, layer_id, loc, {"k_scale": k_scale}, dst_dtype, split=True)

    @staticmethod
    def _write(layout, buffers, loc, rows, scales, **options):
        options |= {"dtype": layout.dtype, "scale": scales[0]}
        return (scatter_mla(buffers[0], loc, *rows, **options),)

    @staticmethod
    def _read(layout, buffers, loc, scales, *, split, dst_dtype, **options):
        nope = layout.buffers[0].parts[0]
        (words,) = programs.gather_words(layout, buffers, loc, split=nope if split else None, **options)
        if split:
            return tuple(codecs.from_words(w, layout.dtype, scales[0], dst_dtype) for w in words)
        row = codecs.from_words(words, layout.dtype, scales[0], dst_dtype)
        return row, row[..., :nope]

    @staticmethod
    def _decode(layout, buffers):
        row = codecs.from_words(buffers[0], layout.dtype)
        return row, row[..., : layout.buffers[0].parts[0]]
