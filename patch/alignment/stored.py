"""Load the two models to compare: a checkpoint of ours, and its Hugging Face folder.

Our model has the stored shape. Its fields come from the config.yaml of the checkpoint's run, or from the
config.json beside a converted checkpoint. Padding and tying come from the stored tensors.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from patch.checkpoint import load_only_weights, weights_folder
from patch.compat.unpickle import read_metadata
from patch.config.schema import ModelConfig, RunConfig
from patch.convert.live_adapters import import_adapter
from patch.convert.merge import adapter_of, merge_adapter
from patch.device import FLOAT_TYPES, DeviceContext, FloatType, torch_dtype
from patch.errors import CheckpointError, ConfigError
from patch.families import HfAttention, differences
from patch.families.adapters import AdapterConfig, loads_whole
from patch.families.weights import EMBEDDING_PARAMETER, TIED_OUTPUT
from patch.model import WEIGHT_PREFIXES, LlamaModel, build_llama_model, sharded_weights
from patch.preflight.model_of_folder import is_hf_folder, read_hf_config, shape_at
from patch.storage.names import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_FOLDER,
    METADATA_FILE,
    TRACKER,
    complete_iterations,
    find_checkpoint_root,
    is_complete,
)
from patch.storage.places import AnyPath

_TIED = "untie_embeddings_and_output_weights"
_HARMLESS = "max_position_embeddings"
"""Field that has no effect on the results."""


class ConfigDifference(NamedTuple):
    """A field of ModelConfig that affects the results and differs between the two models."""

    field: str
    ours: Any
    theirs: Any


class StoredCheckpoint(NamedTuple):
    """A checkpoint whose weights are not read yet."""

    folder: Path
    """The checkpoint itself (`iter_*`, `release`)."""
    model: ModelConfig
    precision: FloatType
    is_hf_tied: bool
    """Whether the Hugging Face folder's config.json ties the output layer to the embedding."""
    config_differences: list[ConfigDifference]
    """Differences that still allow a comparison."""
    adapter: AdapterConfig = AdapterConfig()
    adapter_folder: Path | None = None
    """PEFT folder with adapters for both models."""

    @property
    def is_by_peft(self) -> bool:
        """Whether PEFT holds the adapters beside transformers' weights; otherwise they are merged."""
        return find_spec("peft") is not None and loads_whole(self.model, self.adapter)

    @property
    def adapter_text(self) -> str | None:
        """The adapters and how transformers' model has them, or None without adapters."""
        how = "in PEFT's model" if self.is_by_peft else "merged: peft is not there, or would load only a part"
        return f"{self.adapter_folder} ({how})" if self.adapter_folder else None


def find_checkpoint(load: Path, hf_folder: Path, adapter: Path | None = None) -> StoredCheckpoint:
    """Find a checkpoint and read the shape of its model.

    Args:
        load: a run's folder, its checkpoint/, a converted checkpoint, or one checkpoint inside it.
        adapter: a PEFT folder, or a run's folder that contains one.
    Raises:
        ConversionError: `adapter` has no supported adapter.
        ConfigError: there is no checkpoint at `load`, or no Hugging Face model at `hf_folder`.
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
    shape = shape_at(str(folder.parent if folder == load else load))
    ours = {**theirs, **(shape.fields if shape else {})}
    ours |= {"make_vocab_size_divisible_by": embedding.size[0], _TIED: TIED_OUTPUT in tensors}
    dtypes = {torch_dtype(name): name for name in FLOAT_TYPES}
    dtype = embedding.properties.dtype
    if dtype not in dtypes:
        raise CheckpointError(f"{folder} stores weights as {dtype}, expected {', '.join(map(str, dtypes))}")
    model = ModelConfig(**ours, seq_length=ours["max_position_embeddings"])
    differing = _config_differences(model, theirs, shape.file if shape else folder, hf_folder)
    found = StoredCheckpoint(folder, model, dtypes[dtype], not theirs[_TIED], differing)
    if adapter is None:
        return found
    within = adapter if (adapter / ADAPTER_CONFIG_NAME).is_file() else adapter / ADAPTER_FOLDER
    return found._replace(adapter=adapter_of(within, model), adapter_folder=within)


def _config_differences(
    model: ModelConfig, theirs: dict[str, Any], file: AnyPath, hf_folder: Path
) -> list[ConfigDifference]:
    differing = []
    for field, their, has_other_weights in differences(model, theirs):
        our = getattr(model, field)
        if field != _TIED and has_other_weights:
            raise CheckpointError(
                f"{field}: {our} in {file}, {their} in {hf_folder / 'config.json'}: not the same model"
            )
        if field != _HARMLESS:
            differing.append(ConfigDifference(field, our, their))
    return differing


def _check_is_checkpoint(load: Path) -> None:
    root = find_checkpoint_root(load)
    if not (is_complete(load) or (root / TRACKER).is_file() or complete_iterations(root)):
        found = "a Hugging Face folder" if is_hf_folder(load) else "no checkpoint there"
        raise ConfigError(
            f"--mcore {load}: {found}, expected what llama-patch convert made, a run's folder or a checkpoint"
        )


def load_ours(stored: StoredCheckpoint, groups: ProcessGroupCollection, context: DeviceContext) -> LlamaModel:
    """Return the stored model with its weights, in the stored dtype."""
    run = RunConfig.of_model(stored.model, precision=stored.precision, adapter=stored.adapter)
    (model,) = build_llama_model(run, groups, context.device)
    state = {"model": sharded_weights([model], adapters=False)}
    load_only_weights(stored.folder, state, prefixes=WEIGHT_PREFIXES, vocab_size=stored.model.vocab_size)
    if stored.adapter_folder is not None:
        import_adapter([model], stored.adapter_folder, stored.model, stored.adapter, groups)
    return model.eval()


def load_hf(
    folder: Path, stored: StoredCheckpoint, precision: FloatType, attention: HfAttention, device: torch.device
) -> torch.nn.Module:
    """Return transformers' model of a folder.

    Weights are copied out of the memory-mapped file, because for a single token the bits of MKL's results
    depend on the alignment of a weight to 64 bytes. Only weights are converted: RoPE's frequencies stay
    float32. Experts run as a loop, which has the same order of operations as ours.

    Args:
        stored: gives the adapters, and the dtype to which the folder's weights are rounded first.
        precision: dtype in which the model computes.
    """
    adapter = stored.adapter_folder
    with TemporaryDirectory() as merged:
        if adapter is not None and not stored.is_by_peft:
            # Outside of its run, or the merge would use the run's dtype and quantization for the base.
            plain = shutil.copytree(adapter, Path(merged) / "adapter_alone")
            merge_adapter(folder, plain, Path(merged) / "model")
            folder = Path(merged) / "model"
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch_dtype(stored.precision), attn_implementation=attention, local_files_only=True
        )
    if hasattr(model, "set_experts_implementation"):  # not in transformers 4, which has the loop only
        model.set_experts_implementation("eager")
    if adapter is not None and stored.is_by_peft:
        from peft import PeftModel  # of the extra `test`; transformers' model is within

        model = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).base_model.model
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, torch_dtype(precision), copy=True)
    return model.to(device).eval()


def rebuild(
    weights: LlamaModel,
    run: RunConfig,
    groups: ProcessGroupCollection,
    context: DeviceContext,
    aligned: frozenset[str],
) -> LlamaModel:
    """Return a new model with the weights of another model; weights of the same dtype share memory.

    Args:
        run: the model of `weights`; its `precision_align` names the attention of the aligned form.
        aligned: the sources that follow Hugging Face's order of operations.
    """
    (rebuilt,) = build_llama_model(run, groups, context.device, aligned=aligned)
    for parameter, weight in zip(rebuilt.parameters(), weights.parameters(), strict=True):
        parameter.data = weight.data.to(parameter.dtype)
    biases = {name: value for name, value in weights.named_buffers() if name.endswith("expert_bias")}
    for name, buffer in rebuilt.named_buffers():
        if name in biases:
            buffer.copy_(biases[name])
    return rebuilt.eval()
