"""The pool of sparse MLA (DeepSeek Sparse Attention): rows packed to bytes, FP8 latents with their scales, and rope."""

from typing import Any, ClassVar, Self, Unpack

import jax.numpy as jnp

from jkv.layout import Buffer
from jkv.pools import programs
from jkv.pools.base import PoolOptions, register
from jkv.pools.dtypes import only_dtype
from jkv.pools.mla import MLATokenToKVPool
from jkv.slots import positive_int
from pallas_kernels import gather_dsa, scatter_dsa
from pallas_kernels.codecs import dsa


@register
class DSATokenToKVPool(MLATokenToKVPool):
    """Bytes `[dcp_size * rows, 1, r + 4 * r / 128 + 2 * p]` of every layer (656 for r = 512, p = 64).

    A row is r codes in float8_e4m3fn, a float32 scale for each tile of 128, and p bfloat16 of rope: what
    `jkv.quant.dsa_encode` returns. The doors are those of `MLATokenToKVPool`: rows read as bfloat16, whole buffers as
    raw bytes. They take no `k_scale`.
    """

    label: ClassVar[str] = "DSA"
    takes_scales: ClassVar[bool] = False

    @classmethod
    def create(
        cls,
        *,
        size: int,
        page_size: int,
        dtype: Any = jnp.float8_e4m3fn,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        **options: Unpack[PoolOptions],
    ) -> Self:
        """An empty (zero) pool.

        Args:
          size, page_size, layer_num, **options: as in `MLATokenToKVPool.create`.
          dtype: of the latent part as stored, float8_e4m3fn.
          kv_lora_rank: elements of the latent part (r), a multiple of 128. qk_rope_head_dim: of the rotary part (p).

        Raises:
          ValueError: sizes that are not positive or do not divide, another dtype, an unknown mesh axis.
        """
        where = cls.__name__
        dtype = only_dtype(dtype, jnp.float8_e4m3fn, where)
        r = positive_int(kv_lora_rank, where, "kv_lora_rank", of=dsa.TILE)
        p = positive_int(qk_rope_head_dim, where, "qk_rope_head_dim")
        buffers = [Buffer("kv_buffer", 1, (r, dsa.row_bytes(r, 0) - r, 2 * p), jnp.dtype(jnp.uint8))]
        return cls._create(buffers, size=size, page_size=page_size, dtype=dtype, layer_num=layer_num, **options)

    @property
    def qk_rope_head_dim(self) -> int:
        """Elements of the rotary part of a row."""
        return self.layout.buffers[0].parts[2] // 2

    @staticmethod
    def _write(layout, buffers, loc, rows, scales, **options):
        return (scatter_dsa(buffers[0], loc, *rows, kv_lora_rank=layout.buffers[0].parts[0], **options),)

    @staticmethod
    def _read(layout, buffers, loc, scales, *, split, dst_dtype, **options):
        r, dtype = layout.buffers[0].parts[0], jnp.bfloat16 if dst_dtype is None else dst_dtype
        if layout.ranks.dcp_axis:
            (words,) = programs.gather_words(layout, buffers, loc, **options)
            nope, rope = dsa.decode(words, r, dtype)
        else:
            nope, rope = gather_dsa(buffers[0], loc, kv_lora_rank=r, dtype=dtype, **options)
        return (nope, rope) if split else (jnp.concatenate([nope, rope], axis=-1), nope)

    @staticmethod
    def _decode(layout, buffers):
        return buffers[0], buffers[0][..., : layout.buffers[0].parts[0]]
