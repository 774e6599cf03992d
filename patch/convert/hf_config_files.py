"""What lies beside the weights: config.json, generation_config.json and the tokenizer.

A source's files are kept byte for byte where nothing has changed; otherwise only the changed keys are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from patch.config.hf_config import FAMILIES, read_hf_config
from patch.config.schema import ModelConfig
from patch.data.chat import end_of_turn
from patch.errors import ConfigError, ConversionError
from patch.storage.json_edit import with_values
from patch.storage.names import TRACKER

# ModelConfig's field -> config.json's key, where the value is the same.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
_UNTIED = "untie_embeddings_and_output_weights"
_FAMILY = ("add_qkv_bias", "qk_layernorm", "window_size")
_ROPE = (
    "rotary_base", "use_rope_scaling", "rope_scaling_factor", "rope_low_freq_factor",
    "rope_high_freq_factor", "rope_original_max_position",
)  # fmt: skip


# What describes the model and its tokenizer in a Hugging Face folder; several chat templates have a folder.
_DESCRIPTIONS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_CHAT_TEMPLATES = "additional_chat_templates"


def model_of(folder: Path) -> ModelConfig:
    """The model that a folder's config.json describes.

    Raises:
        ConversionError: there is none, or it is not supported.
    """
    try:
        fields = read_hf_config(folder)
    except ConfigError as error:
        raise ConversionError(str(error)) from error
    return ModelConfig(**fields, seq_length=fields["max_position_embeddings"])


def copy_descriptions(source: Path, target: Path) -> None:
    """Copy configuration, tokenizer and chat templates, and no index of weights."""
    for path in source.iterdir():
        # Mistral's own library asks for a tokenizer.model.v3
        is_description = path.suffix in _DESCRIPTIONS or path.name.startswith("tokenizer.")
        is_other = path.name.endswith(".index.json") or path.name == TRACKER
        if path.is_file() and is_description and not is_other:
            shutil.copyfile(path, target / path.name)
    if (source / _CHAT_TEMPLATES).is_dir():
        shutil.copytree(source / _CHAT_TEMPLATES, target / _CHAT_TEMPLATES, copy_function=shutil.copyfile)


def write_descriptions(
    folder: Path,
    model: ModelConfig,
    hf_source: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
) -> None:
    """Write config.json, generation_config.json and the tokenizer with its chat template.

    Args:
        hf_source: the folder whose files are kept where nothing has changed; None: written anew.
        dtype: of the weights.
    Raises:
        ConversionError: a file of the source cannot be read.
    """
    write_config(folder, model, hf_source, dtype, tokenizer)
    _write_json(folder, "generation_config.json", hf_source, generation_description(hf_source, tokenizer))
    _write_tokenizer(folder, tokenizer)


def write_config(
    folder: Path,
    model: ModelConfig,
    hf_source: Path | None,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write config.json; without a source it needs the tokenizer, for the ids of first and last token."""
    _write_json(folder, "config.json", hf_source, model_description(model, hf_source, tokenizer, dtype))


def write_index(folder: Path, placed: dict[str, str], total_size: int, hf_source: Path | None) -> None:
    """Write the index of several files; the source's own bytes where it says the same.

    Args:
        placed: file name by tensor. total_size: of all tensors, in bytes.
    """
    contents: dict[str, Any] = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(placed.items())),
    }
    if hf_source is not None and (hf_source / SAFE_WEIGHTS_INDEX_NAME).is_file():
        metadata = _read_json(hf_source / SAFE_WEIGHTS_INDEX_NAME).get("metadata") or {}
        contents["metadata"] = metadata | contents["metadata"]
    _write_json(folder, SAFE_WEIGHTS_INDEX_NAME, hf_source, contents)


def _write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save the tokenizer under the class name that transformers 4 and 5 both know, and as it was described.

    transformers 5 writes `TokenizersBackend`, which version 4 (and what is built on it) cannot load, and how
    the tokenizer was loaded here.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    described = _read_json(path)
    for how_loaded in ("is_local", "local_files_only"):
        described.pop(how_loaded, None)
    if described.get("tokenizer_class") == "TokenizersBackend":
        described["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(described, indent=2) + "\n")


def model_description(
    model: ModelConfig, hf_source: Path | None, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype
) -> dict[str, Any]:
    """The contents of config.json.

    It has the keys of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`), which every reader knows:
    transformers 4 and 5, vLLM, llama.cpp's converter. Those of transformers 5 (`rope_parameters`, `dtype`),
    which older ones pass over, stay beside them where the source has them.
    """
    fields = {name: getattr(model, name) for name in (*_KEYS, *_ROPE, *_FAMILY, _UNTIED)}
    described: dict[str, Any] = {}
    changed = set(fields)
    if hf_source is not None:
        described = _read_json(hf_source / "config.json")
        before = read_hf_config(hf_source)
        changed = {name for name in fields if name in before and before[name] != fields[name]}
    if changed & set(_FAMILY):
        _describe_family(described, model)
    if hf_source is None:
        assert tokenizer is not None, "without a source the tokenizer says which tokens begin and end a text"
        described |= {
            "hidden_act": "silu", "initializer_range": model.init_method_std,
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        }  # fmt: skip
    described |= {key: fields[name] for name, key in _KEYS.items() if name in changed}
    if _UNTIED in changed:
        described["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    if changed & set(_ROPE) or "rope_parameters" in described:
        _describe_rope(described, model)
    described["torch_dtype"] = str(dtype).removeprefix("torch.")
    if "dtype" in described:
        described["dtype"] = described["torch_dtype"]
    return described


def family_of(model: ModelConfig) -> str:
    """The `model_type` whose code in transformers computes this model.

    Raises:
        ConversionError: none does.
    """
    if model.qk_layernorm and model.add_qkv_bias:
        raise ConversionError(
            "no model of transformers has biases on q, k, v and norms of their heads: leave out one of "
            "--add-qkv-bias and --qk-layernorm"
        )
    if model.qk_layernorm:
        return "qwen3"
    return "qwen2" if model.add_qkv_bias else "llama" if model.window_size is None else "mistral"


def _describe_family(described: dict[str, Any], model: ModelConfig) -> None:
    """Set the keys that say which family it is, and its window; a Mistral without a window stays one."""
    model_type = family_of(model)
    if model_type == "llama" and described.get("model_type") == "mistral":
        model_type = "mistral"
    window = None if model.window_size is None else model.window_size[0] + 1
    described |= {"architectures": [FAMILIES[model_type].architecture], "model_type": model_type}
    described.pop("layer_types", None)  # what transformers 5 derives from the window
    if model_type == "llama":
        described |= {"attention_bias": False, "mlp_bias": False}
    else:
        described["sliding_window"] = window
    if model_type.startswith("qwen"):
        described |= {"use_sliding_window": window is not None, "max_window_layers": 0 if window else 28}


def _describe_rope(described: dict[str, Any], model: ModelConfig) -> None:
    """Set RoPE's keys of transformers 4, and that of transformers 5 where it is there."""
    scaling = None
    if model.use_rope_scaling:
        scaling = {
            "rope_type": "llama3", "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_low_freq_factor, "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_max_position,
        }  # fmt: skip
    described |= {"rope_theta": model.rotary_base, "rope_scaling": scaling}
    if "rope_parameters" in described:
        described["rope_parameters"] = {
            **(scaling or {"rope_type": "default"}), "rope_theta": model.rotary_base
        }  # fmt: skip


def generation_description(hf_source: Path | None, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The contents of generation_config.json.

    A chat model ends its turn with the token that its chat template puts there (LLaMA-3's <|eot_id|>,
    ChatML's <|im_end|>), at which a base model's generation_config.json does not stop; so it is added.
    """
    if hf_source is not None and (hf_source / "generation_config.json").is_file():
        described = _read_json(hf_source / "generation_config.json")
    else:
        described = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    ends = described.get("eos_token_id")
    ends = list(ends) if isinstance(ends, list) else [] if ends is None else [ends]
    end = end_of_turn(tokenizer)
    if end is not None and end not in ends:
        described["eos_token_id"] = [*ends, end] if ends else end
    return described


def _read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_bytes().decode())
    except (OSError, ValueError) as error:
        raise ConversionError(f"cannot read {path}: {error}") from error
    if not isinstance(contents, dict):
        raise ConversionError(f"{path} holds a JSON {type(contents).__name__}, expected an object")
    return contents


def _write_json(folder: Path, name: str, hf_source: Path | None, contents: dict[str, Any]) -> None:
    """Write `contents`; the source's own bytes but for the values that differ."""
    source = hf_source / name if hf_source is not None else None
    if source is not None and source.is_file():
        text = with_values(source.read_bytes().decode(), contents)
    else:
        text = json.dumps(contents, indent=2) + "\n"
    (folder / name).write_bytes(text.encode())
