"""What a model's Hugging Face `config.json` says of its KV cache; names and defaults as in transformers."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

# Kinds of layers that are not in these pools, by their names in `layer_types`.
_NOT_HELD = {
    "sliding_attention": "sliding-window layers: they need the last {window} tokens of a sequence only",
    "chunked_attention": "chunked-attention layers: they need one chunk of a sequence only",
    "linear_attention": "linear-attention layers: a recurrent state a sequence, of one size at any length",
}
_PATTERN_OF_GEMMA3 = 6
_DEFAULTS_OF_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
_DEFAULTS_OF_GPT_OSS = {"head_dim": 64, "sliding_window": 128}
_DEFAULTS_OF_QWEN3 = {"head_dim": 128}


class ConfigError(ValueError):
    """A config that cannot be read, lacks a field, contradicts itself, or is of an unknown architecture."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The KV cache of a model.

    Args:
      family: "MHA" or "MLA": which pools hold it.
      dims: the dimensions as options of their `create`: `head_num`, `head_dim` or `kv_lora_rank`, `qk_rope_head_dim`,
        and `layer_num`, the layers that the pools hold.
      layers: all layers of the model.
      left_out: what the model keeps beside these pools, and why, a sentence each.
    """

    family: str
    dims: dict[str, int]
    layers: int
    left_out: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Fields:
    """The fields of one JSON object, with errors that name field and file. A null field is a missing one."""

    values: Mapping[str, Any]
    where: str
    defaults: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.where}: {message}")

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        value = self.defaults.get(name) if value is None else value
        return default if value is None else value

    def number(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(name, default)
        if value is None:
            raise self.error(f"no field {name!r}")
        if type(value) is not int or value < least:
            raise self.error(f"field {name!r} must be an integer of at least {least}, got {value!r}")
        return value

    def slides(self) -> bool:
        on = self.get("use_sliding_window", False)
        if type(on) is not bool:
            raise self.error(f"field 'use_sliding_window' must be true or false, got {on!r}")
        return on and self.get("sliding_window") is not None

    def part(self, name: str) -> "_Fields":
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise self.error(f"no field {name!r}" if value is None else f"field {name!r} must be an object")
        return _Fields(value, f"{self.where}: {name}")

    def with_defaults(self, defaults: Mapping[str, int]) -> "_Fields":
        return dataclasses.replace(self, defaults=defaults)


def _mha(fields: _Fields, layer_types: list[str] | None = None) -> ModelConfig:
    """Heads of K and V; of `layer_types` (from the field, or these) the full-attention layers are held."""
    layers = fields.number("num_hidden_layers")
    heads = fields.number("num_attention_heads")
    head_dim = fields.get("head_dim")
    if head_dim is None:
        head_dim, rest = divmod(fields.number("hidden_size"), heads)
        if rest:
            raise fields.error(
                f"no head_dim, and hidden_size {fields.get('hidden_size')} is no multiple of {heads} heads"
            )
    else:
        head_dim = fields.number("head_dim")
    kinds = fields.get("layer_types", layer_types or ["full_attention"] * layers)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error(f"layer_types must list a kind for each of {layers} layers")
    unknown = {str(kind) for kind in kinds} - {"full_attention", *_NOT_HELD}
    if unknown:
        raise fields.error(f"layer_types has unknown kinds: {', '.join(sorted(unknown))}")
    held = kinds.count("full_attention")
    if not held:
        raise fields.error("no layer has full attention: these pools would hold nothing")
    left_out = [
        f"{kinds.count(kind)} {why.format(window=fields.get('sliding_window', 'few'))}"
        for kind, why in _NOT_HELD.items()
        if kind in kinds
    ]
    kv_heads = fields.number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    dims = {"head_num": kv_heads, "head_dim": head_dim, "layer_num": held}
    return ModelConfig("MHA", dims, layers, tuple(left_out))


def _qwen3(fields: _Fields) -> ModelConfig:
    slides = fields.slides()
    layers, first = fields.number("num_hidden_layers"), fields.number("max_window_layers", 28, least=0)
    return _mha(
        fields.with_defaults(_DEFAULTS_OF_QWEN3),
        ["sliding_attention" if slides and i >= first else "full_attention" for i in range(layers)],
    )


def _qwen3_moe(fields: _Fields) -> ModelConfig:
    if fields.slides():
        raise fields.error("use_sliding_window is set: every layer slides, and these pools would hold nothing")
    return _mha(fields)


def _gpt_oss(fields: _Fields) -> ModelConfig:
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(fields.number("num_hidden_layers"))]
    return _mha(fields.with_defaults(_DEFAULTS_OF_GPT_OSS), kinds)


def _gemma3(fields: _Fields) -> ModelConfig:
    if "text_config" in fields.values:  # with a vision tower
        fields = fields.part("text_config")
    pattern = fields.number("sliding_window_pattern", fields.number("_sliding_window_pattern", _PATTERN_OF_GEMMA3))
    layers = range(fields.number("num_hidden_layers"))
    kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in layers]
    return _mha(fields.with_defaults(_DEFAULTS_OF_GEMMA3), kinds)


def _mla(fields: _Fields, held: int | None = None, left_out: tuple[str, ...] = ()) -> ModelConfig:
    """Latent rows of `held` layers, or of all."""
    layers = fields.number("num_hidden_layers")
    dims = {name: fields.number(name) for name in ("kv_lora_rank", "qk_rope_head_dim")}
    dims["layer_num"] = layers if held is None else held
    predicting = fields.number("num_nextn_predict_layers", 0, least=0)
    if predicting:
        left_out += (f"{predicting} multi-token-prediction layer(s): only a speculative decoder keeps their rows",)
    return ModelConfig("MLA", dims, layers, left_out)


def _deepseek_v32(fields: _Fields) -> ModelConfig:
    keys = f"{fields.number('index_head_dim')} elements a token in each of {fields.number('num_hidden_layers')} layers"
    return _mla(fields, left_out=(f"the keys of the sparse-attention index: {keys}",))


def _kimi_linear(fields: _Fields) -> ModelConfig:
    linear = fields.part("linear_attn_config")
    layers = fields.number("num_hidden_layers")
    numbers = [linear.get(name) for name in ("full_attn_layers", "kda_layers")]
    for name, value in zip(("full_attn_layers", "kda_layers"), numbers, strict=True):
        if not isinstance(value, list):
            raise linear.error(f"no field {name!r}" if value is None else f"field {name!r} must be a list")
    full, kda = numbers
    if sorted(full + kda, key=str) != sorted(range(1, layers + 1), key=str):
        raise linear.error(f"full_attn_layers and kda_layers must have each of the layers 1 to {layers} once")
    if not full:
        raise linear.error("full_attn_layers is empty: these pools would hold nothing")
    state = f"{len(kda)} Kimi-delta-attention layers: a recurrent state a sequence, of one size at any length"
    return _mla(fields, len(full), (state,) if kda else ())


_READERS: dict[str, Callable[[_Fields], ModelConfig]] = {
    "deepseek_v3": _mla,
    "deepseek_v32": _deepseek_v32,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "kimi_linear": _kimi_linear,
    "llama": _mha,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}


def read_model_config(path: str | pathlib.Path) -> ModelConfig:
    """Reads a `config.json`, or the one in a folder.

    Raises:
      ConfigError: no such file, no JSON object, an unknown `model_type`, a field that is missing, no number or
        boolean where one is due, heads that do not divide, or layers that contradict each other; with the file's name.
    """
    path = pathlib.Path(path)
    try:
        path = path / "config.json" if path.is_dir() else path
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    fields = _Fields(values, str(path))
    model_type = str(fields.get("model_type"))
    if model_type not in _READERS:
        raise fields.error(f"unknown model_type {model_type}; known are {', '.join(_READERS)}")
    return _READERS[model_type](fields)
