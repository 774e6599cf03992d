"""The two models that are compared, as they lie on disk: a checkpoint of ours, and its Hugging Face folder.

Our model is shaped by what was written: fields from the config.yaml of the checkpoint's run or the
config.json that was converted with it, padding and tying from the stored tensors themselves.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from patch.checkpoint import load_only_weights, weights_folder
from patch.compat.unpickle import read_metadata
from patch.config.choices import Precision
from patch.config.fields import assemble
from patch.config.hf_config import is_hf_folder, read_hf_config
from patch.config.schema import RunConfig
from patch.config.stored_shape import shape_at
from patch.device import FLOAT_TYPES, DeviceContext, torch_dtype
from patch.errors import CheckpointError, ConfigError
from patch.families import WEIGHT_FIELDS
from patch.families.weights import EMBEDDING_PARAMETER, TIED_OUTPUT
from patch.model import WEIGHT_PREFIXES, LlamaModel, build_llama_model, sharded_weights
from patch.storage.names import (
    METADATA_FILE,
    TRACKER,
    complete_iterations,
    find_checkpoint_root,
    is_complete,
)

_TIED = "untie_embeddings_and_output_weights"
_STRUCTURE = WEIGHT_FIELDS - {_TIED}
"""Fields without which two models cannot be compared tensor by tensor."""
_HARMLESS = ("max_position_embeddings",)
"""Fields that change nothing that is computed."""


class Disagreement(NamedTuple):
    """A field that changes what is computed, in our words and in config.json's."""

    field: str
    ours: Any
    theirs: Any


class Stored(NamedTuple):
    """A checkpoint, before its weights are read."""

    folder: Path
    """Of the checkpoint itself."""
    fields: dict[str, Any]
    """Of ModelConfig."""
    precision: Precision
    """fp32, fp16 or bf16: the type the weights are stored in."""
    theirs: dict[str, Any]
    """Fields of ModelConfig by the Hugging Face folder's config.json."""
    disagreements: list[Disagreement]
    """Between the two, less those that keep models from being compared."""


def find_stored(load: Path, hf_folder: Path) -> Stored:
    """What lies at `load`: a run's folder, its checkpoint/, a converted model, or one checkpoint itself.

    Raises:
        ConfigError: no checkpoint there, or no Hugging Face model there.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    if not is_hf_folder(hf_folder):
        raise ConfigError(f"--hf {hf_folder}: no config.json there, expected a Hugging Face model's folder")
    _check_is_checkpoint(load)
    folder = weights_folder(load)
    tensors = read_metadata(folder / METADATA_FILE).state_dict_metadata
    embedding = tensors.get(EMBEDDING_PARAMETER)
    if not isinstance(embedding, TensorStorageMetadata):
        raise CheckpointError(f"{folder} holds no {EMBEDDING_PARAMETER}, expected a GPTModel's weights")
    theirs = read_hf_config(hf_folder)
    found = shape_at(str(folder.parent if folder == load else load))
    ours = {**theirs, **(found.fields if found else {})}
    ours |= {"make_vocab_size_divisible_by": embedding.size[0], _TIED: TIED_OUTPUT in tensors}
    dtypes = {torch_dtype(name): name for name in FLOAT_TYPES}
    dtype = embedding.properties.dtype
    if dtype not in dtypes:
        raise CheckpointError(f"{folder} stores weights as {dtype}, expected {', '.join(map(str, dtypes))}")
    disagreements = _disagreements(ours, theirs, found.file if found else folder, hf_folder)
    return Stored(folder, ours, dtypes[dtype], theirs, disagreements)


def _disagreements(
    ours: dict[str, Any], theirs: dict[str, Any], file: Path, hf_folder: Path
) -> list[Disagreement]:
    differing = [Disagreement(name, ours[name], theirs[name]) for name in theirs]
    differing = [found for found in differing if found.ours != found.theirs and found.field not in _HARMLESS]
    for field, our, their in differing:
        if field in _STRUCTURE:
            raise CheckpointError(
                f"{field}: {our} in {file}, {their} in {hf_folder / 'config.json'}: not the same model"
            )
    return differing


def _check_is_checkpoint(load: Path) -> None:
    root = find_checkpoint_root(load)
    if not (is_complete(load) or (root / TRACKER).is_file() or complete_iterations(root)):
        found = "a Hugging Face folder" if is_hf_folder(load) else "no checkpoint there"
        raise ConfigError(
            f"--mcore {load}: {found}, expected what toolkits.convert made, a run's folder or a checkpoint"
        )


def run_config(stored: Stored, precision: str, attention: str) -> RunConfig:
    """A run of one process with this model; what only training needs is filled with anything legal."""
    length = stored.fields["max_position_embeddings"]
    return assemble(
        {
            **stored.fields,
            "seq_length": length,
            "max_padding_length": length,
            "nproc_per_node": 1,
            "micro_batch_size": 1,
            "global_batch_size": 1,
            "train_iters": 1,
            "lr": 0.0,
            "train_data_path": "none",
            "output_path": "none",
            "precision": precision,
            "precision_align": attention,
        }  # fmt: skip
    )


def load_ours(
    stored: Stored, config: RunConfig, groups: ProcessGroupCollection, context: DeviceContext
) -> LlamaModel:
    """The stored weights, in the type they are stored in."""
    as_stored = dataclasses.replace(config.execution, precision=stored.precision)
    (model,) = build_llama_model(config.model, groups, context.device, as_stored)
    state = {"model": sharded_weights([model])}
    load_only_weights(stored.folder, state, prefixes=WEIGHT_PREFIXES, vocab_size=config.model.vocab_size)
    return model.eval()


def load_hf(
    folder: Path, stored: str, precision: str, attention: str, device: torch.device
) -> torch.nn.Module:
    """transformers' model with this attention: rounded as the checkpoint's weights were, then to `precision`.

    Weights leave the file that transformers maps: for a single token, MKL's bits depend on where in 64
    bytes a weight begins. Only weights are converted: RoPE's frequencies stay float32.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch_dtype(stored), attn_implementation=attention, local_files_only=True
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, torch_dtype(precision), copy=True)
    return model.to(device).eval()


def in_form(
    weights: LlamaModel,
    config: RunConfig,
    groups: ProcessGroupCollection,
    context: DeviceContext,
    aligned: frozenset[str],
) -> LlamaModel:
    """A model of these weights (shared where the type is the same) with `aligned` in Hugging Face's order."""
    (model,) = build_llama_model(config.model, groups, context.device, config.execution, aligned=aligned)
    for parameter, weight in zip(model.parameters(), weights.parameters(), strict=True):
        parameter.data = weight.data.to(parameter.dtype)
    return model.eval()
