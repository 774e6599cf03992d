"""The pre-training sets of a run, as its configuration names them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron.core.datasets.utils import Split
from transformers import PreTrainedTokenizerBase

from patch.config.data_spec import DataPart, parse_data, split_shares
from patch.config.schema import DataConfig, ModelConfig
from patch.data.pretraining.dataset import PretrainSource, load_training, load_validation
from patch.data.pretraining.part import WHOLE, PretrainOptions, open_part


class RunSets(NamedTuple):
    """The training set and the validation sets of a run."""

    train: PretrainSource
    """All sets together."""
    num_train_samples: int
    """How many samples the run takes."""
    valid_parts: tuple[DataPart, ...]
    """The validation sets as they are named: at position 21, or by the split those of position 20."""
    valid: list[PretrainSource]
    """The samples of each."""


def load_run_sets(
    data: DataConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_train_samples: Callable[[int], int],
    seed: int,
    index_folder: Path,
) -> RunSets:
    """Open all sets; a collective over the job.

    With a split, the validation documents are those that the split leaves for it in each training set.

    Args:
        data: the sets and what is done with them.
        model: vocabulary and sequence length.
        tokenizer: a set that is known to have another vocabulary is refused.
        num_train_samples: from the samples of one pass over the training sets, how many the run takes.
        seed: decides the order of the samples.
        index_folder: the folder of the index files; all ranks must share it.

    Raises:
        DataError: on all ranks; see `load_training`.
    """
    options = _options(data, model, tokenizer, seed, index_folder)
    parts = parse_data(data.train_data_path, "train_data_path")
    weights = [part.weight for part in parts if part.weight is not None]
    prefixes = [part.path for part in parts]
    train = load_training(prefixes, weights or None, options, num_train_samples)
    valid: tuple[DataPart, ...] = ()
    if data.valid_data_path is not None:
        valid = parse_data(data.valid_data_path, "valid_data_path")
        options = dataclasses.replace(options, split=WHOLE)
    elif split_shares(options.split)[1]:
        valid = parts
    sources = [load_validation(part.path, options) for part in valid]
    return RunSets(train, train.num_samples, valid, sources)


def train_samples(
    part: DataPart, data: DataConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Samples of one pass over a training set. No index file is read or written.

    Args:
        part: the set.
        data: see `load_run_sets`, also for the others.
        model: vocabulary and sequence length.
        tokenizer: a set that is known to have another vocabulary is refused.

    Raises:
        DataError: see `load_training`.
    """
    options = _options(data, model, tokenizer, seed=0, index_folder=Path())
    return max(1, open_part(part.path, options, Split.train).samples(model.seq_length))


def _options(
    data: DataConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int, index_folder: Path
) -> PretrainOptions:
    return PretrainOptions(
        sequence_length=model.seq_length,
        vocab_size=model.vocab_size,
        seed=seed,
        cache=index_folder,
        tokenizer=tokenizer,
        split=data.split or WHOLE,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )
