"""ModelConfig's fields from a Hugging Face config.json of transformers 4 or 5.

transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 one `rope_parameters` with both.
What the model here cannot compute is refused by name; what is absent has the default of the family's own
configuration class in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from patch.config.fields import to_float, to_int
from patch.errors import ConfigError
from patch.storage.names import TRACKER
from patch.storage.text_files import read_text


class Family(NamedTuple):
    """One `model_type`: what its configuration class and its code decide beside config.json."""

    architecture: str
    """The class in transformers, as config.json's `architectures` spells it."""
    defaults: Mapping[str, Any]
    """Values of keys that are absent, where they are not LlamaConfig's."""
    fields: Mapping[str, Any]
    """ModelConfig's fields that every model of this type has."""


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", {"max_position_embeddings": 2048}, {}),
    "mistral": Family(
        "MistralForCausalLM",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        {},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
        {"add_qkv_bias": True},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
        },
        {"qk_layernorm": True},
    ),
}
"""A new family is one entry here."""

_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Keys with the one value that is supported; all may be absent."""

_LLAMA3_ROPE: dict[str, str] = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_position",
}


def has_hf_config(path: str | Path) -> bool:
    """Whether a config.json describes the weights in this folder."""
    return (Path(path) / "config.json").is_file()


def is_hf_folder(path: str | Path) -> bool:
    """Whether this is a Hugging Face model folder, and not a checkpoint converted from one."""
    return has_hf_config(path) and not (Path(path) / TRACKER).is_file()


class _Reader:
    """The parsed config.json; every complaint names the file and the key."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values

    def refuse(self, key: str, got: object, expected: str) -> NoReturn:
        raise ConfigError(f"{self.file}: {key}: got {got!r}, expected {expected}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        number = to_int(default if value is None else value)
        if number is None:
            self.refuse(key, value, "a whole number")
        return number

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        number = to_float(default if value is None else value)
        if number is None:
            self.refuse(key, value, "a finite number")
        return number


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(read_text(file))
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read: {error.strerror}; expected a Hugging Face folder"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: malformed JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: got a JSON {type(values).__name__}, expected an object")
    return values


def _family(reader: _Reader) -> Family:
    model_type = reader.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        reader.refuse("model_type", model_type, f"one of {', '.join(FAMILIES)}: no other is supported")
    return FAMILIES[model_type]


def _refuse_unsupported(reader: _Reader) -> None:
    for key, only in _ONLY.items():
        got = reader.values.get(key, only)
        if got != only:
            reader.refuse(key, got, f"{only!r}: nothing else is supported")


def _window(reader: _Reader) -> tuple[int, int] | None:
    """The window of all layers; Hugging Face's window counts the token itself.

    Mistral slides in every layer, Qwen only where `use_sliding_window` says so, LLaMA never.
    """
    window = reader.values.get("sliding_window")
    is_qwen = reader.values["model_type"].startswith("qwen")
    if window is None or reader.values["model_type"] == "llama" or (is_qwen and not _slides(reader)):
        return None
    if reader.integer("sliding_window") < 1:
        reader.refuse("sliding_window", window, "at least 1")
    return reader.integer("sliding_window") - 1, 0


def _slides(reader: _Reader) -> bool:
    """Whether Qwen's layers have a sliding window: all of them or none."""
    if not reader.values.get("use_sliding_window", False):
        return False
    layers = reader.integer("num_hidden_layers")
    full = min(reader.integer("max_window_layers", 28), layers)
    kinds = reader.values.get("layer_types") or ["full"] * full + ["sliding_attention"] * (layers - full)
    if len(set(kinds)) > 1:
        key = "layer_types" if reader.values.get("layer_types") else "max_window_layers"
        reader.refuse(key, reader.values.get(key), "the same attention in all layers")
    return kinds[0] == "sliding_attention"


def _rope(reader: _Reader) -> dict[str, Any]:
    """RoPE in either spelling, as transformers 5 where both disagree; `rope_type` was once called `type`."""
    rope = reader.values.get("rope_scaling") or reader.values.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        reader.refuse("rope_parameters", rope, "an object for all layers alike")
    inner = _Reader(reader.file, rope)
    base = inner.number("rope_theta", reader.number("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        reader.refuse("rope_type", rope_type, "default or llama3: no other scaling is supported")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        reader.refuse("partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
    shape: dict[str, Any] = {"rotary_base": base, "use_rope_scaling": rope_type == "llama3"}
    if rope_type == "llama3":
        for key, field in _LLAMA3_ROPE.items():
            shape[field] = inner.number(key)
        shape["rope_original_max_position"] = inner.integer("original_max_position_embeddings")
    return shape


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """ModelConfig's fields that `folder`/config.json decides.

    Raises:
        ConfigError: unreadable or malformed (names the file), or a model that is none of FAMILIES or has
            what they do not support (names the key): biases of the attention's output or the MLP, another
            activation, RoPE types other than default and llama3, windows in some layers only.
    """
    file = Path(folder) / "config.json"
    reader = _Reader(file, _read_json(file))
    family = _family(reader)
    reader.values = {**family.defaults, **reader.values}
    _refuse_unsupported(reader)
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if heads < 1:
        reader.refuse("num_attention_heads", heads, "at least 1")
    return {
        "num_layers": reader.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": reader.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": reader.integer("num_key_value_heads", heads),
        "kv_channels": reader.integer("head_dim", hidden // heads),
        "vocab_size": reader.integer("vocab_size"),
        "max_position_embeddings": reader.integer("max_position_embeddings"),
        "norm_epsilon": reader.number("rms_norm_eps", 1e-6),
        "untie_embeddings_and_output_weights": not reader.values.get("tie_word_embeddings", False),
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "window_size": _window(reader),
        **family.fields,
        **_rope(reader),
    }
