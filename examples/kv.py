"""What `--kv-dtype` names: the pool that stores it, and how a rank reads the rows of its own part."""

from typing import Any

import jax
import jax.numpy as jnp

import jkv
from examples.mesh import UsageError
from pallas_kernels import gather_dsa, gather_fp4

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


def local_pages(pool: Pool, layer: jax.Array, pages: jax.Array) -> tuple[jax.Array, ...]:
    """Keys and values of this rank's pages `[B, P]` of an MHA pool, in a shard_map: `[B, P * page_size, heads, dim]`.

    FP4 rows are gathered, then dequantised: of the whole buffer a view would have to dequantise every row.
    """
    if not isinstance(pool, jkv.MHATokenToKVPoolFP4):
        return tuple(b[pages].reshape(pages.shape[0], -1, *b.shape[2:]) for b in pool.get_page_buffer(layer))
    page_size = pool.slots.page_size
    rows = (pages[..., None] * page_size + jnp.arange(page_size, dtype=pages.dtype)).reshape(-1)
    scales = (pool.k_scale_buffer, pool.v_scale_buffer)
    read = gather_fp4((pool.k_buffer, pool.v_buffer), scales, rows, layer=layer)
    return tuple(x.reshape(pages.shape[0], -1, *x.shape[1:]) for x in read)


def local_latents(pool: Pool, layer: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """This rank's rows `[B, L]` of an MLA pool, in a shard_map: `[B, L, 1, r + p]`, and their first r columns.

    Where `rows` has -1 the values are any row's, to be masked out. Quantised rows are dequantised as in `local_pages`.
    """
    if isinstance(pool, jkv.MLATokenToKVPoolFP4):
        (read,) = gather_fp4((pool.kv_buffer,), (pool.kv_scale_buffer,), rows.reshape(-1), layer=layer)
    elif isinstance(pool, jkv.DSATokenToKVPool):
        parts = gather_dsa(pool.kv_buffer, rows.reshape(-1), kv_lora_rank=pool.kv_lora_rank, layer=layer)
        read = jnp.concatenate(parts, axis=-1)
    else:
        read = pool.get_key_buffer(layer)[rows.reshape(-1)]
    read = read.reshape(*rows.shape, *read.shape[1:])
    return read, read[..., : pool.kv_lora_rank]
