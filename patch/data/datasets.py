"""The training and the validation set of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from patch.config.schema import DataConfig, ModelConfig
from patch.data.chat_templates import ensure_chat_template
from patch.data.packing import packed
from patch.data.samples import SampleSource
from patch.data.sft.options import sft_options
from patch.data.sft.source import load_sft
from patch.data.tokenizer import check_vocabulary
from patch.distributed.collectives import all_or_none
from patch.storage.names import DATA_CACHE_FOLDER


class DataSets(NamedTuple):
    """The training set and the validation set; the latter may be missing."""

    train: SampleSource
    valid: SampleSource | None


def build_datasets(
    data: DataConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sft: bool,
    num_train_samples: int,
    seed: int,
    index_folder: Path,
) -> DataSets:
    """Read both sets; a collective over the job.

    For raw rows, the tokenizer gets the chosen chat template (see `ensure_chat_template`).

    Args:
        data: the files and their kind.
        model: vocabulary and sequence length.
        tokenizer: encodes raw rows; .bin/.idx must have its vocabulary.
        sft: .bin/.idx hold conversations, not documents to learn as a whole.
        num_train_samples: how many samples the run takes from a pre-training set.
        seed: decides the order of a pre-training set's samples.
        index_folder: the folder of a pre-training set's index files; all ranks must share it.

    Raises:
        DataError: on all ranks, if either set or the tokenizer cannot be used.
    """
    check_vocabulary(tokenizer, model.vocab_size)
    train_path, valid_path = data.train_data_path, data.valid_data_path
    if sft:
        cache = index_folder.with_name(DATA_CACHE_FOLDER)
        load = partial(_load_sft, data=data, model=model, tokenizer=tokenizer, cache=cache)
        with all_or_none():
            return DataSets(load(train_path), load(valid_path) if valid_path else None)
    # It imports megatron-core, which raw rows do not need.
    from patch.data.pretraining.run_sets import load_run_sets

    sets = load_run_sets(
        data, model, tokenizer,
        num_train_samples=lambda one_pass: num_train_samples, seed=seed, index_folder=index_folder,
    )  # fmt: skip
    return DataSets(sets.train, next(iter(sets.valid), None))


def _load_sft(
    path: str, data: DataConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, cache: Path
) -> SampleSource:
    if data.dataset_type == "idxmap":
        from patch.data.pretraining.indexed_sft import load_indexed_sft

        return load_indexed_sft(
            path, tokenizer, sequence_length=model.seq_length, vocab_size=model.vocab_size
        )
    ensure_chat_template(tokenizer, data.chat_template)
    source = load_sft(Path(path), tokenizer, data.max_padding_length, sft_options(data, cache))
    return packed(source, data.max_padding_length, path) if data.packing else source
