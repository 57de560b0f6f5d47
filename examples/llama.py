"""A Llama decoder in plain JAX: the layers are scanned, and where keys and values live is the caller's business.

`forward` takes an `attend` callback: the server passes one that writes and reads a pool, the check one that holds a
dense array. The same code runs on one device and inside a shard_map; there `Axes` names what is split over which axes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]
State = TypeVar("State")
# (layer, q [B, T, heads, D], k [B, T, kv_heads, D], v, state) -> (out [B, T, heads, D], state)
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, State], tuple[jax.Array, State]]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama model. `end_id` is the token that ends a text; `context_len` is in tokens."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float
    rms_eps: float
    context_len: int
    end_id: int


@dataclass(frozen=True)
class Axes:
    """Mesh axes, inside a shard_map: `heads` splits attention, `dense` the MLP's columns and the vocabulary."""

    heads: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()


def param_shapes(config: LlamaConfig) -> Params:
    """The shape of every parameter, as a dict of tuples; weights are [layers, in, out], and all are float32."""
    d, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    per_layer = {
        "attn_norm": (d,),
        "q": (d, q),
        "k": (d, kv),
        "v": (d, kv),
        "o": (q, d),
        "mlp_norm": (d,),
        "gate": (d, config.intermediate),
        "up": (d, config.intermediate),
        "down": (config.intermediate, d),
    }
    layers = {name: (config.layers, *shape) for name, shape in per_layer.items()}
    return {"embed": (config.vocab_size, d), "norm": (d,), "layers": layers}


def param_specs(axes: Axes) -> Params:
    """How each parameter is split: over `Axes.heads` by heads, over `Axes.dense` by MLP columns and vocabulary."""
    out_heads, out_dense = P(None, None, axes.heads), P(None, None, axes.dense)
    layers = {
        "attn_norm": P(),
        "q": out_heads,
        "k": out_heads,
        "v": out_heads,
        "o": P(None, axes.heads, None),
        "mlp_norm": P(),
        "gate": out_dense,
        "up": out_dense,
        "down": P(None, axes.dense, None),
    }
    return {"embed": P(axes.dense, None), "norm": P(), "layers": layers}


def random_params(config: LlamaConfig, seed: int = 0) -> Params:
    """Seeded random float32 weights (numpy); norms are ones.

    Activations keep their size, but for two things that make texts less dull: embeddings are small beside what the
    layers add, and queries and keys are large, so that attention picks single tokens.
    """
    rng = np.random.default_rng(seed)
    scales = {"embed": 0.3, "q": 4.0, "k": 4.0}

    def draw(path: tuple[Any, ...], shape: tuple[int, ...]) -> np.ndarray:
        name = path[-1].key
        if name.endswith("norm"):
            return np.ones(shape, np.float32)
        scale = scales.get(name, 1.0) / (1.0 if name == "embed" else math.sqrt(shape[-2]))
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, param_shapes(config), is_leaf=lambda x: isinstance(x, tuple))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of adjacent pairs: x [B, T, heads, D], positions [B, T]. GGUF files and DeepSeek-V3 pair so."""
    dim = x.shape[-1]
    frequencies = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def embed(table: jax.Array, tokens: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Rows of a table [vocabulary, hidden] that may be split over `axes`."""
    if not axes:
        return table[tokens]
    row = tokens - jax.lax.axis_index(axes) * table.shape[0]
    mine = (row >= 0) & (row < table.shape[0])
    return sum_over(jnp.where(mine[..., None], table[jnp.where(mine, row, 0)], 0.0), axes)


def sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over mesh axes; over none it is `x`."""
    return jax.lax.psum(x, axes) if axes else x


def mlp(x: jax.Array, weights: Params, axes: tuple[str, ...]) -> jax.Array:
    """The gated MLP of Llama and DeepSeek, its columns split over `axes`."""
    return sum_over((jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"], axes)


def last_hidden(x: jax.Array, count: jax.Array) -> jax.Array:
    """The vector of each lane's last real token: x [B, T, hidden], count [B] -> [B, hidden]."""
    return jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]


def forward(
    params: Params,
    config: LlamaConfig,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    state: State,
    attend: Attend[State],
    axes: Axes = Axes(),
    *,
    every: bool = False,
) -> tuple[jax.Array, State]:
    """Runs `tokens` [B, T], of which lane b holds count[b] real ones from position start[b] on.

    Returns the logits after each lane's last real token, [B, vocabulary] (this rank's part of the vocabulary where it
    is split), and the new state. With `every`, the logits after each of the tokens, [B, T, vocabulary].
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)

    def heads_of(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, config.head_dim)

    def layer(carry: tuple[jax.Array, State], inputs: tuple[Params, jax.Array]) -> tuple[tuple[jax.Array, State], None]:
        (x, state), (w, index) = carry, inputs
        h = rms_norm(x, w["attn_norm"], config.rms_eps)
        q = rotate(heads_of(h @ w["q"]), positions, config.rope_theta)
        k = rotate(heads_of(h @ w["k"]), positions, config.rope_theta)
        out, state = attend(index, q, k, heads_of(h @ w["v"]), state)
        x = x + sum_over(out.reshape(*out.shape[:2], -1) @ w["o"], axes.heads)
        x = x + mlp(rms_norm(x, w["mlp_norm"], config.rms_eps), w, axes.dense)
        return (x, state), None

    indices = jnp.arange(config.layers, dtype=jnp.int32)
    x = embed(params["embed"], tokens, axes.dense)
    (x, state), _ = jax.lax.scan(layer, (x, state), (params["layers"], indices))
    x = rms_norm(x if every else last_hidden(x, count), params["norm"], config.rms_eps)
    return x @ params["embed"].T, state
