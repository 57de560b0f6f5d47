"""Serves a DeepSeek-V3 from a striped MLA pool: `python -m examples.mla [--weights NPZ --config JSON --cases JSON]`.

Attention is absorbed: every query, of a prompt or of a new token, attends to the latent rows of the pool itself. The
cases are a JSON list of objects with the prompt's `ids`; a case may have `greedy` tokens, and then they are compared.
Without the three files a tiny model of random weights continues two prompts: the path, not the sense.

Prompt tokens of the padding id (`--pad-id`, 0) are hidden from `greedy` but not from `last_logits`: transformers'
`generate` infers a mask from its `pad_token_id`, a call of its model does not, and cases made with it show both. Give
`--pad-id -1` where every id of a prompt is a token.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from examples import report
from examples.deepseek import TINY, DeepSeekConfig, load_params, random_weights, read_config
from examples.engine import Engine, Request, Stats
from examples.kv import MLA_KV_DTYPES, Pool, canonical
from examples.mesh import UsageError, ensure_cpu_devices, make_mesh
from examples.striped import serve_deepseek

TINY_CASES: list[dict[str, Any]] = [{"ids": list(range(2, 41))}, {"ids": [7, 30, 2]}]


def generate(
    config: DeepSeekConfig,
    weights: Mapping[str, np.ndarray],
    prompts: Sequence[Sequence[int]],
    *,
    dcp: int = 1,
    kv_dtype: str = "bf16",
    max_new_tokens: int = 24,
    batch: int = 4,
    page_size: int = 8,
    pool_tokens: int = 1024,
) -> tuple[list[Request], Stats, Pool]:
    """Continues token ids greedily, never ending early; see `examples.generate.generate` for the arguments.

    Returns:
        The requests (`token_ids`, and `first_logits` [vocabulary] after the prompt), what the run used, and the pool.

    Raises:
        UsageError: weights that are missing, sizes or a KV dtype that do not fit, a prompt that is empty or has unknown
            ids.
    """
    for name, ids in enumerate(prompts):
        if not all(0 <= token < config.vocab_size for token in ids):
            raise UsageError(f"prompt {name} has ids outside the vocabulary of {config.vocab_size} tokens")
    server = serve_deepseek(
        config,
        load_params(weights, config),
        make_mesh(dcp, 1),
        kv_dtype=kv_dtype,
        capacity=pool_tokens,
        page_size=page_size,
    )
    return Engine(server, prompts, max_new_tokens, lanes=min(batch, len(prompts))).run()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m examples.mla", description=__doc__.split("\n")[0])
    p.add_argument("--weights", type=Path, metavar="NPZ", help="arrays by their names in transformers")
    p.add_argument("--config", type=Path, metavar="JSON", help="the model's config.json")
    p.add_argument("--cases", type=Path, metavar="JSON", help='[{"ids": [...], "greedy": [...]}, ...]')
    p.add_argument("--dcp", type=int, default=1, metavar="N", help="ranks that share the tokens of a sequence")
    p.add_argument(
        "--kv-dtype", type=canonical, choices=MLA_KV_DTYPES, default="bf16",
        help="what the pool stores; fp4 needs dimensions that 16 divides, dsa a latent that 128 divides (default bf16)",
    )  # fmt: skip
    p.add_argument(
        "--pad-id", type=int, default=0, metavar="ID", help="prompt id hidden from `greedy`; -1: none (default 0)"
    )
    p.add_argument("--max-new-tokens", type=int, default=24, metavar="N", help="default 24")
    p.add_argument("--json", type=Path, metavar="OUT", help="write last_logits and greedy of each case")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 0, or 1 where something cannot be served."""
    cli = parser()
    args = cli.parse_args(argv)
    if len({path is None for path in (args.weights, args.config, args.cases)}) > 1:
        cli.error("give --weights, --config and --cases, or none of them for a tiny model")
    ensure_cpu_devices(args.dcp)
    try:
        cases = read_cases(args.cases) if args.cases else TINY_CASES
        config = read_config(args.config) if args.config else TINY
        whole = [case["ids"] for case in cases]
        shown = [[token for token in ids if token != args.pad_id] for ids in whole]
        padded = [index for index, ids in enumerate(whole) if shown[index] != ids]
        with np.load(args.weights) if args.weights else nullcontext(random_weights(TINY, 96)) as weights:
            requests, stats, pool = generate(
                config,
                weights,
                whole + [shown[index] for index in padded],
                dcp=args.dcp,
                kv_dtype=args.kv_dtype,
                max_new_tokens=args.max_new_tokens,
            )
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    greedy = [request.token_ids for request in requests[: len(cases)]]
    for index, request in zip(padded, requests[len(cases) :], strict=True):
        greedy[index] = request.token_ids
    for index, (case, tokens) in enumerate(zip(cases, greedy, strict=True)):
        print(f"[{index}] {len(whole[index])} tokens -> {tokens}")
        if "greedy" in case:
            same = sum(listed == token for listed, token in zip(case["greedy"], tokens, strict=False))
            print(f"    {same} of {len(tokens)} as listed in {args.cases.name}")
    print()
    print(report.table(stats, pool))
    if args.json:
        logits = [request.first_logits.tolist() for request in requests[: len(cases)]]
        found = [{"last_logits": row, "greedy": tokens} for row, tokens in zip(logits, greedy, strict=True)]
        args.json.write_text(json.dumps(found) + "\n")
    return 0


def read_cases(path: Path) -> list[dict[str, Any]]:
    """The cases of a file.

    Raises:
        UsageError: it is not a list of objects with `ids`, or an empty one.
    """
    try:
        cases = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UsageError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(cases, list) or not cases or not all(isinstance(c, dict) and "ids" in c for c in cases):
        raise UsageError(f'{path.name} must hold a list of objects with "ids"')
    return cases


if __name__ == "__main__":
    sys.exit(main())
