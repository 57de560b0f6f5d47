"""The served path of the examples on a tiny model: pool, stripes, lanes and checks against dense decoding."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from examples import check, dense, generate
from examples.engine import MAX_CHUNK, Engine
from examples.kv import KV_DTYPES
from examples.mesh import make_mesh
from examples.models import MODELS, Model
from examples.striped import serve_llama

# The second has more tokens than one step takes, the third starts where another has left.
PROMPTS = ["one slot space", "every door of every pool works under DCP; " * 2, "a", "pages are given back"]
NEW = 12


@pytest.fixture(scope="module")
def model() -> Model:
    return MODELS["tiny"]()


@pytest.fixture(scope="module")
def expected(model: Model) -> list[dense.DenseText]:
    ids = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    return dense.decode(model.params, model.config, ids, NEW, jnp.dtype(jnp.float32))


def test_the_prompts_are_what_the_tests_need(model: Model, expected: list[dense.DenseText]):
    lengths = [len(model.tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert lengths[1] > MAX_CHUNK > lengths[0]
    assert len({token for text in expected for token in text.token_ids}) > NEW
    # A gap that float32 sums cannot close.
    assert min(np.diff(np.sort(row)[-2:])[0] for text in expected for row in text.logits) > 1e-3


@pytest.mark.parametrize(("dcp", "tp", "lanes"), [(4, 1, 3), (2, 3, 2)])
def test_a_striped_pool_gives_the_tokens_of_dense_decoding(
    model: Model, expected: list[dense.DenseText], dcp: int, tp: int, lanes: int
):
    prompts = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    # The second request may fill 100 of 128 slots: two others never fit beside it, though there are lanes.
    server = serve_llama(
        model.config, model.params, make_mesh(dcp, tp), kv_dtype="f32", capacity=128, page_size=16 // dcp
    )
    engine = Engine(server, prompts, NEW, lanes)
    requests, stats, _ = engine.run()
    for request, reference in zip(requests, expected, strict=True):
        assert request.token_ids == reference.token_ids
        np.testing.assert_allclose(request.first_logits, reference.logits[0], atol=1e-4)
    assert stats.running == 2
    # Striped evenly: no rank holds more than its share of two requests, each rounded up.
    assert len(stats.rank_rows) == dcp
    assert 88 // dcp <= stats.rank_rows.max() <= 128 // dcp
    # Every page, lane and row came back.
    assert engine.allocator.available_size() == engine.allocator.capacity == 128
    assert engine.table.available_size() == lanes
    assert not engine.table.req_to_token.any()


def test_a_text_ends_with_the_end_token_and_the_lane_is_taken_over(model: Model, expected: list[dense.DenseText]):
    end = expected[0].token_ids[4]
    at = expected[0].token_ids.index(end)
    ending = dataclasses.replace(model, config=dataclasses.replace(model.config, end_id=end))
    seen: list[tuple[int, int, bool]] = []
    result = generate.generate(
        ending, PROMPTS[:1] * 3, kv_dtype="f32", max_new_tokens=NEW, batch=1, page_size=4, pool_tokens=64,
        on_token=lambda *event: seen.append(event),
    )  # fmt: skip
    assert [text.token_ids for text in result.texts] == [expected[0].token_ids[: at + 1]] * 3
    texts = [(i, token, n == at) for i in range(3) for n, token in enumerate(expected[0].token_ids[: at + 1])]
    assert seen == texts
    assert result.stats.decode.steps == 3 * at


def test_a_pool_that_is_taken_from_elsewhere_is_noticed(model: Model):
    server = serve_llama(model.config, model.params, make_mesh(1, 1), kv_dtype="f32", capacity=32, page_size=16)
    engine = Engine(server, [[5]], NEW, 1)
    engine.allocator.alloc(32)
    with pytest.raises(RuntimeError, match="an admitted request ran out of slots or rows"):
        engine.run()


def test_rounded_rows_are_compared_with_rows_rounded_alike(model: Model):
    kv_dtype = "fp8_e4m3"
    result = generate.generate(model, PROMPTS[:1], kv_dtype=kv_dtype, max_new_tokens=NEW, page_size=4, pool_tokens=64)
    ids, tokens = [t.prompt_ids for t in result.texts], [t.token_ids for t in result.texts]
    outcome = check.compare(model, ids, tokens, kv_dtype, NEW)
    assert outcome.passed
    assert f"rounded to {KV_DTYPES[kv_dtype]} as well" in outcome.message
    # And rounding is not nothing.
    plain = dense.decode(model.params, model.config, ids, 1, jnp.dtype(jnp.float32))[0].logits[0]
    top = np.array([logit for _, logit in result.texts[0].first_logits_top5])
    assert np.abs(top - np.sort(plain)[::-1][:5]).max() > 1e-2


def test_rounding_is_to_nearest_even_and_clamps_eight_bit_floats():
    x = jnp.array([1.00390625, 448.0, 465.0, -1e6, jnp.nan], jnp.float32)
    np.testing.assert_array_equal(dense.round_to(x, jnp.float8_e4m3fn), [1, 448, 448, -448, np.nan])
    np.testing.assert_array_equal(dense.round_to(x, jnp.bfloat16)[:3], [1, 448, 464])


def test_check_tells_a_wrong_token_from_a_near_tie(model: Model, expected: list[dense.DenseText]):
    ids = [model.tokenizer.encode(PROMPTS[0])]
    served = list(expected[0].token_ids)
    assert check.compare(model, ids, [served], "f32", NEW).message.startswith(
        f"check: every token is the same: {NEW} of {NEW}"
    )
    order = np.argsort(-expected[0].logits[7])
    wrong = [*served[:7], int(order[-1]), *served[8:]]
    for kv_dtype in ("f32", "bf16"):
        outcome = check.compare(model, ids, [wrong], kv_dtype, NEW)
        assert not outcome.passed
        assert "NOT THE SAME: 7 of 12 tokens" in outcome.message
        assert f"prompt 0 parts at token 7: {served[7]} dense, {order[-1]} from the pool" in outcome.message
    short = check.compare(model, ids, [served[:5]], "f32", NEW)
    assert not short.passed
    assert "5 tokens from the pool, 12 dense" in short.message


def test_check_calls_a_near_tie_by_its_name(model: Model, monkeypatch: pytest.MonkeyPatch):
    logits = np.array([0.0, 1.0, 1.01])
    monkeypatch.setattr(dense, "decode", lambda *args: [dense.DenseText([2], [logits])])
    near = check.compare(model, [[3]], [[1]], "bf16", 1)
    assert near.passed
    assert "NEAR TIES ONLY: 0 of 1" in near.message
    assert "0.0100 apart in the dense logits: a near tie, decided by rounding" in near.message
    assert not check.compare(model, [[3]], [[1]], "f32", 1).passed
    assert not check.compare(model, [[3]], [[0]], "bf16", 1).passed
