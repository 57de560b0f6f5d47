"""Small pools that the tests of behaviours and of bad input share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jkv

MHA = {"head_num": 2, "head_dim": 4}
MLA = {"kv_lora_rank": 6, "qk_rope_head_dim": 2}


@functools.lru_cache
def mesh(dcp: int, tp: int = 1, axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = jax.devices()[: dcp * tp]
    return jax.make_mesh((dcp, tp), ("dcp", "tp"), devices=devices, axis_types=(axis_type,) * 2)


def on(dcp: int, tp: int = 1, axis_type: AxisType = AxisType.Auto) -> dict[str, Any]:
    """What `create` needs for a mesh."""
    return {"mesh": mesh(dcp, tp, axis_type), "dcp_axis": "dcp", "tp_axis": "tp"}


def mha(size: int = 8, page_size: int = 4, dtype: Any = jnp.float32, **options: Any) -> Any:
    """Two heads of 4, one layer: `size` 8 and page 1 are fixture F1, 64 and 4 F4, 8 and 4 on four ranks D4."""
    return jkv.MHATokenToKVPool.create(
        **{"size": size, "page_size": page_size, "dtype": dtype, "layer_num": 1} | MHA | options
    )


def mla(size: int = 8, page_size: int = 4, dtype: Any = jnp.float32, **options: Any) -> Any:
    """Rows of 6 latent and 2 rope values, one layer."""
    return jkv.MLATokenToKVPool.create(
        **{"size": size, "page_size": page_size, "dtype": dtype, "layer_num": 1} | MLA | options
    )


def rows(n: int, *shape: int, start: float = 1.0) -> np.ndarray:
    """Distinct small float32 values, exact in every dtype of 16 bits, none of them zero."""
    return (start + np.arange(n * int(np.prod(shape)), dtype=np.float32) % 97).reshape(n, *shape)


def write(pool: Any, loc: Any, layer: Any = 0, start: float = 1.0) -> Any:
    """Writes `rows` at `loc` through `set_kv_buffer`; V gets other values than K."""
    n = len(loc)
    if hasattr(pool, "kv_lora_rank"):
        return pool.set_kv_buffer(layer, loc, rows(n, 1, pool.kv_lora_rank + pool.qk_rope_head_dim, start=start))
    k, v = rows(n, pool.head_num, pool.head_dim, start=start), rows(n, pool.head_num, pool.v_head_dim, start=start + 7)
    return pool.set_kv_buffer(layer, loc, k, v)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def words(pool: Any) -> list[np.ndarray]:
    """Every buffer of every layer, on the host."""
    return [np.array(leaf) for leaf in jax.tree.leaves(pool)]


def same(a: Any, b: Any) -> bool:
    """Whether two pools hold the same words."""
    return all(np.array_equal(x, y) for x, y in zip(words(a), words(b), strict=True))


def row_of(pool: Any, loc: int, layer: int = 0) -> list[np.ndarray]:
    """The stored words of slot `loc`, of every buffer, taken from where the contract says that they lie."""
    c, rows_ = pool.slots.dcp_size, pool.slots.size + pool.slots.page_size
    return [np.asarray(buffer)[loc % c * rows_ + loc // c] for buffer in jax.tree.leaves(layer_of(pool, layer))]


def layer_of(pool: Any, layer: int = 0) -> list[Any]:
    names = ("kv_buffer",) if hasattr(pool, "kv_lora_rank") else ("k_buffer", "v_buffer")
    return [getattr(pool, name)[layer] for name in names]
