"""DeepSeek-V3's attention, absorbed: queries are taken into the latent space, so a step reads only the pool's rows.

A token's row is its normalised latent vector and one rotary key that all heads share (`nope` then `rope`), and
    q_nope . (W_uk latent) = (W_uk^T q_nope) . latent        sum_s p_s (W_uv latent_s) = W_uv (sum_s p_s latent_s)
so that scores and weighted sums need no key or value of a head (DeepSeek-V2 report, section 2.1.2, and appendix C).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from examples.llama import Params, last_hidden, mlp, rms_norm, rotate
from examples.mesh import UsageError

State = TypeVar("State")
# (layer, q [B, T, heads, r + p], latent [B, T, r], rope [B, T, p], state) -> (sum of latents [B, T, heads, r], state)
AttendLatent = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, State], tuple[jax.Array, State]]


@dataclass(frozen=True)
class DeepSeekConfig:
    """Sizes of a DeepSeek-V3 without experts, named as in its config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    eos_token_id: int
    rope_theta: float

    @property
    def scale(self) -> float:
        """The softmax scale: one over the root of a query's width before it is absorbed."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5


# Small, and of dimensions that every MLA format takes.
TINY = DeepSeekConfig(
    vocab_size=64,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    q_lora_rank=24,
    kv_lora_rank=128,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    eos_token_id=1,
    rope_theta=10000.0,
)


def read_config(path: Path) -> DeepSeekConfig:
    """Reads a config.json in the form that transformers writes.

    Raises:
        UsageError: another architecture, or a feature that this example does not have.
    """
    raw = json.loads(path.read_text())
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), "rope_type": "default"}
    wanted = {
        "model_type": (raw.get("model_type"), "deepseek_v3"),
        "rope_type": (rope.get("rope_type"), "default"),
        "rope_interleave": (raw.get("rope_interleave", True), True),
        "attention_bias": (raw.get("attention_bias", False), False),
        "tie_word_embeddings": (raw.get("tie_word_embeddings", False), False),
        "hidden_act": (raw.get("hidden_act"), "silu"),
        "layers without experts": (raw.get("first_k_dense_replace"), raw.get("num_hidden_layers")),
    }
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise UsageError(f"{path.name}: {name} is {found!r}, this example serves {expected!r} only")
    names = DeepSeekConfig.__dataclass_fields__.keys() - {"rope_theta"}
    if missing := sorted(name for name in names if raw.get(name) is None):
        raise UsageError(f"{path.name} lacks {', '.join(missing)}")
    return DeepSeekConfig(**{name: raw[name] for name in names}, rope_theta=float(rope["rope_theta"]))


def param_shapes(config: DeepSeekConfig, intermediate: int) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a checkpoint, [out, in], by the names of transformers."""
    c, heads = config, config.num_attention_heads
    attention: dict[str, tuple[int, ...]] = {
        "q_a_proj": (c.q_lora_rank, c.hidden_size),
        "q_a_layernorm": (c.q_lora_rank,),
        "q_b_proj": (heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank),
        "kv_a_proj_with_mqa": (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        "kv_a_layernorm": (c.kv_lora_rank,),
        "kv_b_proj": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj": (c.hidden_size, heads * c.v_head_dim),
    }
    layer = {f"self_attn.{name}": shape for name, shape in attention.items()}
    layer |= {f"mlp.{name}_proj": (intermediate, c.hidden_size) for name in ("gate", "up")}
    layer |= {"mlp.down_proj": (c.hidden_size, intermediate)}
    layer |= {"input_layernorm": (c.hidden_size,), "post_attention_layernorm": (c.hidden_size,)}
    table = (c.vocab_size, c.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": table, "lm_head": table, "model.norm": (c.hidden_size,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(c.num_hidden_layers) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def random_weights(config: DeepSeekConfig, intermediate: int) -> dict[str, np.ndarray]:
    """A checkpoint of a model that was never trained: the same float32 arrays every time, norms near 1."""
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in param_shapes(config, intermediate).items():
        norm = len(shape) == 1
        weights[name] = (rng.standard_normal(shape) * (0.3 if norm else 1.5 * shape[-1] ** -0.5) + norm).astype("f4")
    return weights


def load_params(weights: Mapping[str, np.ndarray], config: DeepSeekConfig) -> Params:
    """A checkpoint's arrays (`param_shapes` names them), stacked over layers and with W_kv_b split into its halves.

    Raises:
        UsageError: a weight is missing.
    """

    def get(name: str) -> np.ndarray:
        if f"{name}.weight" not in weights:
            raise UsageError(f"the weights lack {name}.weight")
        return np.asarray(weights[f"{name}.weight"], np.float32)

    def layer(i: int) -> Params:
        prefix = f"model.layers.{i}."
        absorbed = get(f"{prefix}self_attn.kv_b_proj").reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        return {
            "attn_norm": get(f"{prefix}input_layernorm"),
            "q_a": get(f"{prefix}self_attn.q_a_proj").T,
            "q_norm": get(f"{prefix}self_attn.q_a_layernorm"),
            "q_b": get(f"{prefix}self_attn.q_b_proj").T,
            "kv_a": get(f"{prefix}self_attn.kv_a_proj_with_mqa").T,
            "kv_norm": get(f"{prefix}self_attn.kv_a_layernorm"),
            "uk": absorbed[:, : config.qk_nope_head_dim],  # [heads, nope, r]
            "uv": absorbed[:, config.qk_nope_head_dim :],  # [heads, v, r]
            "o": get(f"{prefix}self_attn.o_proj").T,
            "mlp_norm": get(f"{prefix}post_attention_layernorm"),
            "gate": get(f"{prefix}mlp.gate_proj").T,
            "up": get(f"{prefix}mlp.up_proj").T,
            "down": get(f"{prefix}mlp.down_proj").T,
        }

    layers = [layer(i) for i in range(config.num_hidden_layers)]
    stacked: Any = jax.tree.map(lambda *parts: np.stack(parts), *layers)
    return {"embed": get("model.embed_tokens"), "norm": get("model.norm"), "head": get("lm_head").T, "layers": stacked}


def forward(
    params: Params,
    config: DeepSeekConfig,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    state: State,
    attend: AttendLatent[State],
    *,
    every: bool = False,
) -> tuple[jax.Array, State]:
    """Runs `tokens` [B, T], of which lane b holds count[b] real ones from position start[b] on.

    Returns the logits after each lane's last real token, [B, vocabulary], and the new state. With `every`, the logits
    after each of the tokens, [B, T, vocabulary].
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    eps, rank, nope = config.rms_norm_eps, config.kv_lora_rank, config.qk_nope_head_dim

    def layer(carry: tuple[jax.Array, State], inputs: tuple[Params, jax.Array]) -> tuple[tuple[jax.Array, State], None]:
        (x, state), (w, index) = carry, inputs
        h = rms_norm(x, w["attn_norm"], eps)
        q = rms_norm(h @ w["q_a"], w["q_norm"], eps) @ w["q_b"]
        q = q.reshape(*x.shape[:2], config.num_attention_heads, -1)
        q_rope = rotate(q[..., nope:], positions, config.rope_theta)
        latent_rope = h @ w["kv_a"]
        latent = rms_norm(latent_rope[..., :rank], w["kv_norm"], eps)
        rope = rotate(latent_rope[..., None, rank:], positions, config.rope_theta)[:, :, 0]
        absorbed = jnp.einsum("bthn,hnr->bthr", q[..., :nope], w["uk"])
        out, state = attend(index, jnp.concatenate([absorbed, q_rope], axis=-1), latent, rope, state)
        out = jnp.einsum("bthr,hvr->bthv", out, w["uv"])
        x = x + out.reshape(*x.shape[:2], -1) @ w["o"]
        return (x + mlp(rms_norm(x, w["mlp_norm"], eps), w, ()), state), None

    indices = jnp.arange(config.num_hidden_layers, dtype=jnp.int32)
    x = params["embed"][tokens]
    (x, state), _ = jax.lax.scan(layer, (x, state), (params["layers"], indices))
    x = x if every else last_hidden(x, count)
    return rms_norm(x, params["norm"], eps) @ params["head"], state
