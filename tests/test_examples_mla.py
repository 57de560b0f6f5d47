"""Absorbed decoding over a striped MLA pool, against DeepSeek-V3's attention as it is defined, head by head."""

import json
import pathlib

import numpy as np
import pytest

from examples import mla
from examples.deepseek import DeepSeekConfig, load_params, random_weights, read_config
from examples.mesh import UsageError

GOLDEN = pathlib.Path(__file__).parents[2] / "shared" / "golden"
INTERMEDIATE = 24
RAW = {
    "model_type": "deepseek_v3",
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_interleave": True,
}
PROMPTS = [[7, 30, 2, 0, 11], [int(x) for x in np.random.default_rng(5).integers(2, 40, 33)], [39]]
NEW = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DeepSeekConfig:
    path = tmp_path_factory.mktemp("mla") / "config.json"
    path.write_text(json.dumps(RAW))
    return read_config(path)


@pytest.fixture(scope="module")
def weights(config: DeepSeekConfig) -> dict[str, np.ndarray]:
    return random_weights(config, INTERMEDIATE)


def logits_by_definition(weights: dict[str, np.ndarray], c: DeepSeekConfig, ids: list[int]) -> np.ndarray:
    """The last token's logits, in float64: every head's keys and values made from the latent vectors, no cache."""
    w = {name.removesuffix(".weight"): np.asarray(x, np.float64) for name, x in weights.items()}
    length, heads, nope = len(ids), c.num_attention_heads, c.qk_nope_head_dim

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * weight

    def rotate(x):  # as complex numbers
        pairs = x[..., 0::2] + 1j * x[..., 1::2]
        frequency = c.rope_theta ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
        turned = pairs * np.exp(1j * np.arange(length)[:, None, None] * frequency)
        return np.concatenate([turned.real, turned.imag], -1)

    x = w["model.embed_tokens"][ids]
    for layer in (f"model.layers.{i}." for i in range(c.num_hidden_layers)):
        a = layer + "self_attn."
        h = norm(x, w[layer + "input_layernorm"])
        q = (norm(h @ w[a + "q_a_proj"].T, w[a + "q_a_layernorm"]) @ w[a + "q_b_proj"].T).reshape(length, heads, -1)
        compressed = h @ w[a + "kv_a_proj_with_mqa"].T
        latent = norm(compressed[:, : c.kv_lora_rank], w[a + "kv_a_layernorm"])
        key_value = (latent @ w[a + "kv_b_proj"].T).reshape(length, heads, -1)
        rope = np.repeat(rotate(compressed[:, None, c.kv_lora_rank :]), heads, axis=1)
        keys = np.concatenate([key_value[..., :nope], rope], -1)
        queries = np.concatenate([q[..., :nope], rotate(q[..., nope:])], -1)
        scores = np.einsum("thd,shd->hts", queries, keys) * (nope + c.qk_rope_head_dim) ** -0.5
        scores = np.exp(np.where(np.tri(length, dtype=bool), scores, -np.inf))
        mixed = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), key_value[..., nope:])
        x = x + mixed.reshape(length, -1) @ w[a + "o_proj"].T
        h = norm(x, w[layer + "post_attention_layernorm"])
        gate = h @ w[layer + "mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[layer + "mlp.up_proj"].T)) @ w[layer + "mlp.down_proj"].T
    return norm(x[-1], w["model.norm"]) @ w["lm_head"].T


@pytest.fixture(scope="module")
def expected(weights: dict[str, np.ndarray], config: DeepSeekConfig) -> list[list[np.ndarray]]:
    """The logits of each new token of each prompt."""
    texts = []
    for prompt in PROMPTS:
        rows: list[np.ndarray] = []
        while len(rows) < NEW:
            ids = prompt + [int(row.argmax()) for row in rows]
            rows.append(logits_by_definition(weights, config, ids))
        texts.append(rows)
    return texts


@pytest.mark.parametrize("dcp", [1, 4])
def test_absorbed_decoding_over_stripes_is_attention_by_definition(
    dcp: int, weights: dict[str, np.ndarray], config: DeepSeekConfig, expected: list[list[np.ndarray]]
):
    # Two lanes, and pages that a sequence fills and leaves half full.
    requests, stats, pool = mla.generate(
        config, weights, PROMPTS, dcp=dcp, kv_dtype="f32", max_new_tokens=NEW, batch=2, page_size=4, pool_tokens=96
    )
    for request, rows in zip(requests, expected, strict=True):
        np.testing.assert_allclose(request.first_logits, rows[0], atol=1e-4)
        assert request.token_ids == [int(row.argmax()) for row in rows]
        assert min(np.diff(np.sort(row)[-2:])[0] for row in rows) > 1e-3  # else the tokens would prove little
    assert len(stats.rank_rows) == pool.slots.dcp_size == dcp


def test_rows_in_bfloat16_change_logits_but_little(
    weights: dict[str, np.ndarray], config: DeepSeekConfig, expected: list[list[np.ndarray]]
):
    requests, _, pool = mla.generate(
        config, weights, PROMPTS[:1], dcp=2, kv_dtype="bf16", max_new_tokens=1, page_size=4, pool_tokens=32
    )
    assert 1e-4 < np.abs(requests[0].first_logits - expected[0][0]).max() < 5e-2
    assert pool.dtype == "bfloat16"


@pytest.fixture
def files(tmp_path: pathlib.Path, weights: dict[str, np.ndarray]) -> list[str]:
    np.savez(tmp_path / "w.npz", **weights)
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    (tmp_path / "cases.json").write_text(json.dumps([{"ids": PROMPTS[0], "greedy": [1]}, {"ids": PROMPTS[2]}]))
    pairs = {"--weights": "w.npz", "--config": "config.json", "--cases": "cases.json"}
    return [word for option, name in pairs.items() for word in (option, str(tmp_path / name))]


def test_the_command_writes_logits_and_tokens_and_compares(
    files: list[str],
    tmp_path: pathlib.Path,
    weights: dict[str, np.ndarray],
    config: DeepSeekConfig,
    expected: list[list[np.ndarray]],
    capsys: pytest.CaptureFixture[str],
):
    options = ["--dcp", "2", "--kv-dtype", "f32", "--max-new-tokens", "3", "--pad-id", "0"]
    assert mla.main([*files, *options, "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert [set(case) for case in found] == [{"last_logits", "greedy"}] * 2
    for case, rows in zip(found, (expected[0], expected[2]), strict=True):
        np.testing.assert_allclose(case["last_logits"], rows[0], atol=1e-4)
    # The padding token counts for the logits, and is not there for the tokens.
    ids = [token for token in PROMPTS[0] if token != 0]
    for token in found[0]["greedy"]:
        assert token == logits_by_definition(weights, config, ids).argmax()
        ids.append(token)
    assert found[1]["greedy"] == [int(row.argmax()) for row in expected[2][:3]]
    out = capsys.readouterr().out
    assert f"[0] 5 tokens -> {found[0]['greedy']}" in out
    assert f"{int(found[0]['greedy'][0] == 1)} of 3 as listed in cases.json" in out
    assert "new tokens           6 in 2 steps" in out


def test_a_tiny_model_needs_no_files(capsys: pytest.CaptureFixture[str]):
    assert mla.main(["--dcp", "2", "--kv-dtype", "dsa", "--max-new-tokens", "2"]) == 0
    assert "[1] 3 tokens -> [" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        mla.main(["--config", "config.json"])
    assert "give --weights, --config and --cases, or none of them" in capsys.readouterr().err


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden DeepSeek-V3 is not beside this checkout")
@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_the_golden_cases(dcp: int, tmp_path: pathlib.Path):
    names = {"--weights": ".npz", "--config": "_config.json", "--cases": "_cases.json"}
    files = [word for option, end in names.items() for word in (option, str(GOLDEN / f"deepseek_v3_tiny{end}"))]
    # The golden tokens are of a `generate` that was given padding id 0, which the second prompt holds.
    command = [*files, "--dcp", str(dcp), "--kv-dtype", "f32", "--json", str(tmp_path / "out.json")]
    assert mla.main(command) == 0
    found, cases = (json.loads(p.read_text()) for p in (tmp_path / "out.json", GOLDEN / "deepseek_v3_tiny_cases.json"))
    for ours, golden in zip(found, cases, strict=True):
        assert ours["greedy"] == golden["greedy"]
        np.testing.assert_allclose(ours["last_logits"], golden["last_logits"], atol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "config.json: model_type is 'llama', this example serves 'deepseek_v3' only"),
        ({"first_k_dense_replace": 1}, "layers without experts is 1, this example serves 2 only"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"q_lora_rank": None, "v_head_dim": None}, "config.json lacks q_lora_rank, v_head_dim"),
    ],
)
def test_a_model_that_the_example_does_not_know_is_refused(
    change: dict, message: str, files: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(json.dumps(RAW | change))
    assert mla.main(files) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ("[", "cases.json is not JSON"),
        ("[]", 'cases.json must hold a list of objects with "ids"'),
        ('[{"greedy": [1]}]', 'cases.json must hold a list of objects with "ids"'),
        ('[{"ids": [3, 40]}]', "prompt 0 has ids outside the vocabulary of 40 tokens"),
        ('[{"ids": []}]', "prompt 0 is empty"),
    ],
)
def test_cases_that_cannot_be_served_are_said(
    cases: str, message: str, files: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "cases.json").write_text(cases)
    assert mla.main(files) == 1
    assert message in capsys.readouterr().err


def test_a_missing_file_is_said(files: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "w.npz").unlink()
    assert mla.main(files) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_missing_weight_is_named(weights: dict[str, np.ndarray], config: DeepSeekConfig):
    some = {name: x for name, x in weights.items() if "1.self_attn.o_proj" not in name}
    with pytest.raises(UsageError, match=r"the weights lack model\.layers\.1\.self_attn\.o_proj\.weight"):
        load_params(some, config)
