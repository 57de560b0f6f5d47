"""KV dtypes of the examples: their names, what they store, and that a cached prefix changes no text."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from examples import dense, generate, kv, mla
from examples.deepseek import DeepSeekConfig, load_params, param_shapes
from examples.engine import Request
from examples.mesh import UsageError, make_mesh
from examples.models import MODELS, Model
from examples.sharing import SharingEngine
from examples.striped import Batch, Server, serve_deepseek, serve_llama

DEEPSEEK = DeepSeekConfig(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=3, q_lora_rank=12, kv_lora_rank=128,
    qk_nope_head_dim=8, qk_rope_head_dim=16, v_head_dim=6, rms_norm_eps=1e-6, max_position_embeddings=128,
    eos_token_id=1, rope_theta=1e4,
)  # fmt: skip
PROMPTS = [[7, 30, 2, 11], [int(x) for x in np.random.default_rng(5).integers(2, 40, 33)]]


@pytest.fixture(scope="module")
def model() -> Model:
    return MODELS["tiny"]()


@functools.cache
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = param_shapes(DEEPSEEK, 24)
    return {
        name: (rng.standard_normal(s) * (1.5 * s[-1] ** -0.5 if len(s) > 1 else 0.3) + (len(s) == 1)).astype(np.float32)
        for name, s in shapes.items()
    }


def test_full_names_of_dtypes_are_names_too():
    names = "float32 bfloat16 float16 float8_e4m3fn fp8 float8_e5m2 float4_e2m1fn fp4 dsa int8"
    found = [kv.canonical(name) for name in names.split()]
    assert found == ["f32", "bf16", "f16", "fp8_e4m3", "fp8_e4m3", "fp8_e5m2", "fp4", "fp4", "dsa", "int8"]
    pool = kv.mha_pool("float16", size=8, page_size=4, head_num=2, head_dim=16, layer_num=1)
    assert (type(pool), pool.dtype) == (jkv.MHATokenToKVPool, jnp.float16)
    with pytest.raises(UsageError, match=r"unknown KV dtype 'dsa'; there are bf16, f32, f16, fp8_e4m3, fp8_e5m2, fp4"):
        kv.mha_pool("dsa")
    with pytest.raises(UsageError, match=r"unknown KV dtype 'int8'; there are .*, fp4, dsa"):
        kv.mla_pool("int8")


def test_the_command_takes_a_full_name_and_checks_fp4(model: Model, capsys: pytest.CaptureFixture[str]):
    command = ["--model", "tiny", "--dcp", "2", "--tp", "3", "--kv-dtype", "float4_e2m1fn", "--max-new-tokens", "5"]
    assert generate.main([*command, "--check", "hello", "wor\nld"]) == 0
    out = capsys.readouterr().out
    # 4 bits an element and 8 bits a block of 16: 9 bytes a head, for K and V of 6 heads and 3 layers.
    assert f"{2 * 9 * 6 * 3 * (2048 + 32) / 2**20:.1f} MiB as MHA-FP4" in out
    assert "check: every token is the same" in out or "check: NEAR TIES ONLY" in out


def test_dense_rows_are_rounded_to_what_an_fp4_pool_keeps():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 2, 32)).astype(np.float32) * np.float32(2) ** rng.integers(-40, 20, (64, 2, 1))
    x[:2, 0, :16] = 0  # a zero block, and one with every border
    x[1, 0, :8] = [6, 0.25, 0.75, -1.25, 1.75, 2.5, 3.5, -5]
    x = x.astype(np.float32)
    ours = dense.round_to(jnp.asarray(x), jnp.float4_e2m1fn)
    np.testing.assert_array_equal(ours, jkv.quant.fp4_decode(*jkv.quant.fp4_encode(x), dtype=jnp.float32))
    np.testing.assert_array_equal(ours[1, 0, :8], [6, 0.5, 1, -1.5, 2, 3, 4, -6])


@pytest.mark.parametrize(("kv_dtype", "dcp"), [("fp4", 1), ("fp4", 4), ("fp8_e4m3", 4)])
def test_a_cached_prefix_changes_no_token(model: Model, kv_dtype: str, dcp: int):
    """Whatever the chunks: rows of the same step are read back from the pool too, as rounded as cached ones."""
    prompt = model.tokenizer.encode("a prefix that is cached in whole pages, and what follows it")
    options = {"capacity": 160, "page_size": 16 // dcp}
    cold = {}
    for chunk in (16, 64):
        steps: dict = {}
        for name, prompts in {"cold": [prompt], "warm": [prompt[:40], prompt]}.items():
            server = serve_llama(model.config, model.params, make_mesh(dcp, 1), kv_dtype=kv_dtype, **options)
            engine = SharingEngine(server, prompts, 6, lanes=1)
            engine.chunk, engine.steps = chunk, steps
            request = engine.run()[0][-1]
            assert engine.hit_tokens == (32 if name == "warm" else 0)
            cold.setdefault(chunk, request)
            assert request.token_ids == cold[16].token_ids
            # By page a token stands in the same place of the same program; in one chunk of all it does not.
            atol = 0 if chunk == 16 else 1e-4
            np.testing.assert_allclose(request.first_logits, cold[chunk].first_logits, rtol=0, atol=atol)
    plain = dense.decode(model.params, model.config, [prompt], 1, jnp.dtype(jnp.float32))[0].logits[0]
    assert np.abs(cold[16].first_logits - plain).max() > 1e-2  # rounding is not nothing


def temporaries(server: Server, tokens: int) -> int:
    """Temporary bytes of a step of two lanes, one new token each."""
    lanes = np.zeros(2, np.int32)
    batch = Batch(lanes[:, None], lanes, lanes + 1, lanes[:, None], np.zeros((2, tokens), np.int32))
    with jkv.enable_checks(False):
        analysis = server.step.lower(server.params, server.pool, batch).compile().memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("kv_dtype", ["fp4", "dsa"])
def test_a_step_costs_what_its_rows_cost_not_what_the_pool_does(model: Model, kv_dtype: str):
    def serve(capacity: int) -> Server:
        sizes = {"kv_dtype": kv_dtype, "capacity": capacity, "page_size": 16}
        if kv_dtype == "dsa":
            return serve_deepseek(DEEPSEEK, load_params(weights(), DEEPSEEK), make_mesh(2, 1), **sizes)
        return serve_llama(model.config, model.params, make_mesh(2, 1), **sizes)

    small, large = (temporaries(serve(capacity), 64) for capacity in (128, 1 << 16))
    assert small == large


@functools.cache
def served(kv_dtype: str, dcp: int) -> list[Request]:
    return mla.generate(
        DEEPSEEK, weights(), PROMPTS, dcp=dcp, kv_dtype=kv_dtype, max_new_tokens=4, page_size=4, pool_tokens=96
    )[0]


@pytest.mark.parametrize(("kv_dtype", "least", "most"), [("fp4", 0.02, 2), ("dsa", 2e-3, 1)])
def test_quantised_latents_change_logits_and_stripes_do_not(kv_dtype: str, least: float, most: float):
    for striped, alone, plain in zip(served(kv_dtype, 4), served(kv_dtype, 1), served("f32", 1), strict=True):
        assert least < np.abs(alone.first_logits - plain.first_logits).max() < most
        np.testing.assert_allclose(striped.first_logits, alone.first_logits, atol=0.05)
        assert striped.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("kv_dtype", "change", "message"),
    [
        ("dsa", {"kv_lora_rank": 64}, "with KV dtype dsa: DSATokenToKVPool: kv_lora_rank must be a multiple of 128"),
        ("fp4", {"qk_rope_head_dim": 8}, "fp4: MLATokenToKVPoolFP4: qk_rope_head_dim must be a multiple of 16"),
    ],
)
def test_dimensions_that_a_format_cannot_have_are_said(kv_dtype: str, change: dict, message: str):
    config = DeepSeekConfig(**(vars(DEEPSEEK) | change))
    with pytest.raises(UsageError, match=message):
        serve_deepseek(config, {}, make_mesh(1, 1), kv_dtype=kv_dtype, capacity=16, page_size=4)
