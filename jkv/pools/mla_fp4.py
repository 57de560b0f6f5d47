"""The pool of multi-head latent attention in FP4: rows as 4-bit codes with a scale for every 16 elements."""

from typing import Any, ClassVar, Self, Unpack

import jax
import jax.numpy as jnp

from jkv.layout import Buffer, Layout
from jkv.pools import programs
from jkv.pools.base import PoolOptions, register
from jkv.pools.dtypes import only_dtype
from jkv.pools.mla import MLATokenToKVPool
from jkv.slots import positive_int
from pallas_kernels import gather_fp4, scatter_mla_fp4
from pallas_kernels.codecs import fp4


@register
class MLATokenToKVPoolFP4(MLATokenToKVPool):
    """uint8 codes `[dcp_size * rows, 1, (r + p) / 2]` and scales `[dcp_size * rows, (r + p) / 16]` of every layer.

    The doors are those of `MLATokenToKVPool` and read `dtype`. Rows are quantised as `jkv.quant.fp4_encode` does; they
    take no `k_scale`.
    """

    kv_scale_buffer: tuple[jax.Array, ...] | jax.Array
    layout: Layout
    label: ClassVar[str] = "MLA-FP4"
    takes_scales: ClassVar[bool] = False

    @classmethod
    def create(
        cls,
        *,
        size: int,
        page_size: int,
        dtype: Any = jnp.bfloat16,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        **options: Unpack[PoolOptions],
    ) -> Self:
        """An empty (zero) pool.

        Args:
          size, page_size, layer_num, **options: as in `MLATokenToKVPool.create`.
          dtype: what rows dequantise to, bfloat16.
          kv_lora_rank, qk_rope_head_dim: elements of the latent and of the rotary part, multiples of 16.

        Raises:
          ValueError: sizes that are not positive or do not divide, another dtype, an unknown mesh axis.
        """
        where = cls.__name__
        dtype = only_dtype(dtype, jnp.bfloat16, where)
        r = positive_int(kv_lora_rank, where, "kv_lora_rank", of=fp4.BLOCK)
        p = positive_int(qk_rope_head_dim, where, "qk_rope_head_dim", of=fp4.BLOCK)
        word = jnp.dtype(jnp.uint8)
        buffers = [
            Buffer("kv_buffer", 1, (r // 2, p // 2), word),
            Buffer("kv_scale_buffer", 1, (r // fp4.BLOCK, p // fp4.BLOCK), word, flat=True),
        ]
        return cls._create(buffers, size=size, page_size=page_size, dtype=dtype, layer_num=layer_num, **options)

    @property
    def kv_lora_rank(self) -> int:
        """Elements of the latent part of a row."""
        return 2 * self.layout.buffers[0].parts[0]

    @property
    def qk_rope_head_dim(self) -> int:
        """Elements of the rotary part of a row."""
        return 2 * self.layout.buffers[0].parts[1]

    @staticmethod
    def _write(layout, buffers, loc, rows, scales, **options):
        return scatter_mla_fp4(buffers[0], buffers[1], loc, *rows, **options)

    @staticmethod
    def _read(layout, buffers, loc, scales, *, split, dst_dtype, **options):
        dtype, nope = layout.dtype if dst_dtype is None else dst_dtype, 2 * layout.buffers[0].parts[0]
        if not layout.ranks.dcp_axis:
            options |= {"dtype": dtype, "split": nope if split else None}
            (rows,) = gather_fp4(buffers[:1], buffers[1:], loc, **options)
            return rows if split else (rows, rows[..., :nope])
        codes, scales = programs.gather_words(layout, buffers, loc, **options)
        row = fp4.decode(codes, scales, dtype)
        return (row[..., :nope], row[..., nope:]) if split else (row, row[..., :nope])

    @staticmethod
    def _decode(layout, buffers):
        codes, scales = buffers
        row = fp4.decode(codes, scales, layout.dtype)
        return row, row[..., : 2 * layout.buffers[0].parts[0]]
