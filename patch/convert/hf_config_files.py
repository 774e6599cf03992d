"""Writes the files beside the weights: config.json, generation_config.json, the tokenizer, the step.

Every export uses `write_descriptions`, so all exports of a checkpoint have the same files. Unchanged files of
a source folder are kept byte for byte. In a changed file, the other keys keep their values and order.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from patch.config.schema import ModelConfig, RunConfig
from patch.errors import ConfigError, ConversionError, DataError
from patch.families import SHAPE_FIELDS, Family, family_of, reason_without_hf_class
from patch.preflight.model_of_folder import MTP_KEYS, read_hf_config
from patch.storage.names import SAFE_WEIGHTS_INDEX_NAME, STEP_FILE, TRACKER
from patch.storage.places import StrPath, copy_of, local_path
from patch.storage.text_files import read_json, read_small

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Suffixes of the files of the model and its tokenizer; additional chat templates have a folder.
_DESCRIPTIONS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_CHAT_TEMPLATES = "additional_chat_templates"
_STEP = "global_step"


def model_of(folder: StrPath) -> ModelConfig:
    """Return the model of a folder's config.json.

    Raises:
        ConversionError: there is no config.json, or its model is not supported.
    """
    try:
        fields = read_hf_config(local_path(folder))
    except ConfigError as error:
        raise ConversionError(str(error)) from error
    return ModelConfig(**fields, seq_length=fields["max_position_embeddings"])


def copy_descriptions(source: Path, target: Path) -> None:
    """Copy configuration, tokenizer and chat templates, but no index of weights and no step."""
    for path in source.iterdir():
        # Mistral's own library reads a tokenizer.model.v3.
        is_description = path.suffix in _DESCRIPTIONS or path.name.startswith("tokenizer.")
        is_other = path.name.endswith(".index.json") or path.name in (TRACKER, STEP_FILE)
        if path.is_file() and is_description and not is_other:
            copy_of(source, path.name, target / path.name)
    if (source / _CHAT_TEMPLATES).is_dir():
        (target / _CHAT_TEMPLATES).mkdir()
        for path in (source / _CHAT_TEMPLATES).iterdir():
            copy_of(source, f"{_CHAT_TEMPLATES}/{path.name}", target / _CHAT_TEMPLATES / path.name)


def tokenizer_of(run: RunConfig, otherwise: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer the run was trained with.

    Args:
        otherwise: advice if it cannot be read.
    Raises:
        ConversionError: it cannot be read.
    """
    from patch.data.chat_templates import ensure_chat_template
    from patch.data.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(run.tokenizer_folder)
        if run.data.dataset_type == "raw":
            ensure_chat_template(tokenizer, run.data.chat_template, run.data.chat_template_kwargs)
    except DataError as error:
        raise ConversionError(f"the run's own {error}; or {otherwise}") from error
    return tokenizer


def write_descriptions(
    folder: Path,
    model: ModelConfig,
    hf_source: Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    step: int | None = None,
    *,
    predicts_further: bool = False,
) -> None:
    """Write config.json, generation_config.json, the tokenizer with its chat template, and the step.

    Args:
        folder: an existing folder.
        hf_source: the folder whose unchanged files are kept, or None for new files.
        tokenizer: the tokenizer to save, or None to copy the source's files.
        dtype: the dtype of the weights, see `stated_dtype`.
        step: the finished steps of the training run, if any.
        predicts_further: see `write_config`.
    Raises:
        ConversionError: a file of the source cannot be read.
    """
    if tokenizer is None:
        assert hf_source is not None, "a model without a source has a tokenizer of its own"
        copy_descriptions(hf_source, folder)
    else:
        _write_json(folder, "generation_config.json", hf_source, generation_description(hf_source, tokenizer))
    write_config(folder, model, hf_source, dtype, tokenizer, predicts_further=predicts_further)
    write_tokenizer(folder, tokenizer, step)


def stated_dtype(
    dtypes: Iterable[torch.dtype], hf_source: Path | None, *, is_source: bool = False
) -> torch.dtype:
    """Return the dtype for config.json: the source's, else the narrowest that rounds no weight.

    Args:
        dtypes: the dtypes of the weights.
        hf_source: the folder of the original config.json, if any.
        is_source: the weights are those of `hf_source`; then its dtype counts even if no weight has it.
    """
    stated, found = {} if hf_source is None else _read_json(hf_source / "config.json"), {*dtypes}
    known = {f"torch.{kind}": getattr(torch, kind) for kind in ("float32", "bfloat16", "float16")}
    own = known.get(f"torch.{stated.get('dtype') or stated.get('torch_dtype')}")
    return own if own and (is_source or own in found) else reduce(torch.promote_types, found)


def write_config(
    folder: Path,
    model: ModelConfig,
    hf_source: Path | None,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    predicts_further: bool = False,
) -> None:
    """Write config.json.

    Args:
        hf_source: the folder whose unchanged config.json is kept, or None for a new file.
        tokenizer: gives the ids of the bos and eos tokens; required without a source.
        predicts_further: whether the weights of layers that predict further tokens (MTP) are kept.
    """
    described = model_description(model, hf_source, tokenizer, dtype)
    if not predicts_further:
        described |= {key: 0 for key in MTP_KEYS if key in described}
    _write_json(folder, "config.json", hf_source, described)


def write_index(folder: Path, layout: dict[str, str], total_size: int, hf_source: Path | None) -> None:
    """Write the index of a model in several files; copy the source's index if it is equal.

    Args:
        layout: file name by tensor name.
        total_size: bytes of all tensors.
        hf_source: the folder whose unchanged index is kept, or None for a new file.
    """
    contents: dict[str, Any] = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(layout.items())),
    }
    if hf_source is not None and (hf_source / SAFE_WEIGHTS_INDEX_NAME).is_file():
        metadata = _read_json(hf_source / SAFE_WEIGHTS_INDEX_NAME).get("metadata") or {}
        contents["metadata"] = metadata | contents["metadata"]
    _write_json(folder, SAFE_WEIGHTS_INDEX_NAME, hf_source, contents)


def read_step(folder: Path) -> int | None:
    """Return the step that is recorded in a folder, or None if there is none."""
    step = _read_json(folder / STEP_FILE).get(_STEP) if (folder / STEP_FILE).is_file() else None
    return step if isinstance(step, int) else None


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase | None, step: int | None) -> None:
    """Save the tokenizer under a class name that transformers 4 and 5 both know, and the step beside it.

    transformers 5 writes `TokenizersBackend`, which version 4 and programs built on it cannot load. It also
    writes how the tokenizer was loaded here; these keys are removed.
    """
    if step is not None:
        _write_json(folder, STEP_FILE, None, {_STEP: step})
    if tokenizer is None:
        return
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    described = _read_json(path)
    for key in ("is_local", "local_files_only"):
        described.pop(key, None)
    if described.get("tokenizer_class") == "TokenizersBackend":
        described["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(described, indent=2) + "\n")


def model_description(
    model: ModelConfig, hf_source: Path | None, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the contents of config.json.

    It has the keys of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`), which transformers 4 and
    5, vLLM and llama.cpp's converter all read. The keys of transformers 5 (`rope_parameters`, `dtype`) are
    kept if the source has them; older readers ignore them.

    Args:
        hf_source: the folder of the original config.json, or None for a new description.
        tokenizer: gives the ids of the bos and eos tokens; required without a source.
        dtype: the dtype of the weights.
    """
    described = {} if hf_source is None else _read_json(hf_source / "config.json")
    family, changed = transformers_family(model, described.get("model_type")), SHAPE_FIELDS
    if hf_source is not None:
        now = dataclasses.replace(model, model_type=family.model_type)
        changed = frozenset(k for k, v in read_hf_config(hf_source).items() if v != getattr(now, k))
    of_type = {"model_type", "window_size", *family.own_fields, *family.flags}
    if changed & (of_type if family.full_every is None else {*of_type, "num_layers"}):
        family.write_type(described, model)
    if hf_source is None:
        assert tokenizer is not None, "without a source the tokenizer gives the bos and eos tokens"
        described |= {
            "initializer_range": model.init_method_std,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,  # some classes' own default is beyond a small vocabulary
        }
    family.write_shape(described, model, changed)
    described["torch_dtype"] = str(dtype).removeprefix("torch.")
    if "dtype" in described:
        described["dtype"] = described["torch_dtype"]
    described.pop("quantization_config", None)  # weights are written in bf16, fp16 or fp32
    return described


def transformers_family(model: ModelConfig, model_type: str | None = None) -> Family:
    """Return the family whose transformers class computes this model.

    Args:
        model_type: chooses between several such families.
    Raises:
        ConversionError: transformers has no such class.
    """
    family = family_of(model, model_type)
    if family is None:
        why, cure = reason_without_hf_class(model)
        raise ConversionError(f"{why}: expected {cure}")
    return family


def generation_description(hf_source: Path | None, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the contents of generation_config.json.

    A chat model ends its turn with the end-of-turn token of its chat template (LLaMA-3's <|eot_id|>, ChatML's
    <|im_end|>). A base model's generation_config.json does not stop there, so this token is added.
    """
    if hf_source is not None and (hf_source / "generation_config.json").is_file():
        described = _read_json(hf_source / "generation_config.json")
    else:
        described = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    from patch.data.rendering.chat import end_of_turn  # takes 0.9 s; most conversions have no tokenizer

    end, eos = end_of_turn(tokenizer), described.get("eos_token_id")
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if end is not None and end not in eos_ids:
        described["eos_token_id"] = [*eos_ids, end] if eos_ids else end
    return described


def _read_json(path: Path) -> dict[str, Any]:
    try:
        contents = read_json(path)
    except (OSError, ValueError) as error:
        raise ConversionError(f"cannot read {path}: {error}") from error
    if not isinstance(contents, dict):
        raise ConversionError(f"{path} holds a JSON {type(contents).__name__}, expected an object")
    return contents


def _write_json(folder: Path, name: str, hf_source: Path | None, contents: dict[str, Any]) -> None:
    """Write `contents`, or copy the source's file if it has equal contents."""
    source = hf_source / name if hf_source is not None else None
    if source is not None and source.is_file() and _read_json(source) == contents:
        (folder / name).write_bytes(read_small(source))
    else:
        (folder / name).write_text(json.dumps(contents, indent=2) + "\n")
