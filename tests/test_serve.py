"""examples.serve: shared prefixes, put-off requests and given-back pages in a pool that is too small, and its proof."""

import io
import itertools
import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from examples import dense, display, serve
from examples.display import Progress
from examples.mesh import make_mesh
from examples.models import MODELS, Model
from examples.sharing import SharingEngine, Usage
from examples.striped import Server, serve_llama
from examples.workload import QUESTIONS, SYSTEM_PROMPTS, Work, draw

KEYS = ["requests", "identical", "leaked_pages", "retractions", "prefix_hit_tokens", "tokens_per_second"]


@pytest.fixture(scope="module")
def model() -> Model:
    return MODELS["tiny"]()


def short_works(model: Model) -> list[Work]:
    """24 requests of two system prompts, some of whole pages and some the same again."""
    rng = np.random.default_rng(3)
    systems = [model.tokenizer.encode(text[:40]) for text in SYSTEM_PROMPTS[:2]]
    works = []
    for n in range(24):
        prompt = systems[n % 2] + model.tokenizer.encode(QUESTIONS[n % 4 + n % 3])
        works.append(Work(prompt[:48] if n % 5 == 0 else prompt, int(rng.integers(4, 30))))
    works[5] = works[0]  # a prompt of whole pages, all of which are there: the last is run again for its logits
    return works


def test_a_tenth_of_the_tokens_is_enough_for_the_texts_of_dense_decoding(model: Model):
    works = short_works(model)
    total = sum(len(work.prompt_ids) + work.max_new_tokens for work in works)
    with jkv.enable_checks():
        result = serve.serve(model, works, kv_dtype="f32", pool_tokens=total // 10, lanes=6)
    assert result.as_json() == {
        "requests": 24,
        "identical": 24,
        "leaked_pages": 0,
        "retractions": result.retractions,
        "prefix_hit_tokens": result.prefix_hit_tokens,
        "tokens_per_second": result.tokens_per_second,
    }
    assert result.passed
    assert result.retractions > 0
    assert result.stats.running > 2
    # What was not in the cache was run, and nothing else.
    assert result.prefix_hit_tokens > 0
    assert result.prefix_hit_tokens + result.stats.prefill.tokens == sum(len(work.prompt_ids) for work in works)
    assert result.tokens_per_second > 0
    longest = max(work.max_new_tokens for work in works)
    texts = dense.decode(
        model.params, model.config, [work.prompt_ids for work in works], longest, jnp.dtype(jnp.float32)
    )
    assert result.texts == [t.token_ids[: w.max_new_tokens] for t, w in zip(texts, works, strict=True)]
    capacity = result.pool.slots.capacity
    assert capacity <= total // 10 + 16
    assert all(u.free + u.cached + u.used == capacity and min(u.free, u.cached, u.used) >= 0 for u in result.usage)
    assert max(u.used + u.cached for u in result.usage) == capacity
    assert (result.usage[-1].used, result.usage[-1].running, result.usage[-1].waiting) == (0, 0, 0)


def test_the_command_serves_from_stripes_and_writes_numbers_and_a_picture(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib")
    numbers, picture = tmp_path / "numbers.json", tmp_path / "pool.png"
    command = ["--model", "tiny", "--dcp", "4", "--requests", "24", "--pool-tokens", "560", "--seed", "3"]
    assert serve.main([*command, "--json", str(numbers), "--plot", str(picture)]) == 0
    found = json.loads(numbers.read_text())
    assert list(found) == KEYS
    assert (found["requests"], found["identical"], found["leaked_pages"]) == (24, 24, 0)
    assert found["retractions"] > 0
    assert found["prefix_hit_tokens"] > 1000
    out = capsys.readouterr().out
    for line in (
        "24/24 done, 0 running",
        "140 tokens on each of 4 ranks, 560 in all",
        f"{found['prefix_hit_tokens']} of ",
        f"{found['retractions']} times a running request was put off",
        "0 pages leaked",
        "24 of 24 texts are the same as alone in the pool",
    ):
        assert line in out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size > 10_000


def small_server(model: Model) -> Server:
    return serve_llama(model.config, model.params, make_mesh(1, 1), kv_dtype="f32", capacity=160, page_size=16)


def test_rows_that_come_back_wrong_are_seen_in_the_texts(model: Model, monkeypatch: pytest.MonkeyPatch):
    """The proof proves something: with the restored rows zeroed, some text is another one."""
    load = jkv.MHATokenToKVPool.load_cpu_copy

    def forget(pool, host, loc):
        return load(pool, jkv.HostCopy(tuple(words * 0 for words in host.words), host.kind), loc)

    monkeypatch.setattr(jkv.MHATokenToKVPool, "load_cpu_copy", forget)
    works = [Work([40 + n] * 20, 40) for n in range(4)]
    result = serve.serve(model, works, kv_dtype="f32", pool_tokens=112, lanes=4)
    assert result.retractions > 0
    assert result.identical < 4
    assert result.leaked_pages == 0
    assert not result.passed


def test_a_lost_page_is_counted(model: Model):
    engine = SharingEngine(small_server(model), [[5] * 20], 3, 1)
    assert engine.leaked_pages() == 0
    engine.allocator.alloc(32)
    assert engine.leaked_pages() == 2


def test_a_request_waits_until_its_prompt_fits_and_holds_no_lock_meanwhile(model: Model):
    engine = SharingEngine(small_server(model), [[5] * 64, [6] * 64], 8, 2)
    taken = engine.allocator.alloc(96)
    first, second = engine.requests
    cached = engine.allocator.alloc(64)
    engine.cache.insert(np.array([5] * 64), cached)
    assert not engine._place(second)
    assert engine.cache.protected_size == 0
    assert (engine.lanes, engine.table.available_size()) == ([None, None], 2)
    # The first has its pages there already, but for the one of its last token.
    engine.allocator.free(taken[:32])
    assert engine._place(first)
    assert (first.shared, first.cached, engine.hit_tokens) == (48, 48, 48)
    assert engine.cache.protected_size == 48


def test_what_is_drawn_shares_system_prompts_and_is_the_same_for_a_seed(model: Model):
    works = draw(model.tokenizer, 100, 7, 5, 9)
    assert works == draw(model.tokenizer, 100, 7, 5, 9)
    assert works != draw(model.tokenizer, 100, 8, 5, 9)
    assert {work.max_new_tokens for work in works} == {5, 6, 7, 8, 9}
    assert len({tuple(work.prompt_ids[:120]) for work in works}) == len(SYSTEM_PROMPTS)
    assert 18 < len({tuple(work.prompt_ids) for work in works}) <= 36
    text = model.tokenizer.decode(works[0].prompt_ids)
    assert text.startswith("<|im_start|>system\nYou ")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--requests", "0"], "requests must be at least 1, got 0"),
        (["--lanes", "0"], "lanes must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["--pool-tokens", "0"], "pool_tokens must be at least 1, got 0"),
        (["--pool-tokens", "64"], "at most 63 can be served: the model's context is 512 tokens, the pool holds 64"),
        (["--dcp", "16"], "dcp 16 x tp 1 needs 16 devices, this program has 8"),
        (["--json", "nowhere/out.json"], "cannot write nowhere/out.json: nowhere is not a folder"),
        (["--plot", "nowhere/out.png"], "cannot write nowhere/out.png: nowhere is not a folder"),
    ],
)
def test_what_cannot_be_served_is_said(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert serve.main(["--model", "tiny", "--requests", "8", *argv]) == 1
    assert message in capsys.readouterr().err


def test_no_request_is_refused(model: Model):
    with pytest.raises(serve.UsageError, match="at least one request must be served"):
        serve.serve(model, [])


def test_a_picture_without_matplotlib_is_refused_before_anything_is_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert serve.main(["--model", "tiny", "--plot", "pool.png"]) == 1
    out, err = capsys.readouterr()
    assert "--plot needs the extra `demo`: pip install 'jkv-pool[demo]'" in err
    assert not out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count(100)
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    half = Usage(2.0, free=40, cached=40, used=80, running=1, waiting=1, new_tokens=30, retractions=3)
    done = Usage(4.0, free=160, cached=0, used=0, running=0, waiting=0, new_tokens=60, retractions=3)
    line = (
        "[############++++++......] 2/4 done, 1 running, 3 put off so far, 15.0 tokens/s, pool: 50% in use, 25% cached"
    )
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        progress = Progress(4, out)
        for usage in (half, half, done):
            progress.shared(usage)
        progress.alone(0, False, 2)
        progress.alone(1, True, 2)
    assert terminal.getvalue().startswith(f"\r{line}\033[K\r{line}\033[K\r[")
    assert terminal.getvalue().count("\n") == 2
    # Not every step: five seconds have to pass, by this clock one a call.
    assert file.getvalue().splitlines()[:2] == [line, file.getvalue().splitlines()[1]]
    assert file.getvalue().splitlines()[1].startswith("[........................] 4/4 done, 0 running")
    assert file.getvalue().endswith("alone: 2/2 prompts\n")
    Progress(4, None).shared(half)
