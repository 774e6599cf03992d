"""Hugging Face folder -> running model: each rank copies its slices straight into its parameters."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import ModelConfig
from patch.convert.hf_reader import open_checked
from patch.convert.live_weights import mapped_parameters
from patch.convert.mappings import TPShard
from patch.distributed.collectives import all_or_none
from patch.errors import ConversionError
from patch.storage.places import StrPath, local_path


def import_hf(
    stages: Sequence[GPTModel], folder: StrPath, model: ModelConfig, groups: ProcessGroupCollection
) -> None:
    """Fill this rank's pipeline stages from a Hugging Face folder; a collective over the whole job.

    Names, shapes and types of all tensors are checked before the first byte is copied. Weights stored in
    another type are rounded to the type of the parameters (to nearest even), which is logged.

    Args:
        stages: the pipeline stages of this rank: GPTModels without wrappers, ours or upstream's own.
        folder: a Hugging Face folder, with config.json and the weights.
        model: the shape of the whole model, as `model_of(folder)` reads it.
        groups: only `tp` is used.
    Raises:
        ConversionError: on every rank, if the folder cannot be read or does not fit the model.
    """
    folder, shard = local_path(folder), TPShard(groups.tp.rank(), groups.tp.size())
    with all_or_none():
        if not (folder / "config.json").is_file():
            raise ConversionError(f"{folder} has no config.json, expected the folder of a Hugging Face model")
        source = open_checked(folder, model, next(stages[0].parameters()).dtype, "PR, --precision")
        for _, _, parameter, mapping in mapped_parameters(stages, model, shard.size):
            slices = [source[tensor.name] for tensor in mapping.hf]
            mapping.hf_to_megatron(parameter, slices, shard)
