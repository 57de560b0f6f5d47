"""`python -m jkv.plan`: configs of real models, the figures that one counts by hand, and every complaint."""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from jkv import plan
from jkv.model_config import ConfigError, ModelConfig, read_model_config

CONFIGS = pathlib.Path(__file__).parent / "data" / "configs"
MHA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
KIMI = {
    "model_type": "kimi_linear", "num_hidden_layers": 3, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2]},
}  # fmt: skip


def written(tmp_path: pathlib.Path, config: Any) -> pathlib.Path:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def read(tmp_path: pathlib.Path, config: Any) -> ModelConfig:
    return read_model_config(written(tmp_path, config))


def run(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert plan.main(arguments) == 0
    return capsys.readouterr().out


# name, family, dims, layers in the pool of all, bytes of a token in bfloat16 and FP4: half a byte an element, and one
# for every 16
MODELS = [
    ("llama-3-8b", "MHA", (8, 128), 32, 32, 131_072, 36_864),  # 32 x 2 x 8 x 128 x 2
    ("llama-3-70b", "MHA", (8, 128), 80, 80, 327_680, 92_160),
    ("qwen3-8b", "MHA", (8, 128), 36, 36, 147_456, 41_472),
    ("qwen3-30b-a3b", "MHA", (4, 128), 48, 48, 98_304, 27_648),  # head_dim is not 2048 / 32
    ("gpt-oss-20b", "MHA", (8, 64), 12, 24, 24_576, 6_912),
    ("gemma-3-4b", "MHA", (4, 256), 5, 34, 20_480, 5_760),  # heads and head_dim are the defaults of the class
    ("gemma-3-27b", "MHA", (16, 128), 10, 62, 81_920, 23_040),
    ("deepseek-v3", "MLA", (512, 64), 61, 61, 70_272, 19_764),  # 61 x 576 x 2
    ("deepseek-v3.2", "MLA", (512, 64), 61, 61, 70_272, 19_764),
    ("kimi-linear-48b-a3b", "MLA", (512, 64), 7, 27, 8_064, 2_268),  # 7 x 576 x 2
]


@pytest.mark.parametrize(
    ("name", "family", "dims", "held", "layers", "token", "fp4"), MODELS, ids=[m[0] for m in MODELS]
)
def test_a_config_of_a_real_model_is_read(name, family, dims, held, layers, token, fp4):
    model = read_model_config(CONFIGS / f"{name}.json")
    assert (model.family, tuple(model.dims.values()), model.layers) == (family, (*dims, held), layers)
    rows = {row.kv_dtype: row for row in plan.plan(model, 10**9, dcp_sizes=[1, 2])}
    assert rows["bfloat16"].bytes_per_token == rows["bfloat16"].bytes_per_token_on_device == token
    assert rows["float32"].bytes_per_token == 2 * token
    assert rows["float8_e4m3fn"].bytes_per_token == rows["float8_e5m2"].bytes_per_token == token // 2
    assert rows["fp4"].bytes_per_token == fp4
    if family == "MLA":
        assert rows["dsa"].bytes_per_token == held * (512 + 4 * 4 + 2 * 64)  # codes, scales, bfloat16 rope
    fit = rows["bfloat16"].fits[2]
    assert fit.per_rank == (10**9 // (64 * token) - 1) * 64
    assert fit.aggregate == 2 * fit.per_rank


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("llama-3-8b", []),
        ("gpt-oss-20b", ["12 sliding-window layers: .* last 128 tokens"]),
        ("gemma-3-27b", ["52 sliding-window layers: .* last 1024 tokens"]),
        ("deepseek-v3", ["1 multi-token-prediction layer"]),
        ("deepseek-v3.2", ["index: 128 elements a token in each of 61 layers", "1 multi-token-prediction layer"]),
        ("kimi-linear-48b-a3b", ["20 Kimi-delta-attention layers: a recurrent state"]),
    ],
)
def test_what_the_pools_do_not_hold_is_named(name, left_out):
    found = read_model_config(CONFIGS / f"{name}.json").left_out
    assert len(found) == len(left_out)
    assert all(re.search(pattern, text) for pattern, text in zip(left_out, found, strict=True))


def test_the_defaults_are_those_of_transformers(tmp_path):
    assert read(tmp_path, MHA).dims == {"head_num": 4, "head_dim": 8, "layer_num": 2}
    nothing = {"head_dim": None, "num_key_value_heads": None}  # null is as absent
    assert read(tmp_path, MHA | nothing).dims == {"head_num": 4, "head_dim": 8, "layer_num": 2}
    qwen = MHA | {"model_type": "qwen3", "num_hidden_layers": 30}
    assert read(tmp_path, qwen).dims == {"head_num": 4, "head_dim": 128, "layer_num": 30}
    assert read(tmp_path, MHA | {"model_type": "qwen3_moe"}).dims["head_dim"] == 8
    assert read(tmp_path, MHA | {"model_type": "gpt_oss"}).dims == {"head_num": 4, "head_dim": 64, "layer_num": 1}
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 26}
    assert read(tmp_path, gemma).dims == {"head_num": 4, "head_dim": 256, "layer_num": 4}
    assert read(tmp_path, gemma | {"sliding_window_pattern": 2}).dims["layer_num"] == 13
    assert read(tmp_path, gemma | {"_sliding_window_pattern": 3}).dims["layer_num"] == 8


def test_layers_of_qwen3_slide_only_when_they_are_told_to(tmp_path):
    qwen = MHA | {"model_type": "qwen3", "num_hidden_layers": 30, "sliding_window": 4096, "max_window_layers": 20}
    for off in False, None:
        assert read(tmp_path, qwen | {"use_sliding_window": off}).dims["layer_num"] == 30
    slides = read(tmp_path, qwen | {"use_sliding_window": True})
    assert slides.dims["layer_num"] == 20
    assert slides.left_out[0].startswith("10 sliding-window layers: they need the last 4096 tokens")


def test_layer_types_go_before_the_rule_of_the_architecture(tmp_path):
    kinds = ["full_attention", "linear_attention", "chunked_attention"]
    model = read(tmp_path, MHA | {"model_type": "gpt_oss", "num_hidden_layers": 3, "layer_types": kinds})
    assert model.dims["layer_num"] == 1
    assert [text.split(":")[0] for text in model.left_out] == [
        "1 chunked-attention layers",
        "1 linear-attention layers",
    ]


def test_a_folder_stands_for_its_config(tmp_path):
    path = written(tmp_path, MHA)
    assert read_model_config(tmp_path) == read_model_config(str(path)) == read_model_config(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config.json: no JSON: "),
        ("[" * 100_000, "config.json: no JSON: "),
        ("[]", "config.json: expected a JSON object"),
        ({}, "config.json: unknown model_type None; known are deepseek_v3, deepseek_v32, gemma3, .*qwen3_moe$"),
        ({"model_type": ["x"]}, r"unknown model_type \['x'\]"),
        ({"model_type": "mamba"}, "config.json: unknown model_type mamba; known are"),
        ({"model_type": "llama"}, "config.json: no field 'num_hidden_layers'"),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 61}, "config.json: no field 'kv_lora_rank'"),
        ({"model_type": "deepseek_v32"}, "config.json: no field 'index_head_dim'"),
        ({"model_type": "gemma3", "text_config": None}, "config.json: no field 'text_config'"),
        ({"model_type": "gemma3", "text_config": 3}, "config.json: field 'text_config' must be an object"),
        ({"model_type": "gemma3", "text_config": {}}, "config.json: text_config: no field 'num_hidden_layers'"),
        (MHA | {"num_hidden_layers": "two"}, "'num_hidden_layers' must be an integer of at least 1, got 'two'"),
        (MHA | {"num_key_value_heads": 0}, "'num_key_value_heads' must be an integer of at least 1, got 0"),
        (MHA | {"head_dim": True}, "'head_dim' must be an integer of at least 1, got True"),
        (MHA | {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        (MHA | {"num_key_value_heads": 8}, "num_key_value_heads 8 does not divide num_attention_heads 4"),
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 26, "num_attention_heads": 6},
            "num_key_value_heads 4 does not divide num_attention_heads 6",
        ),
        (MHA | {"hidden_size": 33}, "no head_dim, and hidden_size 33 is no multiple of 4 heads"),
        (MHA | {"layer_types": ["full_attention"]}, "layer_types must list a kind for each of 2 layers"),
        (MHA | {"layer_types": ["full_attention", "odd"]}, "layer_types has unknown kinds: odd"),
        (MHA | {"layer_types": ["sliding_attention"] * 2}, "no layer has full attention"),
        (MHA | {"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 9}, "every layer slides"),
        *[
            (
                MHA | {"model_type": model_type, "use_sliding_window": value, "sliding_window": 9},
                f"config.json: field 'use_sliding_window' must be true or false, got {value!r}",
            )
            for model_type in ("qwen3", "qwen3_moe")
            for value in ("false", 0, 1)
        ],
        (KIMI | {"linear_attn_config": None}, "config.json: no field 'linear_attn_config'"),
        (KIMI | {"linear_attn_config": {}}, "linear_attn_config: no field 'full_attn_layers'"),
        (KIMI | {"linear_attn_config": {"full_attn_layers": 3}}, "field 'full_attn_layers' must be a list"),
        (
            KIMI | {"linear_attn_config": {"full_attn_layers": [3], "kda_layers": [0, 1]}},
            "must have each of the layers 1 to 3 once",
        ),
        (
            KIMI | {"linear_attn_config": {"full_attn_layers": [], "kda_layers": [1, 2, 3]}},
            "full_attn_layers is empty",
        ),
    ],
)
def test_a_wrong_config_is_refused_by_file_and_field(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, config)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'config.json'}: No such file")):
        read_model_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("141GB", 141 * 10**9), ("80 GiB", 80 * 2**30), ("1.5kb", 1500), ("512MiB", 2**29), ("3MB", 3_000_000),
        ("1TB", 10**12), ("1_000", 1000), ("7B", 7), ("0.3GB", 300_000_000),
    ],
)  # fmt: skip
def test_sizes_have_decimal_and_binary_units(text, size):
    assert plan.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1.GB", "12 parsecs", "1e9", "1,5GB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match=f"expected a number of bytes such as 141GB.*got {text!r}"):
        plan.parse_size(text)


def test_a_reserve_may_be_a_part_of_the_memory():
    assert (plan.parse_reserve("12.5%", 800), plan.parse_reserve("2KB", 10**6)) == (100, 2000)
    for text in ("%", "x%", "-5%", "101%", "1/0%"):
        with pytest.raises(ValueError, match=f"expected a percentage such as 10%, got '{text}'"):
            plan.parse_reserve(text, 800)


@pytest.mark.parametrize(
    ("text", "sizes"), [("1", [1]), ("8", [1, 2, 4, 8]), ("6", [1, 2, 4, 6]), ("6,1,3", [1, 3, 6])]
)  # fmt: skip
def test_the_numbers_of_ranks(text, sizes):
    assert plan.parse_dcp(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "-2", "1,,2", "two", "1.5"])
def test_other_numbers_of_ranks_are_refused(text):
    with pytest.raises(ValueError, match=f"expected a number of ranks such as 8, or several.*got '{text}'"):
        plan.parse_dcp(text)


def test_the_command_prints_one_table(capsys):
    out = run(
        capsys, "--model", str(CONFIGS / "gpt-oss-20b.json"), "--memory", "141GB", "--weights-bytes", "14GB",
        "--reserve", "10%", "--dcp", "8",
    )  # fmt: skip
    title, left_out, memory, _, _, *lines = out.splitlines()
    assert title.endswith("gpt-oss-20b.json: MHA pools, head_num 8, head_dim 64, 12 of 24 layers")
    assert left_out == "not in the pool: 12 sliding-window layers: they need the last 128 tokens of a sequence only"
    assert memory == "112,900,000,000 of 141,000,000,000 bytes of a device for the pool; page_size 64, tp 1"
    cells = [re.split(r" {2,}", line) for line in lines]
    assert cells[0] == ["KV dtype", "bytes/token", "tokens/rank", "dcp 1", "dcp 2", "dcp 4", "dcp 8"]
    # 112.9e9 // (64 * 24576) = 71779 pages, one of them padding
    ranks = 71_778 * 64
    assert cells[2] == ["bfloat16", "24,576", f"{ranks:,}", *(f"{ranks * dcp:,}" for dcp in (1, 2, 4, 8))]
    assert len({len(line) for line in lines[: len(cells)]}) == 1


def test_the_command_prints_json(capsys):
    model = str(CONFIGS / "llama-3-8b.json")
    arguments = ["--model", model, "--memory", "10GB", "--tp", "2", "--dcp", "2,3", "--page-size", "16", "--json"]
    report = json.loads(run(capsys, *arguments, "--extra-bytes-per-token", "64"))
    assert report["model"] == model
    assert (report["memory_bytes"], report["pool_bytes"], report["page_size"], report["tp"]) == (10**10, 10**10, 16, 2)
    assert report["dims"] == {"head_num": 8, "head_dim": 128, "layer_num": 32}
    assert report["extra_bytes_per_token"] == 64
    row = next(row for row in report["rows"] if row["kv_dtype"] == "bfloat16")
    assert (row["bytes_per_token"], row["bytes_per_token_on_device"]) == (131_072, 65_536)
    assert (row["extra_bytes_per_token"], row["misfits"], row["note"]) == (64, {}, None)
    tokens = (10**10 // (16 * (65_536 + 64)) - 1) * 16
    assert row["fits"]["3"] == {
        "per_rank": tokens, "aggregate": 3 * tokens, "bytes_per_rank": (tokens + 16) * 65_536, "limit": "memory",
    }  # fmt: skip


def test_what_a_token_takes_beside_the_pool_is_in_the_table(tmp_path, capsys):
    arguments = ["--model", str(written(tmp_path, MHA | {"head_dim": 256})), "--memory", "1GB", "--tp", "2"]
    out = run(capsys, *arguments, "--extra-bytes-per-token", "12800")
    tokens = (10**9 // (64 * (4_096 + 12_800)) - 1) * 64  # 2 layers x 2 x 2 heads x 256 x 2 bytes
    assert re.search(rf"^bfloat16 +4,096 \+ 12,800 +{tokens:,} +{tokens:,}$", out, re.MULTILINE)
    assert re.search(r"^bytes/token: on a device \(in the pool \+ beside it\); tokens/rank: ", out, re.MULTILINE)
    for none in ([], ["--extra-bytes-per-token", "0"]):
        out = run(capsys, *arguments, *none)
        assert "bytes/token: on a device; tokens/rank: " in out
        assert re.search(r"^bfloat16 +4,096 +244,032 +244,032$", out, re.MULTILINE)


def test_a_number_of_ranks_that_does_not_fit_leaves_the_others(tmp_path, capsys):
    # 2 pages of 64 on 2**24 ranks are 2**31 ids
    model = str(written(tmp_path, MHA | {"head_dim": 256}))
    arguments = ["--model", model, "--memory", "1GB", "--dcp", "1,2,16777216,33554432"]
    out = run(capsys, *arguments)
    tokens = (10**9 // (64 * 8_192) - 1) * 64
    assert re.search(rf"^bfloat16 +8,192 +{tokens:,} +{tokens:,} +{2 * tokens:,} +- +-$", out, re.MULTILINE)
    notes = [line for line in out.splitlines() if line.startswith("dcp ")]  # once, not once for each KV dtype
    assert [re.match(r"dcp (\d+): SlotSpace: slot ids up to .* do not fit int32", line)[1] for line in notes] == [
        "16777216",
        "33554432",
    ]
    report = json.loads(run(capsys, *arguments, "--json"))
    for row in report["rows"]:
        assert (list(row["fits"]), list(row["misfits"])) == (["1", "2"], ["16777216", "33554432"])
        assert row["note"] is None
    assert plan.main([*arguments[:-1], "16777216,33554432"]) == 1
    assert re.search(r"^bfloat16( +-){4}$", capsys.readouterr().out, re.MULTILINE)


def test_ids_that_end_at_int32_are_marked(capsys):
    out = run(capsys, "--model", str(CONFIGS / "kimi-linear-48b-a3b.json"), "--memory", "141GB", "--dcp", "1,512")
    (line,) = re.findall(r"float8_e5m2.*", out)
    assert re.fullmatch(r"float8_e5m2 +4,032 +34,970,112 +34,970,112 +2,147,4\d\d,\d{3}\*", line)
    assert "* memory holds more; slot ids end at int32, unless x64 is enabled" in out


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (MHA, {"fp4": "head_dim must be"}),
        (
            {"model_type": "deepseek_v3", "num_hidden_layers": 1, "kv_lora_rank": 192, "qk_rope_head_dim": 8},
            {"dsa": "kv_lora_rank must be", "fp4": "qk_rope_head_dim must be"},
        ),
    ],
    ids=["MHA", "MLA"],
)
def test_dimensions_that_a_format_does_not_take_are_a_note(tmp_path, capsys, config, missing):
    out = run(capsys, "--model", str(written(tmp_path, config)), "--memory", "1GB")
    for name, message in missing.items():
        assert re.search(rf"^{name}( +-){{3}}$", out, re.MULTILINE)
        assert re.search(rf"^{name}: .*{message}.* (192|8)$", out, re.MULTILINE)
    assert len(re.findall("^[a-z0-9_]+( +-){3}$", out, re.MULTILINE)) == len(missing)


def test_where_nothing_fits_the_table_says_why(capsys):
    arguments = ["--model", str(CONFIGS / "llama-3-8b.json"), "--memory", "12MB"]
    assert plan.main([*arguments, "--page-size", "32"]) == 0  # float32: 2 pages of 32 x 262,144 bytes
    out = capsys.readouterr().out
    assert re.search(r"^float32( +-){3}$", out, re.MULTILINE)
    assert re.search(r"^bfloat16 +131,072 +32 +32$", out, re.MULTILINE)
    assert "float32: max_tokens: memory_bytes 12000000 hold no token: one page of 32 tokens" in out
    assert plan.main([*arguments, "--page-size", "4096"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "tp 3 does not divide the 8 KV heads: the pools never replicate heads"),
        (["--tp", "0"], "--tp must be positive, got 0"),
        (["--page-size", "0"], "--page-size must be positive, got 0"),
        (["--extra-bytes-per-token", "-1"], "--extra-bytes-per-token must not be negative, got -1"),
        (["--memory", "much"], "expected a number of bytes such as 141GB"),
        (["--reserve", "100%"], "weights and reserve leave nothing of 141,000,000,000 bytes for the pool"),
        (["--dcp", "none"], "expected a number of ranks"),
        (["--model", "nowhere.json"], "nowhere.json: No such file"),
    ],
)
def test_a_wrong_argument_ends_the_command_with_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        plan.main(["--model", str(CONFIGS / "llama-3-8b.json"), "--memory", "141GB", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("python -m jkv.plan: error: ")
    assert message in error


def test_the_command_touches_no_device_and_the_library_does_not_import_it():
    env = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    arguments = ["--model", str(CONFIGS / "deepseek-v3.json"), "--memory", "141GB", "--tp", "3"]
    root = CONFIGS.parent.parent.parent
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "jkv.plan", *arguments]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^bfloat16 +70,272 ", done.stdout, re.MULTILINE)
    code = "import sys, jkv; print('jkv.plan' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_the_help_says_what_each_option_is(capsys):
    with pytest.raises(SystemExit, match="0"):
        plan.main(["--help"])
    out = capsys.readouterr().out
    for option in ("--model", "--memory", "--weights-bytes", "--reserve", "--dcp", "--tp", "--page-size", "--json"):
        assert re.search(rf"^  {option}\b.*", out, re.MULTILINE)


def test_the_readmes_table_is_what_the_command_says():
    readme = (CONFIGS.parent.parent.parent / "README.md").read_text()
    section = re.search(r"^## How many tokens fit$(.*?)^## ", readme, re.MULTILINE | re.DOTALL)[1]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*", section, re.MULTILINE)
    ]
    free = 141 * 10**9 - plan.parse_reserve("60%", 141 * 10**9)
    models = [cell.removesuffix(", dcp 1").lower() for cell in lines[0][1::2]]
    assert models == ["llama-3-8b", "llama-3-70b", "deepseek-v3"]
    rows = [plan.plan(read_model_config(CONFIGS / f"{name}.json"), free, dcp_sizes=[1, 8]) for name in models]
    by_dtype = [{row.kv_dtype: [f"{row.fits[dcp].aggregate:,}" for dcp in (1, 8)] for row in part} for part in rows]
    for dtype, *cells in lines[2:]:
        for name in ("float8_e4m3fn", "float8_e5m2") if dtype == "float8 (e4m3fn, e5m2)" else (dtype,):
            assert cells == [cell for part in by_dtype for cell in part.get(name, ["-", "-"])]
    assert len(lines) - 2 == len(set().union(*by_dtype)) - 1
