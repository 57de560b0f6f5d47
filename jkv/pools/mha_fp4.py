"""The pool of multi-head attention in FP4: K and V as 4-bit codes with a scale for every 16 elements."""

from typing import Any, ClassVar, Self, Unpack

import jax
import jax.numpy as jnp

from jkv.layout import Buffer, Layout
from jkv.pools import programs
from jkv.pools.base import PoolOptions, register
from jkv.pools.dtypes import only_dtype
from jkv.pools.mha import MHATokenToKVPool
from jkv.slots import positive_int
from pallas_kernels import gather_fp4, scatter_kv_fp4
from pallas_kernels.codecs import fp4


@register
class MHATokenToKVPoolFP4(MHATokenToKVPool):
    """uint8 codes `[dcp_size * rows, head_num, head_dim / 2]`, scales `[dcp_size * rows, head_num * head_dim / 16]`.

    The doors are those of `MHATokenToKVPool` and read `dtype`. Rows are quantised as `jkv.quant.fp4_encode` does; they
    take no `k_scale` and `v_scale`.
    """

    k_scale_buffer: tuple[jax.Array, ...] | jax.Array
    v_scale_buffer: tuple[jax.Array, ...] | jax.Array
    layout: Layout
    label: ClassVar[str] = "MHA-FP4"
    takes_scales: ClassVar[bool] = False

    @classmethod
    def create(
        cls,
        *,
        size: int,
        page_size: int,
        dtype: Any = jnp.bfloat16,
        head_num: int,
        head_dim: int,
        layer_num: int,
        v_head_dim: int | None = None,
        **options: Unpack[PoolOptions],
    ) -> Self:
        """An empty (zero) pool.

        Args:
          size, page_size, head_num, layer_num, **options: as in `MHATokenToKVPool.create`.
          dtype: what rows dequantise to, bfloat16.
          head_dim, v_head_dim: elements of a K and of a V head, multiples of 16; V as K when None.

        Raises:
          ValueError: sizes that are not positive or do not divide, another dtype, an unknown mesh axis.
        """
        where = cls.__name__
        dtype = only_dtype(dtype, jnp.bfloat16, where)
        head_num = positive_int(head_num, where, "head_num")
        k_dim = positive_int(head_dim, where, "head_dim", of=fp4.BLOCK)
        v_dim = k_dim if v_head_dim is None else positive_int(v_head_dim, where, "v_head_dim", of=fp4.BLOCK)
        word = jnp.dtype(jnp.uint8)
        buffers = [Buffer(f"{x}_buffer", head_num, (dim // 2,), word, True) for x, dim in (("k", k_dim), ("v", v_dim))]
        buffers += [
            Buffer(f"{x}_scale_buffer", head_num, (dim // fp4.BLOCK,), word, True, flat=True)
            for x, dim in (("k", k_dim), ("v", v_dim))
        ]
        return cls._create(buffers, size=size, page_size=page_size, dtype=dtype, layer_num=layer_num, **options)

    @property
    def head_dim(self) -> int:
        """Elements of a K head."""
        return 2 * self.layout.buffers[0].width

    @property
    def v_head_dim(self) -> int:
        """Elements of a V head."""
        return 2 * self.layout.buffers[1].width

    @staticmethod
    def _write(layout, buffers, loc, rows, scales, **options):
        k, v, k_scales, v_scales = buffers
        return scatter_kv_fp4(k, v, k_scales, v_scales, loc, rows[0], rows[1], **options)

    @staticmethod
    def _read(layout, buffers, loc, scales, *, split, dst_dtype, **options):
        dtype = layout.dtype if dst_dtype is None else dst_dtype
        if not layout.ranks.dcp_axis:
            return gather_fp4(buffers[:2], buffers[2:], loc, dtype=dtype, **options)
        k, v, k_scales, v_scales = programs.gather_words(layout, buffers, loc, **options)
        return fp4.decode(k, k_scales, dtype), fp4.decode(v, v_scales, dtype)

    @staticmethod
    def _decode(layout, buffers):
        k, v, k_scales, v_scales = buffers
        return fp4.decode(k, k_scales, layout.dtype), fp4.decode(v, v_scales, layout.dtype)
