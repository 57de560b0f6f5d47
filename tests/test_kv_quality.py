"""`benchmarks.kv_quality` on a tiny model: against dense attention over rows that are rounded without a pool."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kv_quality
from benchmarks.kv_quality import Format
from examples import dense, kv, llama
from examples.models import MODELS, Model

IDS = [int(x) for x in np.random.default_rng(2).integers(3, 259, 41)]
FORMATS = (
    Format("first", "f32"),
    Format("bf16", "bf16"),
    Format("fp8", "fp8_e4m3"),
    Format("calibrated", "fp8_e4m3", calibrated=True),
    Format("fp4", "fp4"),
    Format("fp4 keys", "fp4", "f32"),
    Format("fp4 values", "f32", "fp4"),
)


@pytest.fixture(scope="module")
def model() -> Model:
    return MODELS["tiny"]()


def create(name: str):
    return kv.mha_pool(name, size=48, page_size=1, head_num=6, head_dim=16, layer_num=3, stacked=True)


def logits_of(model: Model, keys: str, values: str) -> np.ndarray:
    """[40, vocabulary] from a single pass, the rows rounded by `examples.dense`."""

    def attend(layer, q, k, v, state):
        k, v = dense.round_to(k[0], kv.KV_DTYPES[keys]), dense.round_to(v[0], kv.KV_DTYPES[values])
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("thd,shd->hts", q[0], k, precision="highest") / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(np.tri(len(k), dtype=bool), scores, -jnp.inf))
        return jnp.einsum("hts,shd->thd", weights, v, precision="highest")[None], state

    tokens, start = np.array([IDS[:-1]], np.int32), np.zeros(1, np.int32)
    run = jax.jit(lambda p: llama.forward(p, model.config, tokens, start, start, (), attend, every=True)[0])
    return np.asarray(run(model.params))[0]


def nll_of(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(40), IDS[1:]]


def test_a_pools_quality_is_that_of_its_rounded_rows(model: Model):
    step = kv_quality.llama_step(model.params, model.config, 48)
    scales = kv_quality.calibrate(step, create, IDS[5:25])
    found = {q.title: q for q in kv_quality.measure(step, create, IDS, FORMATS, chunk=20, scales=scales)}
    first = logits_of(model, "f32", "f32")
    for some in FORMATS:
        quality = found[some.title]
        assert quality.tokens == 40
        if some.calibrated:
            continue
        logits = logits_of(model, some.keys, some.values or some.keys)
        delta = nll_of(logits) - nll_of(first)
        assert quality.perplexity == pytest.approx(math.exp(nll_of(logits).mean()), rel=1e-3)
        assert quality.difference == pytest.approx(quality.perplexity - found["first"].perplexity)
        assert quality.error == pytest.approx(quality.perplexity * delta.std() / math.sqrt(40), rel=0.05, abs=1e-5)
        assert quality.greedy == pytest.approx((logits.argmax(-1) == first.argmax(-1)).mean(), abs=0.03)
        assert quality.worst == pytest.approx(np.abs(logits - first).max(), rel=0.05, abs=1e-3)
    # What is not rounded is the reference itself; less precise rows are farther from it.
    assert (found["first"].difference, found["first"].error, found["first"].worst) == (0, 0, 0)
    assert found["bf16"].worst < found["fp8"].worst < found["fp4"].worst
    assert found["calibrated"].worst not in (found["fp8"].worst, found["first"].worst)
    assert [found[f.title].bytes_per_token for f in FORMATS] == [2304, 1152, 576, 576, 324, 1314, 1314]


def test_scales_bring_the_largest_row_to_the_largest_number(model: Model):
    step = kv_quality.llama_step(model.params, model.config, 48)
    scales = kv_quality.calibrate(step, create, IDS)
    pools, _ = step((create("f32"),), np.array(IDS, np.int32), np.int32(0), None)
    for layer in range(3):
        for x, rows in zip("kv", pools[0].get_kv(layer, np.arange(1, 42)), strict=True):
            amax = float(jnp.abs(rows).max())
            assert float(scales["fp8_e4m3"][x][layer]) * 448 == pytest.approx(amax, rel=1e-6)
            assert float(scales["fp8_e5m2"][x][layer]) * 57344 == pytest.approx(amax, rel=1e-6)


def test_the_latent_table_orders_the_formats():
    found, deviation = kv_quality.of_deepseek(16)
    worst = {q.title: q.worst / deviation for q in found}
    assert worst["float32"] == 0
    assert 0 < worst["bfloat16"] < worst["float8_e4m3fn"] < worst["float8_e5m2"] < worst["FP4"] < 5
    assert worst["bfloat16"] < worst["DSA"] < worst["float8_e5m2"]
    assert {q.title: q.bytes_per_token for q in found}["DSA"] == 4 * 656


@pytest.mark.slow
@pytest.mark.real_model
def test_the_command_measures_the_real_model(tmp_path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "out.json"
    kv_quality.main(["--tokens", "9", "--json", str(target)])
    out = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct, 8 tokens" in out
    rows = json.loads(target.read_text())["measurements"]
    assert [row["title"] for row in rows] == [f.title for f in kv_quality.MHA_FORMATS + kv_quality.MLA_FORMATS]
    assert rows[0]["worst"] == 0 < rows[1]["worst"] < 1
    text = (kv_quality.DATA / kv_quality.TEXT).read_text()
    assert len(MODELS["smollm2"]().tokenizer.encode(text)) > 1000


def test_a_text_of_one_token_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        kv_quality.main(["--tokens", "1"])
    assert "--tokens must be at least 2, got 1" in capsys.readouterr().err
