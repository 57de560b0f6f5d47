"""What `--kv-dtype` names: the pool that stores it, and how a rank reads the rows of its own part."""

from typing import Any

import jax
import jax.numpy as jnp

import jkv
from examples.mesh import UsageError

Pool = Any  # a jkv pool: a PyTree, of any family

KV_DTYPES = {
    "bf16": jnp.dtype(jnp.bfloat16),
    "f32": jnp.dtype(jnp.float32),
    "f16": jnp.dtype(jnp.float16),
    "fp8_e4m3": jnp.dtype(jnp.float8_e4m3fn),
    "fp8_e5m2": jnp.dtype(jnp.float8_e5m2),
    "fp4": jnp.dtype(jnp.float4_e2m1fn),  # in blocks of 16 that share a power of two
}
MLA_KV_DTYPES = (*KV_DTYPES, "dsa")  # the packed rows of sparse attention: FP8 latents with their scales, and rope
_ALIASES = {dtype.name: name for name, dtype in KV_DTYPES.items()} | {"fp8": "fp8_e4m3"}


def canonical(name: str) -> str:
    """The name in `KV_DTYPES` of a dtype's full name, such as float8_e4m3fn; any other name as it is."""
    return _ALIASES.get(name, name)


def mha_pool(kv_dtype: str, **options: Any) -> Pool:
    """An MHA pool that stores `kv_dtype`; `options` are those of `create` but `dtype`.

    Raises:
        UsageError: an unknown name, or dimensions that the pool cannot have.
    """
    if (name := canonical(kv_dtype)) == "fp4":
        return _create(jkv.MHATokenToKVPoolFP4, name, options)
    return _create(jkv.MHATokenToKVPool, name, options | {"dtype": _dtype(name, tuple(KV_DTYPES))})


def mla_pool(kv_dtype: str, **options: Any) -> Pool:
    """An MLA pool, as `mha_pool`; "dsa" is one more name."""
    quantised = {"fp4": jkv.MLATokenToKVPoolFP4, "dsa": jkv.DSATokenToKVPool}
    if (name := canonical(kv_dtype)) in quantised:
        return _create(quantised[name], name, options)
    return _create(jkv.MLATokenToKVPool, name, options | {"dtype": _dtype(name, MLA_KV_DTYPES)})


def _dtype(name: str, known: tuple[str, ...]) -> Any:
    if name not in known:
        raise UsageError(f"unknown KV dtype {name!r}; there are {', '.join(known)}")
    return KV_DTYPES[name]


def _create(pool_class: Any, name: str, options: dict[str, Any]) -> Pool:
    try:
        return pool_class.create(**options)
    except ValueError as error:
        raise UsageError(f"the model cannot be served with KV dtype {name}: {error}") from error


def read(pool: Pool, layer: jax.Array, rows: jax.Array) -> tuple[jax.Array, ...]:
    """In a shard_map: keys and values `[B, L, heads, dim]` of rows `[B, L]` of this rank's part, dequantised.

    Zeros where there is no such row. Costs what the rows cost, whatever the pool stores, where a view of a whole FP4
    buffer would dequantise all of it.
    """
    return tuple(x.reshape(*rows.shape, *x.shape[1:]) for x in pool.local().get_kv(layer, rows.reshape(-1)))
