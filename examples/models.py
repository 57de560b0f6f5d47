"""The models that `examples.generate` can serve."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from examples import smollm2
from examples.llama import LlamaConfig, Params, random_params
from examples.text import Tokenizer, byte_tokenizer

TINY_SPECIALS = ("<unk>", "<start>", "<end>")
TINY = LlamaConfig(
    vocab_size=288,  # 3 specials and 256 bytes, and a remainder that no text has: it divides over 1, 2, 3, 4, 6 and 8
    hidden=48,
    layers=3,
    heads=12,
    kv_heads=6,
    head_dim=16,
    intermediate=96,
    rope_theta=10000.0,
    rms_eps=1e-5,
    context_len=512,
    end_id=TINY_SPECIALS.index("<end>"),
)


@dataclass(frozen=True)
class Model:
    """Sizes, float32 weights on the host, and the tokenizer."""

    config: LlamaConfig
    params: Params
    tokenizer: Tokenizer


def _smollm2() -> Model:
    return Model(*smollm2.load())


def _tiny() -> Model:
    params = random_params(TINY)
    readable = np.zeros(TINY.vocab_size, bool)
    readable[len(TINY_SPECIALS) + ord(" ") : len(TINY_SPECIALS) + ord("~") + 1] = True
    params["embed"][~readable] *= 0.1  # nonsense, but printable nonsense: a small row is a small logit
    return Model(TINY, params, byte_tokenizer(len(TINY_SPECIALS), TINY_SPECIALS))


MODELS: dict[str, Callable[[], Model]] = {"smollm2": _smollm2, "tiny": _tiny}
