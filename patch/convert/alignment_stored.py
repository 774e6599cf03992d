"""The two models that are compared, as they lie on disk: a checkpoint of ours, and its Hugging Face folder.

Our model is shaped by what was written: fields from the config.yaml of the checkpoint's run (without one,
from config.json), padding and tying from the stored tensors themselves.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from patch.checkpoint import latest_iteration, load_checkpoint
from patch.checkpoint.folder import iteration_folder
from patch.compat.unpickle import read_metadata
from patch.config.fields import assemble
from patch.config.hf import is_hf_folder, read_hf_config
from patch.config.run_folder import CONFIG_FILE, INDEX, checkpoint_root, is_complete, run_behind
from patch.config.schema import RunConfig
from patch.device import DeviceContext
from patch.errors import CheckpointError, ConfigError
from patch.model import DTYPES, LlamaModel, build_llama_model, sharded_weights

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_TIED = "untie_embeddings_and_output_weights"
_STRUCTURE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "vocab_size", "add_qkv_bias", "qk_layernorm",
)  # fmt: skip
"""Fields without which two models cannot be compared tensor by tensor."""


class Disagreement(NamedTuple):
    """A field that changes what is computed, in our words and in config.json's."""

    field: str
    ours: Any
    theirs: Any


class Stored(NamedTuple):
    """A checkpoint, before its weights are read."""

    root: Path
    iteration: int
    fields: dict[str, Any]
    """Of ModelConfig."""
    precision: str
    """fp32, fp16 or bf16: the type the weights are stored in."""
    theirs: dict[str, Any]
    """Fields of ModelConfig by config.json."""
    disagreements: list[Disagreement]
    """Between the two, less those that keep models from being compared."""


def find_stored(folder: Path, hf_folder: Path) -> Stored:
    """What lies at `folder`: a run's folder, its checkpoint/, or one iter_* of it.

    Raises:
        ConfigError: no checkpoint there, or no Hugging Face model there.
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    if not is_hf_folder(hf_folder):
        raise ConfigError(f"--hf {hf_folder}: no config.json there, expected a Hugging Face model's folder")
    root, iteration = _locate(folder)
    index = iteration_folder(root, iteration) / INDEX
    tensors = read_metadata(index).state_dict_metadata
    embedding = tensors.get(_EMBEDDING)
    if not isinstance(embedding, TensorStorageMetadata):
        raise CheckpointError(f"{index} names no {_EMBEDDING}, expected the checkpoint of a model of ours")
    theirs = read_hf_config(hf_folder)
    run = run_behind(str(root.parent if root.name == "checkpoint" else root))
    ours = dataclasses.asdict(run.model) if run else dict(theirs)
    ours |= {"make_vocab_size_divisible_by": embedding.size[0], _TIED: _OUTPUT in tensors}
    differing = [
        Disagreement(name, ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]
    ]
    _check_structure(differing, root.parent / CONFIG_FILE, hf_folder)
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    return Stored(
        root, iteration, ours, dtypes[embedding.properties.dtype], theirs,
        [found for found in differing if found.field != "max_position_embeddings"],
    )  # fmt: skip


def _locate(folder: Path) -> tuple[Path, int]:
    folder = folder.absolute()
    if is_complete(folder) and folder.name.startswith("iter_"):
        return folder.parent, int(folder.name[len("iter_") :])
    root = checkpoint_root(folder)
    iteration = latest_iteration(root) if root.is_dir() else None
    if iteration is None:
        found = "a Hugging Face folder" if is_hf_folder(folder) else "no checkpoint there"
        raise ConfigError(
            f"--mcore {folder}: {found}, expected a run's folder, its checkpoint/ or an iter_* below it"
        )
    return root, iteration


def _check_structure(differing: list[Disagreement], file: Path, hf_folder: Path) -> None:
    for field, ours, theirs in differing:
        if field in _STRUCTURE:
            raise CheckpointError(
                f"{field}: {ours} in {file}, {theirs} in {hf_folder / 'config.json'}: not the same model"
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
    as_stored = dataclasses.replace(
        config, training=dataclasses.replace(config.training, precision=stored.precision)
    )
    (model,) = build_llama_model(as_stored, groups, context.device)
    load_checkpoint(stored.root, stored.iteration, {"model": sharded_weights([model])})
    return model.eval()


def load_hf(
    folder: Path, stored: str, precision: str, attention: str, device: torch.device
) -> torch.nn.Module:
    """transformers' model with this attention: rounded as the checkpoint's weights were, then to `precision`.

    Weights leave the file that transformers maps: for a single token, MKL's bits depend on where in 64
    bytes a weight begins. Only weights are converted: RoPE's frequencies stay float32.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[stored], attn_implementation=attention, local_files_only=True
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, DTYPES[precision], copy=True)
    return model.to(device).eval()


def in_form(
    weights: LlamaModel,
    config: RunConfig,
    groups: ProcessGroupCollection,
    context: DeviceContext,
    aligned: frozenset[str],
) -> LlamaModel:
    """A model of these weights (shared where the type is the same) with `aligned` in Hugging Face's order."""
    (model,) = build_llama_model(config, groups, context.device, aligned=aligned)
    for parameter, weight in zip(model.parameters(), weights.parameters(), strict=True):
        parameter.data = weight.data.to(parameter.dtype)
    return model.eval()
