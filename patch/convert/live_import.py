"""Hugging Face -> running model: each rank copies its slices straight into its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import ModelConfig, RunConfig
from patch.convert.hf_reader import SPELLINGS, HFFolder
from patch.convert.live_weights import stage_weights
from patch.convert.mappings import Shard
from patch.convert.weight_table import EMBEDDING, OUTPUT, hf_tensors, parameter_table
from patch.distributed.collectives import all_or_none
from patch.errors import ConversionError
from patch.logger import get_logger

_LOG = get_logger(__name__)


def import_hf(
    stages: Sequence[GPTModel], folder: Path, config: RunConfig, groups: ProcessGroupCollection
) -> None:
    """Fill this rank's pipeline stages from a Hugging Face folder; collective over the job.

    Names, shapes and types of the whole folder are checked before the first byte is copied. Weights
    stored in another type are rounded to that of the parameters, to nearest even, and a line says so.

    Args:
        stages: of this rank, cut over `groups.tp` and `groups.pp`.
    Raises:
        ConversionError: on every rank, when the folder cannot be read or does not fit the model.
    """
    shard = Shard(groups.tp.rank(), groups.tp.size())
    with all_or_none():
        if not (folder / "config.json").is_file():
            raise ConversionError(f"{folder} has no config.json, expected the folder of a Hugging Face model")
        source = open_checked(folder, config.model)
        tell_rounding(source, config.model, next(stages[0].parameters()).dtype, "PR, --precision")
        for weight in stage_weights(stages, parameter_table(config.model, config.padded_vocab_size)):
            sources = [source[tensor.name] for tensor in weight.mapping.hf]
            weight.mapping.fill(weight.parameter, sources, shard)


def open_checked(folder: Path, model: ModelConfig) -> HFFolder:
    """Open a folder and compare what it holds with what the model needs.

    Raises:
        ConversionError: it does not fit.
    """
    source = HFFolder(folder)
    tied = not model.untie_embeddings_and_output_weights
    source.check(hf_tensors(model), unused=frozenset({OUTPUT} if tied else ()))
    if tied:
        source.check_copy(OUTPUT, EMBEDDING)
    return source


def tell_rounding(source: HFFolder, model: ModelConfig, dtype: torch.dtype, named_by: str) -> None:
    """Say once when this type cannot hold every stored value. float32 holds them all.

    Args:
        named_by: where a user sets the type.
    """
    inexact = source.dtypes(tensor.name for tensor in hf_tensors(model)) - {SPELLINGS[dtype]}
    if dtype != torch.float32 and inexact:
        _LOG.warning(
            "weights stored as %s in %s are rounded to %s (%s)",
            ", ".join(sorted(inexact)), source.folder, str(dtype).removeprefix("torch."), named_by,
        )  # fmt: skip
