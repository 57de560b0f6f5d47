"""The command line of examples.generate: what it prints, writes and refuses, and the story that `--show-bug` tells."""

import io
import json
import os
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from examples import check, generate, show_bug
from examples.engine import Stats
from examples.mesh import DEVICE_COUNT_FLAG, UsageError, ensure_cpu_devices, make_mesh
from examples.models import MODELS, TINY, Model
from examples.striped import rank_size
from examples.text import Stream, byte_tokenizer


@pytest.fixture(scope="module")
def model() -> Model:
    return MODELS["tiny"]()


def test_the_bug_is_shown_with_real_ids(capsys: pytest.CaptureFixture[str]):
    assert generate.main(["--show-bug"]) == 0
    out = capsys.readouterr().out
    for line in (
        "the ids 8448 ... 8747",
        "KVIndexError: set_kv_buffer (MHA): 300 of 300 slot ids outside [0, 8256); min 8448, max 8747",
        "under the bound 33024 = (size 8192 + page_size 64) * dcp_size 4 it is not:\n  the probe: nothing to report\n"
        "  the write: nothing to report\n  300 of 33024 rows changed, 300 were addressed: every other row",
        "set_kv_buffer (MHA), layer 0: 1 of 2 slot ids outside [0, 33024) = (size 8192 + page_size 64) * dcp_size 4; "
        "min 8748, max 33029",
        "1 of 33024 rows changed, 1 were addressed: every other row of every rank is as it was",
    ):
        assert line in out


def test_the_story_fails_where_a_probe_is_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(jkv, "maybe_detect_oob", lambda *args: None)
    assert generate.main(["--show-bug"]) == 1
    assert "[0, 8256)" not in capsys.readouterr().out


def test_rows_that_were_not_addressed_are_noticed(capsys: pytest.CaptureFixture[str]):
    slots = jkv.SlotSpace(8, 4, 4)
    before, after = np.zeros((48, 2)), np.zeros((48, 2))
    after[1 * 12 + 5] = 1  # rank 1, row 5: id 21
    assert show_bug._written(before, after, slots, np.array([21]))
    assert not show_bug._written(before, after, slots, np.array([22]))
    assert "NOT the rows that were addressed" in capsys.readouterr().out


def test_the_command_prints_texts_and_a_table_and_writes_json(
    model: Model, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    target = tmp_path / "out.json"
    command = ["--model", "tiny", "--dcp", "2", "--kv-dtype", "f32", "--max-new-tokens", "5", "--check"]
    assert generate.main([*command, "--json", str(target), "hello", "wor\nld"]) == 0
    out = capsys.readouterr().out
    objects = json.loads(target.read_text())
    assert [o["prompt"] for o in objects] == ["hello", "wor\nld"]
    for i, found in enumerate(objects):
        assert list(found) == ["prompt", "prompt_ids", "token_ids", "text", "first_logits_top5"]
        assert found["prompt_ids"] == model.tokenizer.encode(found["prompt"])
        assert len(found["token_ids"]) == 5
        assert found["token_ids"][0] == found["first_logits_top5"][0][0]
        assert f"[{i}] {found['text']}" in out
    for line in (
        "prompt tokens        11 in 1 steps",
        "new tokens           8 in 4 steps",
        "1024 tokens on each of 2 ranks, 2048 in all",
        "rows in use at most  10, 9 by rank (1.0%, 0.9%)",
        "as float32",
        "devices              2 x cpu",
        "check: every token is the same: 10 of 10 tokens",
    ):
        assert line in out


def test_a_failed_check_fails_the_command(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pool = jkv.MHATokenToKVPool.create(size=8, page_size=4, dtype=jnp.float32, head_num=1, head_dim=4, layer_num=1)
    made = generate.Generation([generate.Text("hi", [1], [2], "!", [(2, 0.5)])], Stats(np.zeros(1, int)), pool)
    monkeypatch.setattr(generate, "generate", lambda *args, **options: made)
    monkeypatch.setattr(check, "compare", lambda *args: check.Outcome(False, "NOT THE SAME"))
    assert generate.main(["--model", "tiny", "--check", "hi"]) == 1
    out = capsys.readouterr().out
    assert "NOT THE SAME" in out
    assert "new tokens           0 in 0 steps\n" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tp", "4", "hi"], "tp 4 does not divide the model's 12 query heads and 6 KV heads; tp can be 1, 2, 3, 6"),
        (["--dcp", "4", "--tp", "3", "hi"], "dcp 4 x tp 3 needs 12 devices, this program has 8; set XLA_FLAGS"),
        (["--dcp", "0", "hi"], "dcp and tp must be at least 1, got dcp 0, tp 1"),
        (["hi", ""], "prompt 1 is empty"),
        (["--max-new-tokens", "0", "hi"], "at least one new token must be asked for, got 0"),
        (["--pool-tokens", "32", "x" * 40], "prompt 0 has 40 tokens, at most 31 can be served: the model's context is"),
        (["--pool-tokens", "32", "x" * 20], "which leaves room for 12 new ones, not 48: the model's context is 512"),
        (["x" * 512], "prompt 0 has 512 tokens, at most 511 can be served"),
        (["--json", "nowhere/out.json", "hi"], "cannot write nowhere/out.json: nowhere is not a folder"),
        (["--batch", "0", "hi"], "batch must be at least 1, got 0"),
        (["--page-size", "0", "hi"], "page_size must be at least 1, got 0"),
        (["--pool-tokens", "-1", "hi"], "pool_tokens must be at least 1, got -1"),
    ],
)
def test_what_cannot_be_served_is_said(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert generate.main(["--model", "tiny", *argv]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "give a PROMPT, or --show-bug"), (["--kv-dtype", "int8", "hi"], "invalid choice: 'int8'")],
)
def test_a_wrong_command_line_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        generate.main(argv)
    assert message in capsys.readouterr().err


def test_generate_refuses_what_the_command_line_would(model: Model):
    with pytest.raises(UsageError, match="unknown KV dtype 'int8'; there are bf16, f32, f16, fp8_e4m3, fp8_e5m2, fp4"):
        generate.generate(model, ["hi"], kv_dtype="int8")
    with pytest.raises(UsageError, match="no prompt was given"):
        generate.generate(model, [])
    with pytest.raises(UsageError, match="prompt 1 is empty"):
        generate.generate(model, ["hi", ""])


def test_a_mesh_of_several_processes_uses_all_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(UsageError, match="dcp 2 x tp 1 must use all 8 devices of the 2 processes"):
        make_mesh(2, 1)


@pytest.mark.parametrize(
    ("before", "after"),
    [("", f"{DEVICE_COUNT_FLAG}=4"), ("--a=1", f"--a=1 {DEVICE_COUNT_FLAG}=4"), (f"{DEVICE_COUNT_FLAG}=2",) * 2],
)
def test_the_number_of_virtual_devices_is_set_unless_it_was_chosen(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XLA_FLAGS", before)
    ensure_cpu_devices(4)
    assert os.environ["XLA_FLAGS"] == after


def test_a_pool_is_rounded_up_to_whole_pages_on_every_rank():
    assert [rank_size(capacity, 3, 4) for capacity in (1, 12, 13, 24)] == [4, 4, 8, 8]


def test_the_tiny_vocabulary_holds_every_byte():
    model = MODELS["tiny"]()
    assert model.tokenizer.decode(model.tokenizer.encode("naïve \U0001f40d")) == "naïve \U0001f40d"
    assert model.tokenizer.decode([TINY.end_id, 3 + 65, TINY.vocab_size - 1]) == "<end>A"
    assert max(model.tokenizer.encode("\u07ff")) < TINY.vocab_size


def stream(labels: list[str], width: int = 20) -> tuple[Stream, io.StringIO]:
    out = io.StringIO()
    return Stream(byte_tokenizer(0, ()), labels, width, out), out


def test_one_text_is_printed_as_it_comes_whole_characters_only():
    printer, out = stream(["[0]"])
    seen = []
    for n, byte in enumerate("aß\n!".encode()):
        printer(0, byte, n == 4)
        seen.append(out.getvalue())
    assert seen == ["a", "a", "aß", "aß\n", "aß\n!\n"]


def test_several_texts_are_printed_in_lines_with_their_number():
    printer, out = stream(["[0]", "[1]"])
    for n, (first, second) in enumerate(zip(b"words that fill more", b"0123456789012345678901234", strict=False)):
        printer(0, first, False)
        printer(1, second, n == 19)
    printer(0, ord("\n"), False)
    printer(0, ord("x"), True)
    assert out.getvalue().splitlines() == ["[1] 01234567890123456789", "[0] words that fill more", "[0] x"]
    printer, out = stream(["[0]", "[1]"], width=8)
    for n, byte in enumerate(b"two words 0123456789"):
        printer(0, byte, n == 19)
    assert out.getvalue().splitlines() == ["[0] two", "[0]  words", "[0]  0123456", "[0] 789"]
