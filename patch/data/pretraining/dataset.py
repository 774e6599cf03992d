"""Pre-training sets: reads .bin/.idx with megatron-core's IndexedDataset and GPTDataset.

Upstream writes three index files for a run (documents, samples, their order) on rank 0. The other ranks read
them from the run's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from patch.data.pretraining.index_cache import kept_as_made
from patch.data.pretraining.indexed_dataset import check_ids, open_indexed, total_tokens
from patch.data.samples import Sample
from patch.distributed.collectives import agree
from patch.errors import DataError
from patch.logger import get_logger

_logger = get_logger(__name__)

_TOKENS_CHECKED = 1 << 24


class PretrainSource:
    """GPTDataset's samples as our Sample. All tokens are learned, except the padding of the last sample."""

    is_shuffled = True

    def __init__(self, dataset: GPTDataset, name: str, vocab_size: int) -> None:
        # With its cache, gpt_dataset.py:230-240 uses the first sample's loss mask, which includes that
        # sample's padding, for all other samples. Without it each sample gets its own mask.
        dataset.masks_and_position_ids_are_cacheable = False
        self._dataset, self._name, self._vocab_size = dataset, name, vocab_size
        self.num_tokens = total_tokens(dataset.dataset)
        """Tokens of the whole set, which is one epoch."""

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        item = self._dataset[index]
        sample = Sample(item["tokens"], item["labels"], item["loss_mask"])
        ids = torch.cat([sample.tokens, sample.labels])
        check_ids(self._name, int(ids.min()), int(ids.max()), self._vocab_size)
        return sample


class _Vocabulary:
    """The attributes of a tokenizer that GPTDataset reads."""

    pad = int(np.iinfo(np.int64).min)
    """A value that no token id can have, so that upstream never takes a token of the set for padding."""

    def __init__(self, prefix: str, vocab_size: int, eod: int | None) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        file = Path(f"{prefix}.bin").stat()
        # Upstream names its index files by a hash of this and of the path. With size and time in it, it does
        # not use old index files after the data at the path has changed.
        self.unique_identifiers = {"bytes": file.st_size, "modified_ns": file.st_mtime_ns}


def load_pretrain(
    prefix: str,
    *,
    sequence_length: int,
    vocab_size: int,
    eod: int | None,
    seed: int,
    cache: Path,
    num_samples: int | None = None,
) -> PretrainSource:
    """Open the set `prefix`.bin and `prefix`.idx; a collective in a job, and usable without a process group.

    Args:
        prefix: path of the two files without their endings.
        sequence_length: tokens of one sample.
        vocab_size: rows of the model's vocabulary; larger ids are refused.
        eod: the tokenizer's end-of-document id.
        seed: decides the order of the samples.
        cache: the folder of the index files, which state where each sample is; all ranks must share it.
        num_samples: how many samples the run takes, over as many epochs as needed; None: one epoch, whose
            last sample is padded.

    Raises:
        DataError: on all ranks, if files are missing or damaged, or have ids beyond the vocabulary.
    """

    def build() -> PretrainSource:
        indexed = _open_checked(prefix, vocab_size)
        upstream = _upstream_config(prefix, sequence_length, vocab_size, eod, seed, cache)
        return PretrainSource(_dataset(indexed, prefix, num_samples, upstream), prefix, vocab_size)

    source = _rank_zero_first(build)
    num_tokens = source.num_tokens
    if num_samples is None:
        _logger.info("%s: %d samples of %d tokens", prefix, len(source), sequence_length)
        return source
    _logger.info(
        "%s: the run takes %d samples of %d tokens, %.1f passes over its %d tokens",
        prefix, num_samples, sequence_length, num_samples * sequence_length / num_tokens, num_tokens,
    )  # fmt: skip
    return source


def samples_in_a_pass(prefixes: Sequence[str], sequence_length: int) -> int:
    """How many samples one epoch of these sets has; at least 1.

    Raises:
        DataError: files are missing or damaged; on this rank alone.
    """
    return sum(max(1, (total_tokens(open_indexed(prefix)) - 1) // sequence_length) for prefix in prefixes)


def _rank_zero_first(build: Callable[[], PretrainSource]) -> PretrainSource:
    """Build the source on rank 0, which writes the index files, then on the other ranks, which read them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    built: list[PretrainSource] = []
    for is_my_turn in (rank == 0, rank != 0):
        failed: Exception | None = None
        if is_my_turn:
            try:
                built.append(build())
            except Exception as error:  # noqa: BLE001 - the other ranks must be told of any error
                failed = error
        agree(failed)
    return built[0]


def _open_checked(prefix: str, vocab_size: int) -> IndexedDataset:
    """Open the set's files and check the first token ids; the others are checked when they are read."""
    indexed = open_indexed(prefix)
    head = indexed.bin_reader.read(indexed.index.dtype, min(_TOKENS_CHECKED, total_tokens(indexed)), 0)
    check_ids(prefix, int(head.min()), int(head.max()), vocab_size)
    return indexed


def _dataset(
    indexed: IndexedDataset, prefix: str, num_samples: int | None, upstream: GPTDatasetConfig
) -> GPTDataset:
    """Upstream's data set. Its index files have different names for training and for evaluation."""
    cache = Path(upstream.path_to_cache or "")
    split = Split.valid if num_samples is None else Split.train
    documents = np.arange(len(indexed), dtype=np.int32)
    writes_index_files = not dist.is_initialized() or dist.get_rank() == 0
    try:
        with kept_as_made(cache, split.name) if writes_index_files else nullcontext():
            return GPTDataset(indexed, prefix, documents, num_samples, split, upstream)
    except OSError as error:
        raise DataError(
            f"{cache}: the index files of {prefix} cannot be written by rank 0, or read by the others: "
            f"{error.strerror}; expected a folder that all machines share",
            field="output_path",
        ) from error


def _upstream_config(
    prefix: str, sequence_length: int, vocab_size: int, eod: int | None, seed: int, cache: Path
) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend=([prefix], None),
        split="1",
        path_to_cache=str(cache),
        tokenizer=_Vocabulary(prefix, vocab_size, eod),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=False,
    )
