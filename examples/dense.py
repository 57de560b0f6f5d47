"""Greedy decoding without any pool: the reference that `--check` compares with.

Keys and values of the whole sequence lie in one dense array a layer, one device holds everything, and attention is a
plain softmax. Nothing of jkv is used. The rows are rounded to the pool's dtype, as a pool rounds what it stores;
without that a bfloat16 or FP8 pool could only be compared with a model that it does not serve.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.llama import LlamaConfig, Params, forward

_FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_BORDERS = (_FP4_VALUES[1:] + _FP4_VALUES[:-1]) / 2  # what lies on one goes up


class DenseText(NamedTuple):
    """One prompt's greedy tokens, and the logits [vocabulary] that each was chosen from."""

    token_ids: list[int]
    logits: list[np.ndarray]


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The float32 values that rows `x` have once stored in `dtype`; FP8 clamps to its finite range.

    In float4_e2m1fn, blocks of 16 share the least power of two that brings their largest magnitude to 6 or below.
    """
    if jnp.dtype(dtype) == jnp.float4_e2m1fn:
        blocks = x.reshape(*x.shape[:-1], -1, 16)
        mantissa, exponent = jnp.frexp(jnp.abs(blocks).max(axis=-1, keepdims=True))
        step = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - jnp.where(mantissa > 0.75, 2, 3), -33))
        code = jnp.searchsorted(_FP4_BORDERS, jnp.abs(blocks) / step, side="right")
        return (jnp.copysign(jnp.asarray(_FP4_VALUES)[code], blocks) * step).reshape(x.shape)
    if jnp.dtype(dtype).itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -limit, limit)
    return x.astype(dtype).astype(jnp.float32)


@partial(jax.jit, static_argnames=("config", "dtype"), donate_argnames=("keys", "values"))
def _step(
    params: Params,
    keys: jax.Array,
    values: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    config: LlamaConfig,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs tokens [B, T] over keys and values [layers, B, S, kv_heads, D]."""
    lanes, steps = tokens.shape
    positions = start[:, None] + jnp.arange(steps)
    lane = jnp.arange(lanes)[:, None]
    seen = jnp.arange(keys.shape[2]) <= positions[..., None]  # [B, T, S]: causal

    def attend(layer, q, k, v, state):  # type: ignore[no-untyped-def]
        keys, values = state
        keys = keys.at[layer, lane, positions].set(round_to(k, dtype), mode="drop")
        values = values.at[layer, lane, positions].set(round_to(v, dtype), mode="drop")
        groups = q.reshape(lanes, steps, config.kv_heads, -1, config.head_dim)
        scores = jnp.einsum("btngd,bsnd->bngts", groups, keys[layer]) / math.sqrt(config.head_dim)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bngts,bsnd->btngd", weights, values[layer])
        return out.reshape(q.shape), (keys, values)

    with jax.default_matmul_precision("highest"):
        logits, (keys, values) = forward(params, config, tokens, start, count, (keys, values), attend)
    return keys, values, logits


def decode(
    params: Params, config: LlamaConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, dtype: jnp.dtype
) -> list[DenseText]:
    """Greedy tokens of each prompt, with the logits they came from; `dtype` is what keys and values are rounded to."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for lane, prompt in enumerate(prompts):
        tokens[lane, : len(prompt)] = prompt
    span = int(lengths.max()) + max_new_tokens
    params = jax.device_put(params)
    keys = jnp.zeros((config.layers, len(prompts), span, config.kv_heads, config.head_dim), jnp.float32)
    values = jnp.zeros_like(keys)
    start, count = np.zeros_like(lengths), lengths
    texts = [DenseText([], []) for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(max_new_tokens):
        keys, values, logits = _step(params, keys, values, tokens, start, count, config=config, dtype=dtype)
        host = np.asarray(logits)
        for lane in sorted(running):
            texts[lane].token_ids.append(int(host[lane].argmax()))
            texts[lane].logits.append(host[lane])
        running = {lane for lane in running if texts[lane].token_ids[-1] != config.end_id}
        if not running:
            break
        start = start + count
        count = np.ones_like(count)
        tokens = np.array([[text.token_ids[-1]] for text in texts], np.int32)
    return texts
