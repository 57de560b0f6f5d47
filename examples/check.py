"""`--check`: is a text that came out of the pool the one that the model gives without any pool?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from examples import dense
from examples.kv import KV_DTYPES, canonical
from examples.models import Model

# Logits. Two ways to sum in float32 differ in the last bit. Where such a difference falls on a rounding boundary of the
# pool's dtype a row differs by a step of that dtype, which moves others over theirs, and so on until logits differ by a
# part of what rounding costs anyway: with SmolLM2 up to 0.03 (bf16), 0.3 (fp8_e4m3), 0.9 (fp8_e5m2), 0.3 (fp4).
NEAR_TIES = {"f32": 0.0, "f16": 0.05, "bf16": 0.05, "fp8_e4m3": 0.5, "fp8_e5m2": 1.0, "fp4": 1.0}


@dataclass(frozen=True)
class Outcome:
    """The verdict, in one word and in full."""

    passed: bool
    message: str


def compare(
    model: Model, prompt_ids: Sequence[list[int]], token_ids: Sequence[list[int]], kv_dtype: str, max_new_tokens: int
) -> Outcome:
    """Decodes `prompt_ids` densely and compares with `token_ids`, what the pool gave.

    The dense keys and values are rounded to `kv_dtype`, too. With float32 every token must be the same. With a narrower
    dtype a text may part from the dense one at a near tie of two tokens, which is reported as what it is.
    """
    kv_dtype = canonical(kv_dtype)
    exact = kv_dtype == "f32"
    texts = dense.decode(model.params, model.config, prompt_ids, max_new_tokens, KV_DTYPES[kv_dtype])
    lines, passed, same = [], True, 0
    for name, (text, served) in enumerate(zip(texts, token_ids, strict=True)):
        pairs = zip(text.token_ids, served, strict=False)
        at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if at is None:
            same += min(len(text.token_ids), len(served))
            if len(text.token_ids) != len(served):
                passed = False
                lines.append(f"  prompt {name}: {len(served)} tokens from the pool, {len(text.token_ids)} dense")
            continue
        same += at
        gap = float(np.max(text.logits[at]) - text.logits[at][served[at]])
        tie = gap < NEAR_TIES[kv_dtype]
        passed &= tie
        why = ": a near tie, decided by rounding" if tie else ""
        lines.append(
            f"  prompt {name} parts at token {at}: {text.token_ids[at]} dense, {served[at]} from the pool, "
            f"{gap:.4f} apart in the dense logits{why}; what follows is not comparable"
        )
    total = sum(map(len, token_ids))
    rounded = "" if exact else f", its keys and values rounded to {KV_DTYPES[kv_dtype]} as well"
    verdict = "every token is the same" if not lines else "NEAR TIES ONLY" if passed else "NOT THE SAME"
    head = f"check: {verdict}: {same} of {total} tokens as decoded without a pool (dense attention{rounded})"
    return Outcome(passed, "\n".join([head, *lines]))
