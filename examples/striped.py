"""Model steps over a pool whose tokens are striped over the mesh's `dcp` axis, heads and weights split as well.

A step runs inside one shard_map. The slot ids are the same on every rank, and each rank writes the rows that it owns,
attends to its own rows only, and the partial results are merged over `dcp`. Queries of a prompt read the rows back from
the pool too, so a token does not depend on whether the tokens before it came in this step or in an earlier one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jkv
from examples import deepseek, llama
from examples.deepseek import DeepSeekConfig
from examples.kv import Pool, mha_pool, mla_pool, read
from examples.llama import Axes, LlamaConfig, Params
from examples.mesh import DCP, TP, UsageError, put

Ints = Any  # int32: numpy on the host, jax in a step


class Batch(NamedTuple):
    """One step's tokens of `B` lanes, at most `T` each. A lane without new tokens is idle."""

    tokens: Ints  # [B, T]
    start: Ints  # [B], position of tokens[:, 0]
    new: Ints  # [B], how many of the T are real
    loc: Ints  # [B, T], the slots that their rows go to; padding where not real
    table: Ints  # [B, L], the slots of the lane's positions, in order


@dataclass(frozen=True)
class Server:
    """A model on a mesh with its pool.

    `step(params, pool, batch)` donates the pool and returns (pool, next tokens [B], their logits [B, vocabulary]).
    """

    params: Params
    pool: Pool
    step: Any  # a jkv.checked_jit
    context_len: int
    end_id: int | None


def local_mask(slots: jkv.SlotSpace, batch: Batch, rank: jax.Array, length: int) -> jax.Array:
    """Which of this rank's `length` rows, in order of position, each query may see: [B, T, length], causal."""
    steps = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
    seen = slots.local_lens(batch.start[:, None] + steps + 1, rank)
    return (jnp.arange(length) < seen[..., None]) & (steps < batch.new[:, None])[..., None]


def serve_llama(
    config: LlamaConfig, params: Params, mesh: Mesh, *, kv_dtype: str, capacity: int, page_size: int
) -> Server:
    """Spreads a Llama over the mesh, with a pool for at least `capacity` tokens, over all ranks, that stores
    `kv_dtype`.

    Raises:
        UsageError: the tensor-parallel size does not divide the heads, or the KV dtype does not fit them.
    """
    tp, ranks = mesh.shape[TP], math.prod(mesh.shape.values())
    if config.heads % tp or config.kv_heads % tp:
        fitting = [n for n in range(1, config.kv_heads + 1) if config.kv_heads % n == 0 and config.heads % n == 0]
        raise UsageError(
            f"tp {tp} does not divide the model's {config.heads} query heads and {config.kv_heads} KV heads; "
            f"tp can be {', '.join(map(str, fitting))}"
        )
    dense = (DCP, TP) if config.intermediate % ranks == 0 and config.vocab_size % ranks == 0 else ()
    axes = Axes(heads=(TP,), dense=dense)
    sizes = {
        "size": rank_size(capacity, mesh.shape[DCP], page_size),
        "page_size": page_size,
        "head_dim": config.head_dim,
        "layer_num": config.layers,
        "stacked": True,
    }
    pool = mha_pool(kv_dtype, head_num=config.kv_heads, mesh=mesh, dcp_axis=DCP, tp_axis=TP, **sizes)
    specs = llama.param_specs(axes)

    def local_step(params: Params, pool: Pool, batch: Batch) -> tuple[Pool, jax.Array]:
        rank = jax.lax.axis_index(DCP)
        pages, _ = jkv.local_page_table(pool.slots, batch.table, batch.start + batch.new, rank)
        rows = (pages[..., None] * page_size + jnp.arange(page_size)).reshape(pages.shape[0], -1)
        mask = local_mask(pool.slots, batch, rank, rows.shape[1])

        def attend(layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, pool: Pool) -> tuple[jax.Array, Pool]:
            pool = pool.set_kv_buffer(
                layer, batch.loc.reshape(-1), k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])
            )
            keys, values = read(pool, layer, rows)
            out, lse = jkv.attend_rows(q, keys[:, None], values[:, None], mask)
            return jkv.merge_states(out, lse, DCP)[0], pool

        logits, pool = llama.forward(params, config, batch.tokens, batch.start, batch.new, pool, attend, axes)
        return pool, logits

    step = _step(local_step, mesh, pool, specs, P(None, dense))
    return Server(put(params, specs, mesh), pool, step, config.context_len, config.end_id)


def serve_deepseek(
    config: DeepSeekConfig, params: Params, mesh: Mesh, *, kv_dtype: str, capacity: int, page_size: int
) -> Server:
    """Spreads a DeepSeek-V3 over the mesh's `dcp` axis, with an MLA pool for at least `capacity` tokens.

    Raises:
        UsageError: the KV dtype does not fit the model's dimensions.
    """
    sizes = {
        "size": rank_size(capacity, mesh.shape[DCP], page_size),
        "page_size": page_size,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "layer_num": config.num_hidden_layers,
        "stacked": True,
    }
    pool = mla_pool(kv_dtype, mesh=mesh, dcp_axis=DCP, **sizes)
    specs = jax.tree.map(lambda _: P(), params)

    def local_step(params: Params, pool: Pool, batch: Batch) -> tuple[Pool, jax.Array]:
        rank = jax.lax.axis_index(DCP)
        rows, _ = jkv.local_rows(pool.slots, batch.table, batch.start + batch.new, rank)
        mask = local_mask(pool.slots, batch, rank, rows.shape[1])

        def attend(
            layer: jax.Array, q: jax.Array, latent: jax.Array, rope: jax.Array, pool: Pool
        ) -> tuple[jax.Array, Pool]:
            flat = (x.reshape(-1, 1, x.shape[-1]) for x in (latent, rope))
            pool = pool.set_mla_kv_buffer(layer, batch.loc.reshape(-1), *flat)
            keys, values = read(pool, layer, rows)
            out, lse = jkv.attend_rows(q, keys[:, None], values[:, None], mask, scale=config.scale)
            return jkv.merge_states(out, lse, DCP)[0], pool

        logits, pool = deepseek.forward(params, config, batch.tokens, batch.start, batch.new, pool, attend)
        return pool, logits

    step = _step(local_step, mesh, pool, specs, P())
    return Server(put(params, specs, mesh), pool, step, config.max_position_embeddings, None)


def rank_size(capacity: int, dcp: int, page_size: int) -> int:
    """Tokens that each of `dcp` ranks must hold for `capacity` in all, in whole pages."""
    return -(-capacity // (dcp * page_size)) * page_size


def _step(local_step: Callable, mesh: Mesh, pool: Pool, param_specs: Any, logits_spec: P) -> Callable:
    """The jitted step around `local_step` -> (pool, logits): the pool is donated, next tokens come out replicated."""
    mapped = jax.shard_map(
        local_step,
        mesh=mesh,
        in_specs=(param_specs, pool.partition_specs(), P()),
        out_specs=(pool.partition_specs(), logits_spec),
    )

    def step(params: Params, pool: Pool, batch: Batch) -> tuple[Pool, jax.Array, jax.Array]:
        with jax.default_matmul_precision("highest"):  # float32 means float32 on a GPU too
            pool, logits = mapped(params, pool, batch)
        chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # Replicated, so that the host of every process can read them.
        return pool, *jax.lax.with_sharding_constraint((chosen, logits), NamedSharding(mesh, P()))

    return jkv.checked_jit(step, donate_argnums=(1,))
