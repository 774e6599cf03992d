"""The training and the validation set of a run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from patch.config.schema import RunConfig
from patch.data.batches import SampleSource
from patch.data.sft import load_sft
from patch.data.tokenizer import check_vocabulary
from patch.distributed.collectives import all_or_none
from patch.storage.names import DATA_INDEX_FOLDER


class DataSets(NamedTuple):
    """What a run learns from and is evaluated on."""

    train: SampleSource
    valid: SampleSource | None


def build_datasets(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> DataSets:
    """Read both sets; a collective over the job.

    A raw set may give the tokenizer a chat template (see `ensure_chat_template`).

    Raises:
        DataError: on all ranks, when either set or the tokenizer cannot be used.
    """
    check_vocabulary(tokenizer, config.model.vocab_size)
    paths = [config.data.train_data_path]
    if config.data.valid_data_path is not None:
        paths.append(config.data.valid_data_path)
    build = _raw if config.data.dataset_type == "raw" else _idxmap
    sources = build(config, tokenizer, paths)
    return DataSets(sources[0], sources[1] if len(sources) > 1 else None)


def _raw(config: RunConfig, tokenizer: PreTrainedTokenizerBase, paths: list[str]) -> list[SampleSource]:
    with all_or_none():
        return [load_sft(Path(path), tokenizer, config.data.max_padding_length) for path in paths]


def _idxmap(config: RunConfig, tokenizer: PreTrainedTokenizerBase, paths: list[str]) -> list[SampleSource]:
    from patch.data.pretrain import load_pretrain  # imports megatron-core, which raw rows do without

    samples_taken = config.training.train_iters * config.training.global_batch_size
    return [
        load_pretrain(
            path,
            sequence_length=config.model.seq_length,
            vocab_size=config.model.vocab_size,
            eod=tokenizer.eos_token_id,
            seed=config.training.seed,
            cache=Path(config.checkpoint.output_path) / DATA_INDEX_FOLDER,
            num_samples=samples_taken if path_index == 0 else None,
        )
        for path_index, path in enumerate(paths)
    ]
