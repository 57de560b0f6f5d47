"""The pool of multi-head (and grouped-query) attention: K and V rows by head."""

from typing import Any, ClassVar, Self, Unpack

import jax
from jax.typing import ArrayLike

from jkv.layout import Buffer, Layout
from jkv.pools import programs
from jkv.pools.base import Pool, PoolOptions, Scale, register
from jkv.pools.dtypes import float_dtype
from jkv.slots import LayerId, SlotIds, positive_int
from pallas_kernels import codecs, scatter_kv


@register
class MHATokenToKVPool(Pool):
    """K `[dcp_size * rows, head_num, head_dim]` and V (`v_head_dim`) of every layer, as unsigned words of `dtype`."""

    k_buffer: tuple[jax.Array, ...] | jax.Array
    v_buffer: tuple[jax.Array, ...] | jax.Array
    layout: Layout
    label: ClassVar[str] = "MHA"

    @classmethod
    def create(
        cls,
        *,
        size: int,
        page_size: int,
        dtype: Any,
        head_num: int,
        head_dim: int,
        layer_num: int,
        v_head_dim: int | None = None,
        **options: Unpack[PoolOptions],
    ) -> Self:
        """An empty (zero) pool.

        Args:
          size: tokens that one DCP rank holds, a multiple of `page_size` (tokens of a page on one rank).
          dtype: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.
          head_num: KV heads of the model, divisible by the size of `tp_axis`.
          head_dim, v_head_dim: elements of a K and of a V head; V as K when None.
          layer_num: layers of this pool.
          **options: see `PoolOptions`.

        Raises:
          ValueError: sizes that are not positive or do not divide, an unknown dtype or mesh axis.
        """
        dtype = float_dtype(dtype, cls.__name__)
        head_num = positive_int(head_num, cls.__name__, "head_num")
        widths = [head_dim, head_dim if v_head_dim is None else v_head_dim]
        buffers = [
            Buffer(f"{x}_buffer", head_num, (positive_int(width, cls.__name__, name),), codecs.word_dtype(dtype), True)
            for x, name, width in zip("kv", ("head_dim", "v_head_dim"), widths, strict=True)
        ]
        return cls._create(buffers, size=size, page_size=page_size, dtype=dtype, layer_num=layer_num, **options)

    @property
    def head_num(self) -> int:
        """KV heads over all TP ranks."""
        return self.layout.buffers[0].heads

    @property
    def head_dim(self) -> int:
        """Elements of a K head."""
        return self.layout.buffers[0].width

    @property
    def v_head_dim(self) -> int:
        """Elements of a V head."""
        return self.layout.buffers[1].width

    def set_kv_buffer(
        self,
        layer_id: LayerId,
        loc: SlotIds,
        cache_k: ArrayLike,
        cache_v: ArrayLike,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> Self:
        """Writes K and V of N tokens to their slots; padding and ids out of range are dropped.

        Args:
          layer_id: the model's layer number; may be traced when the pool is stacked.
          loc: `[N]` signed integers, distinct apart from padding.
          cache_k, cache_v: `[N, head_num, head_dim]` and `[N, head_num, v_head_dim]` floats, cast to the pool's dtype.
          k_scale, v_scale: pools of an FP8 dtype only (FP4 pools take none): divide by it in float32 first; a number,
            or an array of shape () or (1,).

        Returns:
          The new pool; in place when this one is donated to the jitted caller.

        Raises:
          IndexError: the layer. TypeError: `loc` is not of signed integers. ValueError: shapes, dtypes, scales.
          KVIndexError: with checks on, ids out of range or repeated, NaN in a row.
        """
        rows = {"cache_k": (cache_k, self.head_dim), "cache_v": (cache_v, self.v_head_dim)}
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return self._store(f"set_kv_buffer ({self.label})", layer_id, loc, rows, scales)

    def get_kv(
        self,
        layer_id: LayerId,
        loc: SlotIds,
        k_scale: Scale = None,
        v_scale: Scale = None,
        dst_dtype: Any = None,
    ) -> tuple[jax.Array, jax.Array]:
        """K and V of N slots, any rank's; zeros for ids out of range.

        Args:
          layer_id, loc: as in `set_kv_buffer`; ids may repeat.
          k_scale, v_scale: pools of an FP8 dtype only (FP4 pools take none): multiply by it in float32.
          dst_dtype: dtype of the result; the pool's, or bfloat16 with a scale, when None.

        Returns:
          `[N, head_num, head_dim]`, `[N, head_num, v_head_dim]`.

        Raises:
          As `set_kv_buffer`.
        """
        return self._fetch(f"get_kv ({self.label})", layer_id, loc, {"k_scale": k_scale, "v_scale": v_scale}, dst_dtype)

    @staticmethod
    def _write(layout, buffers, loc, rows, scales, **options):
        options |= {"dtype": layout.dtype, "k_scale": scales[0], "v_scale": scales[1]}
        return scatter_kv(buffers[0], buffers[1], loc, rows[0], rows[1], **options)

    @staticmethod
    def _read(layout, buffers, loc, scales, *, split, dst_dtype, **options):
        words = programs.gather_words(layout, buffers, loc, **options)
        return tuple(
            codecs.from_words(w, layout.dtype, scale, dst_dtype) for w, scale in zip(words, scales, strict=True)
        )

    @staticmethod
    def _decode(layout, buffers):
        return tuple(codecs.from_words(words, layout.dtype) for words in buffers)
