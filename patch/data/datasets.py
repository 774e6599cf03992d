"""The training and the validation set of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from patch.config.schema import DataConfig, ModelConfig
from patch.data.packing import packed
from patch.data.samples import SampleSource
from patch.data.sft.source import load_sft
from patch.data.tokenizer import check_vocabulary
from patch.distributed.collectives import all_or_none
from patch.errors import about


class DataSets(NamedTuple):
    """The training set and the validation set; the latter may be missing."""

    train: SampleSource
    valid: SampleSource | None


def build_datasets(
    data: DataConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_train_samples: int,
    seed: int,
    index_folder: Path,
) -> DataSets:
    """Read both sets; a collective over the job.

    For raw rows, a tokenizer without a chat template may be given one (see `ensure_chat_template`).

    Args:
        data: the files and their kind.
        model: vocabulary and sequence length.
        tokenizer: encodes raw rows; for a pre-training set only its end-of-document id is used.
        num_train_samples: how many samples the run takes from a pre-training set.
        seed: decides the order of a pre-training set's samples.
        index_folder: the folder of a pre-training set's index files; all ranks must share it.

    Raises:
        DataError: on all ranks, if either set or the tokenizer cannot be used.
    """
    check_vocabulary(tokenizer, model.vocab_size)
    train_path, valid_path = data.train_data_path, data.valid_data_path
    if data.dataset_type == "raw":
        load_raw = partial(_load_raw, data=data, tokenizer=tokenizer)
        with all_or_none():
            with about("train_data_path"):
                raw_train = load_raw(Path(train_path))
            with about("valid_data_path"):
                return DataSets(raw_train, load_raw(Path(valid_path)) if valid_path else None)
    from patch.data.pretraining.dataset import (
        load_pretrain,  # it imports megatron-core, which raw rows do not need
    )

    load_indexed = partial(
        load_pretrain,
        sequence_length=model.seq_length,
        vocab_size=model.vocab_size,
        eod=tokenizer.eos_token_id,
        seed=seed,
        cache=index_folder,
    )
    with about("train_data_path"):
        train = load_indexed(train_path, num_samples=num_train_samples)
    with about("valid_data_path"):
        return DataSets(train, load_indexed(valid_path) if valid_path else None)


def _load_raw(path: Path, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> SampleSource:
    source = load_sft(path, tokenizer, sequence_length=data.max_padding_length)
    return packed(source, data.max_padding_length, str(path)) if data.packing else source
