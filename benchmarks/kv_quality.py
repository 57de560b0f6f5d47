"""What each KV dtype costs a model: SmolLM2-135M-Instruct over 1,000 tokens of real text, teacher-forced.

The text runs in chunks through a real pool of each format: a chunk's keys and values are written, then all rows are
read back, so that every token attends to rows as the pool keeps them, its own included. Against the same run in
float32:

  perplexity   of the text, and its difference with the standard error of that
  greedy       the share of positions where the most likely next token is the same
  worst        the largest difference of any logit at any position

"calibrated" FP8 rows are divided by a scale a layer for K and for V: the largest magnitude in another text over the
format's. The rows with FP4 for keys or for values alone tell which of them costs what; no pool offers them.

The second table is absorbed MLA of DeepSeek-V3's row, 512 + 64, in a small model with random weights. Its text means
nothing, so that it has no perplexity. Logits are given in units of their standard deviation.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from benchmarks import report
from examples import deepseek, kv, llama
from examples.deepseek import DeepSeekConfig
from examples.llama import LlamaConfig
from examples.models import MODELS

DATA = pathlib.Path(__file__).parent / "data"
TEXT, CALIBRATION = "lincoln.txt", "declaration.txt"
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Format:
    """What is stored: names of `examples.kv` for keys and, where it is another, for values; FP8 may be calibrated."""

    title: str
    keys: str
    values: str | None = None
    calibrated: bool = False


# The first is what the others are compared with.
MHA_FORMATS = (
    Format("float32", "f32"),
    Format("bfloat16", "bf16"),
    Format("float16", "f16"),
    Format("float8_e4m3fn", "fp8_e4m3"),
    Format("float8_e4m3fn, calibrated", "fp8_e4m3", calibrated=True),
    Format("float8_e5m2", "fp8_e5m2"),
    Format("float8_e5m2, calibrated", "fp8_e5m2", calibrated=True),
    Format("FP4", "fp4"),
    Format("FP4 keys, float32 values", "fp4", "f32"),
    Format("float32 keys, FP4 values", "f32", "fp4"),
)
MLA_FORMATS = (
    Format("float32", "f32"),
    Format("bfloat16", "bf16"),
    Format("float8_e4m3fn", "fp8_e4m3"),
    Format("float8_e5m2", "fp8_e5m2"),
    Format("DSA", "dsa"),
    Format("FP4", "fp4"),
)
DEEPSEEK = DeepSeekConfig(
    vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, q_lora_rank=128, kv_lora_rank=512,
    qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, rms_norm_eps=1e-6, max_position_embeddings=4096,
    eos_token_id=0, rope_theta=1e4,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Quality:
    """What a format costs over `tokens` predictions of a text.

    Args:
      title: the format's.
      bytes_per_token: of all layers, scales included.
      tokens: predictions.
      perplexity: of the text. difference: to that of the first format; error: the standard error of that difference.
      greedy: the share of predictions whose most likely token is that of the first format.
      worst: the largest difference of any logit to the first format's.
    """

    title: str
    bytes_per_token: int
    tokens: int
    perplexity: float
    difference: float
    error: float
    greedy: float
    worst: float


# A model over pools: (pools, tokens [T], start, scales) -> (pools, logits [T, vocabulary]). Donates the pools.
Step = Callable[[Any, np.ndarray, np.int32, Any], tuple[Any, jax.Array]]


def llama_step(params: llama.Params, config: LlamaConfig, length: int) -> Step:
    """Of pools for keys and values (or one for both) whose slots `1 ... length` are the positions."""
    table = jnp.arange(1, length + 1, dtype=jnp.int32)

    @functools.partial(jkv.checked_jit, donate_argnums=1)
    def step(params: llama.Params, pools: tuple, tokens: jax.Array, start: jax.Array, scales: Any) -> Any:
        positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)

        def attend(layer, q, k, v, pools):  # type: ignore[no-untyped-def]
            divisors = {} if scales is None else {f"{x}_scale": scales[x][layer] for x in "kv"}
            pools = tuple(pool.set_kv_buffer(layer, table[positions], k[0], v[0], **divisors) for pool in pools)
            keys, values = (
                pool.get_kv(layer, table, dst_dtype=jnp.float32, **divisors)[i]
                for i, pool in enumerate((pools[0], pools[-1]))
            )
            out, _ = jkv.attend_rows(q[0], keys, values, jnp.arange(length) <= positions[:, None])
            return out[None], pools

        count = jnp.full(1, tokens.shape[0], jnp.int32)
        logits, pools = llama.forward(params, config, tokens[None], start[None], count, pools, attend, every=True)
        return pools, logits[0]

    return functools.partial(step, jax.device_put(params))


def deepseek_step(params: llama.Params, config: DeepSeekConfig, length: int) -> Step:
    """As `llama_step`, of one MLA pool; there are no scales."""
    table = jnp.arange(1, length + 1, dtype=jnp.int32)

    @functools.partial(jkv.checked_jit, donate_argnums=1)
    def step(params: llama.Params, pools: tuple, tokens: jax.Array, start: jax.Array) -> Any:
        positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)

        def attend(layer, q, latent, rope, pools):  # type: ignore[no-untyped-def]
            (pool,) = pools
            pool = pool.set_mla_kv_buffer(layer, table[positions], latent[0], rope[0])
            keys, values = pool.get_kv(layer, table, dst_dtype=jnp.float32)
            mask = jnp.arange(length) <= positions[:, None]
            out, _ = jkv.attend_rows(q[0], keys, values, mask, scale=config.scale)
            return out[None], (pool,)

        count = jnp.full(1, tokens.shape[0], jnp.int32)
        logits, pools = deepseek.forward(params, config, tokens[None], start[None], count, pools, attend, every=True)
        return pools, logits[0]

    placed = jax.device_put(params)
    return lambda pools, tokens, start, scales: step(placed, pools, tokens, start)


@jax.jit
def compare(logits: jax.Array, reference: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each position: nll of its target, whether both logits [T, vocabulary] choose the same, worst difference."""
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return nll, logits.argmax(-1) == reference.argmax(-1), jnp.abs(logits - reference).max(-1)


def measure(
    step: Step,
    create: Callable[[str], Any],
    ids: Sequence[int],
    formats: Sequence[Format],
    *,
    chunk: int = CHUNK,
    scales: Mapping[str, Any] | None = None,
) -> list[Quality]:
    """Runs `ids` through a pool of every format, chunk by chunk, all compared with the first.

    Args:
      step: a model over pools for `len(ids) - 1` tokens.
      create: a pool by its name in `examples.kv`.
      ids: the text. formats: what to store it in.
      chunk: tokens of a step.
      scales: for each FP8 name what calibrated rows are divided by: "k" and "v" `[layers]`.
    """
    pools = [tuple(create(name) for name in (f.keys, f.values) if name) for f in formats]
    sizes = [sum(map(jkv.bytes_per_token, some)) // len(some) for some in pools]
    length = len(ids) - 1
    outcomes: list[list[Any]] = [[] for _ in formats]
    for start in range(0, length, chunk):
        tokens = np.asarray(ids[start : min(start + chunk, length)], np.int32)
        targets = np.asarray(ids[start + 1 : start + 1 + len(tokens)], np.int32)
        reference = None
        for i, some in enumerate(formats):
            divisors = scales[some.keys] if scales and some.calibrated else None
            pools[i], logits = step(pools[i], tokens, np.int32(start), divisors)
            reference = logits if reference is None else reference
            outcomes[i].append(jax.device_get(compare(logits, reference, targets)))
    jkv.wait_for_checks()
    found, first = [], np.concatenate([nll for nll, _, _ in outcomes[0]]).astype(np.float64)
    for some, size, parts in zip(formats, sizes, outcomes, strict=True):
        nll, same, worst = map(np.concatenate, zip(*parts, strict=True))
        perplexity, before = (math.exp(x.mean(dtype=np.float64)) for x in (nll, first))
        error = perplexity * (nll - first).std() / math.sqrt(length)
        found.append(
            Quality(
                some.title, size, length, perplexity, perplexity - before, error, float(same.mean()), float(worst.max())
            )
        )
    return found


def calibrate(step: Step, create: Callable[[str], Any], ids: Sequence[int]) -> dict[str, dict[str, jax.Array]]:
    """FP8 scales a layer, `amax / largest`, from the keys and values of another text."""
    pools = (create("f32"),)
    for start in range(0, len(ids), CHUNK):
        pools, _ = step(pools, np.asarray(ids[start : start + CHUNK], np.int32), np.int32(start), None)
    rows = np.arange(1, len(ids) + 1)
    each = [[jnp.abs(x).max() for x in pools[0].get_kv(layer, rows)] for layer in range(pools[0].layer_num)]
    largest = {name: float(jnp.finfo(kv.KV_DTYPES[name]).max) for name in ("fp8_e4m3", "fp8_e5m2")}
    amax = dict(zip("kv", jnp.array(each).T, strict=True))
    return {name: {x: amax[x] / limit for x in "kv"} for name, limit in largest.items()}


def of_smollm2(tokens: int | None) -> list[Quality]:
    """Over the text's first `tokens`, or all."""
    model = MODELS["smollm2"]()
    ids, other = (model.tokenizer.encode((DATA / name).read_text()) for name in (TEXT, CALIBRATION))
    ids, config = ids[:tokens], model.config
    length = max(len(ids), len(other))

    def create(name: str) -> Any:
        sizes = {"head_num": config.kv_heads, "head_dim": config.head_dim, "layer_num": config.layers}
        return kv.mha_pool(name, size=length, page_size=1, stacked=True, **sizes)

    step = llama_step(model.params, config, length)
    return measure(step, create, ids, MHA_FORMATS, scales=calibrate(step, create, other))


def of_deepseek(tokens: int) -> tuple[list[Quality], float]:
    """Over random ids; and the standard deviation of logits."""
    rng, config = np.random.default_rng(0), DEEPSEEK
    weights = {
        name: (1 + 0.1 * rng.standard_normal(s) if len(s) == 1 else rng.standard_normal(s) * s[-1] ** -0.5)
        for name, s in deepseek.param_shapes(config, 512).items()
    }
    ids = rng.integers(0, config.vocab_size, tokens)

    def create(name: str) -> Any:
        sizes = {"kv_lora_rank": config.kv_lora_rank, "qk_rope_head_dim": config.qk_rope_head_dim}
        return kv.mla_pool(name, size=tokens, page_size=1, stacked=True, layer_num=config.num_hidden_layers, **sizes)

    step = deepseek_step(deepseek.load_params(weights, config), config, tokens)
    _, logits = step((create("f32"),), ids[:CHUNK].astype(np.int32), np.int32(0), None)
    return measure(step, create, list(ids), MLA_FORMATS), float(logits.std())


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the measurements, and what they ran on, to FILE")
    parser.add_argument("--tokens", type=int, metavar="N", help="the first N tokens of the text only")
    options = parser.parse_args(argv)
    if options.tokens is not None and options.tokens < 2:
        parser.error(f"--tokens must be at least 2, got {options.tokens}")
    found = of_smollm2(options.tokens)
    header = ["KV dtype", "bytes a token", "perplexity", "difference", "greedy", "worst"]
    lines = [
        [q.title, f"{q.bytes_per_token:,}", f"{q.perplexity:.3f}", f"{q.difference:+.3f} ± {q.error:.3f}",
         f"{100 * q.greedy:.1f}%", f"{q.worst:.2f}"]
        for q in found
    ]  # fmt: skip
    print(report.table(f"SmolLM2-135M-Instruct, {found[0].tokens} tokens (JAX {jax.__version__})", header, lines))
    latent, deviation = of_deepseek(options.tokens or 512)
    lines = [
        [q.title, f"{q.bytes_per_token:,}", f"{100 * q.greedy:.1f}%", f"{q.worst / deviation:.3f}"] for q in latent
    ]
    title = f"MLA 512 + 64, random weights, {latent[0].tokens} tokens"
    print(report.table(title, ["KV dtype", "bytes a token", "greedy", "worst / deviation"], lines))
    both = {"SmolLM2-135M-Instruct": found, "MLA 512 + 64": latent}
    report.write_json(options.json, [{"model": name} | vars(q) for name, some in both.items() for q in some])


if __name__ == "__main__":
    main()
