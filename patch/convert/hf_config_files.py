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

from patch.config.hf_config import read_hf_config
from patch.config.presets import SHAPE_FIELDS
from patch.config.schema import ModelConfig
from patch.data.chat import end_of_turn
from patch.errors import ConfigError, ConversionError
from patch.families import TYPE_FIELDS, Family, family_of
from patch.storage.json_edit import with_values
from patch.storage.names import TRACKER

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
    described: dict[str, Any] = {}
    changed = SHAPE_FIELDS
    if hf_source is not None:
        described = _read_json(hf_source / "config.json")
        before = read_hf_config(hf_source)
        changed = frozenset(name for name in before if before[name] != getattr(model, name))
    family = transformers_family(model, described.get("model_type"))
    if changed & TYPE_FIELDS:
        family.write_type(described, model)
    if hf_source is None:
        assert tokenizer is not None, "without a source the tokenizer says which tokens begin and end a text"
        described |= {
            "hidden_act": family.traits.activation, "initializer_range": model.init_method_std,
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        }  # fmt: skip
    family.write_shape(described, model, changed)
    described["torch_dtype"] = str(dtype).removeprefix("torch.")
    if "dtype" in described:
        described["dtype"] = described["torch_dtype"]
    return described


def transformers_family(model: ModelConfig, model_type: str | None = None) -> Family:
    """The family whose class in transformers computes this model; `model_type` where several do.

    Raises:
        ConversionError: transformers has none.
    """
    family = family_of(model, model_type)
    if family is None:
        raise ConversionError(
            "no model of transformers has biases on q, k, v and norms of their heads: leave out one of "
            "--add-qkv-bias and --qk-layernorm"
        )
    return family


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
