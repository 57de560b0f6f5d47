"""SmolLM2-135M-Instruct, real weights: from every kind of stripe the tokens that transformers gives for the file."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from examples import check, dense, generate
from examples.models import MODELS, Model

# transformers on the same weights, dequantised to float32; see the keys.
CASES = json.loads((pathlib.Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
PROMPTS = [case["prompt"] for case in CASES]

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def model() -> Model:
    return MODELS["smollm2"]()


def test_the_tokenizer_is_the_models(model: Model):
    for case in CASES:
        assert model.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert model.tokenizer.decode(case["greedy_ids"]) == case["greedy_text"]
    # A digit is a token of its own, and what has no token of its own is bytes.
    assert (
        model.tokenizer.decode(model.tokenizer.encode("in 1999, na\u00efve \U0001f40d"))
        == "in 1999, na\u00efve \U0001f40d"
    )
    assert len(model.tokenizer.encode("1999")) == 4


@pytest.mark.parametrize(
    ("dcp", "tp"),
    [(1, 1), (4, 1), (2, 3), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 1), (1, 3)))],
)
def test_greedy_tokens_are_those_of_transformers(model: Model, dcp: int, tp: int):
    result = generate.generate(model, PROMPTS, dcp=dcp, tp=tp, kv_dtype="f32", pool_tokens=512)
    for text, case in zip(result.texts, CASES, strict=True):
        assert text.prompt_ids == case["prompt_ids"]
        assert text.token_ids == case["greedy_ids"]
        assert text.text == case["greedy_text"]
        assert [i for i, _ in text.first_logits_top5] == case["first_logits_top5_ids"]
        np.testing.assert_allclose([x for _, x in text.first_logits_top5], case["first_logits_top5"], atol=2e-3)
    # The first text ends with the model's end token, before the others do.
    assert CASES[0]["greedy_ids"][-1] == model.config.end_id
    assert result.stats.decode.tokens == sum(len(case["greedy_ids"]) - 1 for case in CASES)


def test_dense_decoding_is_the_same_model(model: Model):
    texts = dense.decode(model.params, model.config, [c["prompt_ids"] for c in CASES], 48, jnp.dtype(jnp.float32))
    assert [text.token_ids for text in texts] == [case["greedy_ids"] for case in CASES]


def test_the_command_serves_checks_and_takes_waiting_prompts(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    """The README's main job, shortened: bfloat16, four ranks, and fewer lanes than prompts."""
    target = tmp_path / "out.json"
    command = ["--dcp", "4", "--max-new-tokens", "6", "--batch", "2", "--check", "--json", str(target)]
    assert generate.main([*command, *PROMPTS[:3]]) == 0
    found = json.loads(target.read_text())
    assert found[0]["text"].startswith(" Paris.")
    out = capsys.readouterr().out
    assert "check: " in out
    assert check.KV_DTYPES["bf16"].name in out
    assert "running at once      2" in out
