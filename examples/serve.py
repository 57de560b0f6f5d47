"""Serves many chat requests from a pool that is too small for them: `python -m examples.serve [--dcp N] [--plot PNG]`.

Their system prompts are computed once, requests that find no room wait, and running ones are put off to the host where
the pool runs short. At the end every page must be back, and every text must be what its request gives alone in a pool.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

import jkv
from examples import display, report
from examples.engine import Engine, Stats
from examples.kv import KV_DTYPES, Pool, canonical
from examples.mesh import UsageError, ensure_cpu_devices, make_mesh
from examples.models import MODELS, Model
from examples.sharing import SharingEngine, Usage
from examples.smollm2 import ModelUnavailableError
from examples.striped import serve_llama
from examples.workload import Work, draw

PAGE = 16  # tokens of a page, over all ranks


@dataclass(frozen=True)
class Result:
    """What `--json` writes, and what else a run leaves."""

    requests: int
    identical: int  # texts that are the same as alone
    leaked_pages: int
    retractions: int
    prefix_hit_tokens: int  # prompt tokens whose rows were in the cache
    tokens_per_second: float  # new tokens, by the clock of the shared run, compilation left out
    texts: list[list[int]]
    alone: list[list[int]]
    usage: list[Usage]
    stats: Stats
    pool: Pool

    def as_json(self) -> dict[str, float]:
        """The numbers."""
        names = ["requests", "identical", "leaked_pages", "retractions", "prefix_hit_tokens", "tokens_per_second"]
        return {name: getattr(self, name) for name in names}

    @property
    def passed(self) -> bool:
        """Every text the same as alone, and no page lost."""
        return self.identical == self.requests and not self.leaked_pages


def serve(
    model: Model,
    works: Sequence[Work],
    *,
    dcp: int = 1,
    kv_dtype: str = "bf16",
    pool_tokens: int | None = None,
    lanes: int = 40,
    show: display.Progress | None = None,
) -> Result:
    """Serves `works` together, then each alone. With several processes, each calls this alike and gets it all.

    The proof runs in the pool as the first run left it, over other requests' bytes, with the same compiled steps.

    Args:
        model: what `MODELS[name]()` returns.
        works: the requests.
        dcp: ranks that share the tokens of a sequence.
        kv_dtype: a name in `KV_DTYPES`, or a dtype's full name.
        pool_tokens: tokens that the pool holds over all ranks; rounded up to whole pages. None: a twentieth of what the
            requests have in all, or what the longest of them takes.
        lanes: requests that run at once, as far as the pool holds them.
        show: told of every step.

    Raises:
        UsageError: sizes or a KV dtype that do not fit the model, the devices or the pool; no request.
    """
    if not works:
        raise UsageError("at least one request must be served")
    if pool_tokens is None:
        lengths = [len(work.prompt_ids) + work.max_new_tokens for work in works]
        pool_tokens = max(-(-sum(lengths) // 20), *lengths)
    if pool_tokens < 1:
        raise UsageError(f"pool_tokens must be at least 1, got {pool_tokens}")
    mesh = make_mesh(dcp, 1)
    server = serve_llama(
        model.config, model.params, mesh, kv_dtype=kv_dtype, capacity=pool_tokens, page_size=-(-PAGE // dcp)
    )
    show = show or display.Progress(len(works), None)
    prompts, most = [work.prompt_ids for work in works], [work.max_new_tokens for work in works]
    engine = SharingEngine(server, prompts, most, lanes, show.shared)
    began = time.perf_counter()
    requests, stats, pool = engine.run()
    seconds = time.perf_counter() - began - stats.compile_seconds
    leaked = engine.leaked_pages()

    # A greedy text of n tokens begins with that of fewer: each prompt is served alone once, to its longest text.
    longest: dict[tuple[int, ...], int] = {}
    for work in works:
        prompt = tuple(work.prompt_ids)
        longest[prompt] = max(work.max_new_tokens, longest.get(prompt, 0))
    plain = Engine(
        replace(server, pool=pool), list(longest), list(longest.values()), lanes, by_page=True,
        on_token=lambda index, token, last: show.alone(index, last, len(longest)),
    )  # fmt: skip
    plain.steps = engine.steps
    texts = {tuple(request.prompt_ids): request.token_ids for request in plain.run_alone()}
    alone = [texts[tuple(work.prompt_ids)][: work.max_new_tokens] for work in works]
    served = [request.token_ids for request in requests]
    return Result(
        requests=len(works),
        identical=sum(ours == theirs for ours, theirs in zip(served, alone, strict=True)),
        leaked_pages=leaked,
        retractions=engine.retractions,
        prefix_hit_tokens=engine.hit_tokens,
        tokens_per_second=round(sum(map(len, served)) / seconds, 2),
        texts=served,
        alone=alone,
        usage=engine.usage,
        stats=stats,
        pool=plain.pool,
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m examples.serve", description=__doc__.split("\n")[0])
    p.add_argument("--model", choices=MODELS, default="smollm2", help="tiny: random weights, no download")
    p.add_argument("--requests", type=int, default=200, metavar="N", help="default 200")
    p.add_argument("--pool-tokens", type=int, metavar="M", help="pool size over all ranks (default 5%% of all tokens)")
    p.add_argument("--dcp", type=int, default=1, metavar="C", help="ranks that share the tokens of a sequence")
    p.add_argument(
        "--kv-dtype", type=canonical, choices=KV_DTYPES, default="bf16", help="what the pool stores (default bf16)"
    )
    p.add_argument("--max-new-tokens", type=int, default=24, metavar="N", help="of the longest texts (default 24)")
    p.add_argument("--lanes", type=int, default=40, metavar="N", help="requests that run at once (default 40)")
    p.add_argument("--seed", type=int, default=0, metavar="S", help="of the requests that are drawn (default 0)")
    p.add_argument("--plot", type=Path, metavar="FILE.png", help="draw what of the pool was in use, over time")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the numbers of the last lines")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 0, or 1 where something cannot be served or was not served right."""
    args = parser().parse_args(argv)
    ensure_cpu_devices(args.dcp)
    try:
        with jkv.enable_checks():
            return 0 if _run(args) else 1
    except (UsageError, ModelUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, ModelUnavailableError):
            print("`--model tiny` shows the whole path without any download.", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> bool:
    for name in ("requests", "max_new_tokens", "lanes"):
        if getattr(args, name) < 1:
            raise UsageError(f"{name} must be at least 1, got {getattr(args, name)}")
    for path in (args.plot, args.json):
        if path and not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: {path.parent} is not a folder")
    if args.plot:
        display.pyplot()  # says what is missing before the work is done
    make_mesh(args.dcp, 1)  # and before anything is downloaded
    model = MODELS[args.model]()
    works = draw(model.tokenizer, args.requests, args.seed, -(-args.max_new_tokens // 3), args.max_new_tokens)
    talks = jax.process_index() == 0
    result = serve(
        model,
        works,
        dcp=args.dcp,
        kv_dtype=args.kv_dtype,
        pool_tokens=args.pool_tokens,
        lanes=args.lanes,
        show=display.Progress(len(works), sys.stdout if talks else None),
    )
    if talks:
        _tell(model, works, result, args)
    return result.passed


def _tell(model: Model, works: Sequence[Work], result: Result, args: argparse.Namespace) -> None:
    total = sum(len(work.prompt_ids) + work.max_new_tokens for work in works)
    prompt_tokens = sum(len(work.prompt_ids) for work in works)
    capacity = result.pool.slots.capacity
    print(f"\n{report.table(result.stats, result.pool)}\n")
    print(f"the pool holds {capacity} tokens, {100 * capacity / total:.1f}% of the {total} that the requests have")
    print(f"{result.prefix_hit_tokens} of {prompt_tokens} prompt tokens were in the prefix cache")
    print(f"{result.retractions} times a running request was put off, its rows on the host")
    print(f"{result.tokens_per_second} new tokens a second")
    print(f"{result.leaked_pages} pages leaked")
    print(f"{result.identical} of {result.requests} texts are the same as alone in the pool")
    for index, (ours, theirs) in enumerate(zip(result.texts, result.alone, strict=True)):
        if ours != theirs:
            print(f"  request {index}: {model.tokenizer.decode(ours)!r}, alone {model.tokenizer.decode(theirs)!r}")
    if args.json:
        args.json.write_text(json.dumps(result.as_json(), indent=1) + "\n")
    if args.plot:
        display.plot(result.usage, args.plot)


if __name__ == "__main__":
    sys.exit(main())
