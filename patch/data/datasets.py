"""The training and the validation set of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from patch.config.schema import DataConfig, ModelConfig
from patch.data.batches import SampleSource
from patch.data.sft import load_sft
from patch.data.tokenizer import check_vocabulary
from patch.distributed.collectives import all_or_none


class DataSets(NamedTuple):
    """What a run learns from and is evaluated on."""

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

    A raw set may give the tokenizer a chat template (see `ensure_chat_template`).

    Args:
        data: which files, of which kind.
        model: vocabulary and sequence length.
        tokenizer: of a raw set; of a pre-training set only its end-of-document id is read.
        num_train_samples: how many samples the run takes from a pre-training set.
        seed: decides the order of a pre-training set's samples.
        index_folder: for the index files of a pre-training set; all ranks see it.

    Raises:
        DataError: on all ranks, when either set or the tokenizer cannot be used.
    """
    check_vocabulary(tokenizer, model.vocab_size)
    train_path, valid_path = data.train_data_path, data.valid_data_path
    if data.dataset_type == "raw":
        load_raw = partial(load_sft, tokenizer=tokenizer, sequence_length=data.max_padding_length)
        with all_or_none():
            return DataSets(load_raw(Path(train_path)), load_raw(Path(valid_path)) if valid_path else None)
    from patch.data.pretrain import load_pretrain  # imports megatron-core, which raw rows do without

    load_indexed = partial(
        load_pretrain,
        sequence_length=model.seq_length,
        vocab_size=model.vocab_size,
        eod=tokenizer.eos_token_id,
        seed=seed,
        cache=index_folder,
    )
    train = load_indexed(train_path, num_samples=num_train_samples)
    return DataSets(train, load_indexed(valid_path) if valid_path else None)
