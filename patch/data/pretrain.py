"""Pre-training on megatron-core's own .bin/.idx: its IndexedDataset read through its GPTDataset.

Upstream builds three index files for a run (documents, samples, their order) on rank 0; the other ranks
read them from the run's folder.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from patch.config.schema import RunConfig
from patch.data.batches import Sample
from patch.data.index_cache import kept_as_made
from patch.data.indexed_dataset import check_ids, open_indexed, total_tokens
from patch.distributed.collectives import agree
from patch.errors import DataError
from patch.logger import get_logger
from patch.storage.names import DATA_INDEX_FOLDER

_log = get_logger(__name__)

_TOKENS_CHECKED = 1 << 24


class PretrainSource:
    """GPTDataset's samples as ours: every token is learned but the padding of the last sample."""

    def __init__(self, dataset: GPTDataset, name: str, vocab_size: int) -> None:
        # gpt_dataset.py:230-240 keeps the first sample's loss mask for all others, after having written that
        # sample's own padding into it; without its cache each sample gets a mask of its own.
        dataset.masks_and_position_ids_are_cacheable = False
        self._dataset, self._name, self._vocab_size = dataset, name, vocab_size
        self.num_tokens = total_tokens(dataset.dataset)
        """Of one pass."""

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        item = self._dataset[index]
        sample = Sample(item["tokens"], item["labels"], item["loss_mask"])
        ids = torch.cat([sample.tokens, sample.labels])
        check_ids(self._name, int(ids.min()), int(ids.max()), self._vocab_size)
        return sample


class _Vocabulary:
    """What GPTDataset asks of a tokenizer."""

    pad = int(np.iinfo(np.int64).min)
    """Beside all ids, so that upstream pads with it and takes no token of the set, wrong ones included, for
    padding."""

    def __init__(self, prefix: str, vocab_size: int, eod: int | None) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        file = Path(f"{prefix}.bin").stat()
        # Upstream names its index files by a hash of this and of the path, and would go on with old ones
        # when the data behind the path has changed.
        self.unique_identifiers = {"bytes": file.st_size, "modified_ns": file.st_mtime_ns}


def load_pretrain(prefix: str, config: RunConfig, *, eod: int | None, is_train: bool) -> PretrainSource:
    """The set at `prefix`.bin and .idx; a collective over the job.

    Args:
        eod: the tokenizer's end-of-document id.
        is_train: as many samples as the run takes, over as many epochs as they need; otherwise one pass, its
            last sample padded.
    Raises:
        DataError: on all ranks: missing or damaged files, or ids beyond the vocabulary.
    """
    source = _rank_zero_first(lambda: _build(prefix, config, eod, is_train))
    length, held = config.model.seq_length, source.num_tokens
    if not is_train:
        _log.info("%s: %d samples of %d tokens", prefix, len(source), length)
        return source
    taken = _samples_taken(config)
    _log.info(
        "%s: the run takes %d samples of %d tokens, %.1f passes over its %d tokens",
        prefix, taken, length, taken * length / held, held,
    )  # fmt: skip
    return source


def _samples_taken(config: RunConfig) -> int:
    return config.training.train_iters * config.training.global_batch_size


def _rank_zero_first(build: Callable[[], PretrainSource]) -> PretrainSource:
    """Build on rank 0, which writes the index files, then on the others, which find them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    built: list[PretrainSource] = []
    for is_my_turn in (rank == 0, rank != 0):
        failed: Exception | None = None
        if is_my_turn:
            try:
                built.append(build())
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must learn of it
                failed = error
        agree(failed)
    return built[0]


def _build(prefix: str, config: RunConfig, eod: int | None, is_train: bool) -> PretrainSource:
    indexed = open_indexed(prefix)
    head = indexed.bin_reader.read(indexed.index.dtype, min(_TOKENS_CHECKED, total_tokens(indexed)), 0)
    check_ids(prefix, int(head.min()), int(head.max()), config.model.vocab_size)
    cache = Path(config.checkpoint.output_path) / DATA_INDEX_FOLDER
    num_samples = _samples_taken(config) if is_train else None
    split = Split.train if is_train else Split.valid
    documents = np.arange(len(indexed), dtype=np.int32)
    upstream = _upstream_config(prefix, config, cache, eod)
    try:
        is_maker = not dist.is_initialized() or dist.get_rank() == 0
        with kept_as_made(cache, split.name) if is_maker else nullcontext():
            dataset = GPTDataset(indexed, prefix, documents, num_samples, split, upstream)
    except OSError as error:
        raise DataError(
            f"{cache}: the index files of {prefix} cannot be written by rank 0, or read by the others: "
            f"{error.strerror}; expected a folder that all machines share (OUTPUT_BASEPATH)"
        ) from error
    return PretrainSource(dataset, prefix, config.model.vocab_size)


def _upstream_config(prefix: str, config: RunConfig, cache: Path, eod: int | None) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=config.model.seq_length,
        blend=([prefix], None),
        split="1",
        path_to_cache=str(cache),
        tokenizer=_Vocabulary(prefix, config.model.vocab_size, eod),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=False,
    )
