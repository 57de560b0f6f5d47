"""Serves a model from a striped KV pool: `python -m examples.generate [--dcp N] [--tp N] PROMPT...`.

Several prompts run as one continuous batch. Their keys and values lie in one pool that is striped over `--dcp` ranks,
with the heads split over `--tp`; where there are too few accelerators the ranks are virtual CPU devices.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples import check, report, show_bug
from examples.engine import Engine, Stats
from examples.kv import KV_DTYPES, Pool, canonical
from examples.mesh import UsageError, ensure_cpu_devices, make_mesh
from examples.models import MODELS, Model
from examples.smollm2 import ModelUnavailableError
from examples.striped import serve_llama
from examples.text import Stream


@dataclass(frozen=True)
class Text:
    """One prompt and its continuation. `token_ids` and `text` include the end token where the model ends."""

    prompt: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    first_logits_top5: list[tuple[int, float]]  # (id, logit) after the prompt, the largest first

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` writes."""
        return vars(self)


@dataclass(frozen=True)
class Generation:
    """What `generate` made: a text for each prompt, in their order, and what the run used."""

    texts: list[Text]
    stats: Stats
    pool: Pool


def generate(
    model: Model,
    prompts: Sequence[str],
    *,
    dcp: int = 1,
    tp: int = 1,
    kv_dtype: str = "bf16",
    max_new_tokens: int = 48,
    batch: int = 4,
    page_size: int = 16,
    pool_tokens: int = 2048,
    on_token: Callable[[int, int, bool], None] | None = None,
) -> Generation:
    """Continues `prompts` greedily, `batch` at a time. With several processes, each calls this alike and gets it all.

    Args:
        model: what `MODELS[name]()` returns.
        prompts: raw texts, without a chat template.
        dcp: ranks that share the tokens of a sequence.
        tp: ranks that share the heads.
        kv_dtype: a name in `KV_DTYPES`, or a dtype's full name.
        max_new_tokens: tokens of a text, at most.
        batch: prompts that run at once, as far as the pool holds them.
        page_size: tokens of a page on one rank.
        pool_tokens: tokens that the pool holds over all ranks; rounded up to whole pages.
        on_token: called as `on_token(index of the prompt, token, is_last)`.

    Raises:
        UsageError: sizes or a KV dtype that do not fit the model, the devices or the pool; no prompt, or an empty one.
    """
    for name, value in {"batch": batch, "page_size": page_size, "pool_tokens": pool_tokens}.items():
        if value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    if not prompts:
        raise UsageError("no prompt was given")
    prompt_ids = [model.tokenizer.encode(prompt) for prompt in prompts]
    server = serve_llama(
        model.config,
        model.params,
        make_mesh(dcp, tp),
        kv_dtype=kv_dtype,
        capacity=pool_tokens,
        page_size=page_size,
    )
    engine = Engine(server, prompt_ids, max_new_tokens, lanes=min(batch, len(prompts)), on_token=on_token)
    requests, stats, pool = engine.run()
    texts = []
    for prompt, request in zip(prompts, requests, strict=True):
        logits = request.first_logits
        top = [(int(i), float(logits[i])) for i in np.argsort(-logits, kind="stable")[:5]]
        text = model.tokenizer.decode(request.token_ids)
        texts.append(Text(prompt, request.prompt_ids, request.token_ids, text, top))
    return Generation(texts, stats, pool)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m examples.generate", description=__doc__.split("\n")[0])
    p.add_argument("prompts", nargs="*", metavar="PROMPT", help="raw text to continue")
    p.add_argument("--model", choices=MODELS, default="smollm2", help="tiny: random weights, no download")
    p.add_argument("--dcp", type=int, default=1, metavar="N", help="ranks that share the tokens of a sequence")
    p.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share the heads")
    p.add_argument(
        "--kv-dtype", type=canonical, choices=KV_DTYPES, default="bf16", help="what the pool stores (default bf16)"
    )
    p.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="default 48")
    p.add_argument("--batch", type=int, default=4, metavar="N", help="prompts that run at once (default 4)")
    p.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens of a page on a rank (default 16)")
    p.add_argument("--pool-tokens", type=int, default=2048, metavar="N", help="pool size over all ranks (default 2048)")
    p.add_argument("--check", action="store_true", help="decode without any pool too, and compare every token")
    p.add_argument("--show-bug", action="store_true", help="replay the wrong bound that this library rules out")
    p.add_argument("--json", type=Path, metavar="FILE", help="write prompts, token ids, texts and first logits")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 0, or 1 where something cannot be served or a check fails."""
    cli = parser()
    args = cli.parse_args(argv)
    if not args.prompts and not args.show_bug:
        cli.error("give a PROMPT, or --show-bug")
    ensure_cpu_devices(max(args.dcp * args.tp, show_bug.DCP_SIZE if args.show_bug else 1))
    try:
        told = show_bug.replay() if args.show_bug else True
        served = _serve(args) if args.prompts else True
        return 0 if told and served else 1
    except (UsageError, ModelUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, ModelUnavailableError):
            print("`--model tiny` shows the whole path without any download.", file=sys.stderr)
        return 1


def _serve(args: argparse.Namespace) -> bool:
    """Generates and prints; False if a check was asked for and fails."""
    if "" in args.prompts:
        raise UsageError(f"prompt {args.prompts.index('')} is empty: there is nothing to continue")
    if args.json and not args.json.parent.is_dir():
        raise UsageError(f"cannot write {args.json}: {args.json.parent} is not a folder")
    make_mesh(args.dcp, args.tp)  # says what is wrong before anything is downloaded
    model = MODELS[args.model]()
    talks = jax.process_index() == 0
    labels = [f"[{i}]" for i in range(len(args.prompts))]
    if talks:
        for label, prompt in zip(labels, args.prompts, strict=True):
            print(f"{label} {prompt!r}", flush=True)
        print()
    stream = Stream(model.tokenizer, labels)
    result = generate(
        model,
        args.prompts,
        dcp=args.dcp,
        tp=args.tp,
        kv_dtype=args.kv_dtype,
        max_new_tokens=args.max_new_tokens,
        batch=args.batch,
        page_size=args.page_size,
        pool_tokens=args.pool_tokens,
        on_token=stream if talks else None,
    )
    if talks:
        print()
        print(report.table(result.stats, result.pool))
    if args.json and talks:
        args.json.write_text(json.dumps([text.as_json() for text in result.texts], indent=1, ensure_ascii=False) + "\n")
    if not args.check:
        return True
    served = [text.token_ids for text in result.texts]
    outcome = check.compare(
        model, [text.prompt_ids for text in result.texts], served, args.kv_dtype, args.max_new_tokens
    )
    if talks:
        print()
        print(outcome.message)
    return outcome.passed


if __name__ == "__main__":
    sys.exit(main())
