"""Pre-training sets: reads .bin/.idx with megatron-core's IndexedDataset, GPTDataset and BlendedDataset.

Upstream writes index files for a run (documents, samples, their order; the turns of a blend) on rank 0. The
other ranks read them from the run's folder. Upstream's BlendedMegatronDatasetBuilder is not called: if a rank
fails in it, the other ranks wait at a barrier. The same data sets are built here, in the same order.

The index files decide which document each sample comes from, and upstream reads them without a check. They
depend only on data and seed. A file that is damaged, or half written by a killed run, is therefore made again
with the same contents.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split, normalize

from patch.config.data_spec import DataPart, split_shares
from patch.data.order import format_passes, weights_of
from patch.data.pretraining.indexed_dataset import check_ids
from patch.data.pretraining.run_sets import PretrainOptions, RunSet, open_set
from patch.data.samples import Sample, lengths_between
from patch.distributed.collectives import all_or_none
from patch.errors import DataError
from patch.logger import get_logger
from patch.storage.atomic import write_atomically
from patch.storage.checksums import Checksum, content, difference, from_json, to_json
from patch.storage.names import CHECKSUMS_FILE
from patch.storage.text_files import read_json

_logger = get_logger(__name__)

_SURPLUS = 1.005
"""Upstream builds a blended set's samples times this factor (`mid_level_dataset_surplus`). It decides how
many epochs are shuffled together, and so the order."""
_Built = TypeVar("_Built")


class PretrainSource:
    """Upstream's samples as our Sample. All tokens are trained except the padding of the last sample."""

    is_shuffled = True

    def __init__(
        self,
        dataset: GPTDataset | BlendedDataset,
        parts: Sequence[RunSet],
        options: PretrainOptions,
        num_samples: int,
    ) -> None:
        self._dataset, self._options = dataset, options
        self.parts = parts
        self.num_samples = num_samples
        """Samples that the run takes; upstream makes a few more."""
        for each in getattr(dataset, "datasets", [dataset]):
            # With its cache, gpt_dataset.py:230-240 uses the first sample's loss mask, which includes that
            # sample's padding, for all other samples. Without it each sample gets its own mask.
            each.masks_and_position_ids_are_cacheable = False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        item = self._dataset[index]
        part = self.parts[item.get("dataset_id", 0)]
        tokens, labels = item["tokens"], item["labels"]
        ids = torch.cat([tokens, labels])
        check_ids(part.prefix, int(ids.min()), int(ids.max()), self._options.model.vocab_size)
        lengths = lengths_between(tokens == part.eod) if self._options.data.reset_attention_mask else None
        return Sample(tokens, labels, item["loss_mask"], lengths)

    def place(self, index: int) -> str:
        """See `SampleSource`: the document in which the sample begins, counted from 1."""
        dataset, number = self._dataset, index
        if isinstance(dataset, BlendedDataset):
            number = int(dataset.dataset_sample_index[index])
            dataset = dataset.datasets[int(dataset.dataset_index[index])]
        begin, offset = dataset.sample_index[dataset.shuffle_index[number]]
        document = int(dataset.document_index[begin]) + 1
        return f"{dataset.dataset_path}: document {document}, from its token {int(offset) + 1}"


def load_run_sets(
    options: PretrainOptions,
    train: Sequence[DataPart],
    valid: Sequence[DataPart],
    num_train_samples: Callable[[int], int],
) -> tuple[PretrainSource, list[tuple[DataPart, PretrainSource]]]:
    """Return the training sets of a run as one, and each validation set. A collective over the job.

    With a split and no validation set, the validation documents are the split's share of each training set.

    Args:
        num_train_samples: maps the samples of one pass over the training sets to the samples of the run.
    Raises:
        DataError: on all ranks; see `load_training`.
    """
    source = load_training([part.path for part in train], weights_of(train), options, num_train_samples)
    if valid:
        options = options._replace(data=dataclasses.replace(options.data, split=None))
    elif split_shares(options.split)[1]:
        valid = train
    return source, [(part, load_validation(part.path, options)) for part in valid]


def load_training(
    prefixes: Sequence[str],
    weights: Sequence[float] | None,
    options: PretrainOptions,
    num_samples: Callable[[int], int],
) -> PretrainSource:
    """Return the training documents of one set or several. A collective in a job; needs no process group.

    Args:
        prefixes: paths of .bin and .idx without their endings.
        weights: share of each set in the samples, in any unit. None: in proportion to the sets' samples.
        num_samples: maps the samples of one pass over all sets to the samples of the run.
    Raises:
        DataError: on all ranks, if files are missing or damaged, or have ids beyond the vocabulary or of
            another tokenizer; if no documents are left for training; or if a needed end token is unknown.
    """

    length = options.model.seq_length

    def build() -> tuple[PretrainSource, list[float]]:
        parts = [open_set(prefix, options, Split.train) for prefix in prefixes]
        taken = num_samples(sum(max(1, part.samples(length)) for part in parts))
        with _index_files(parts, options, Split.train):
            dataset, shares = _blend(parts, weights, taken, length)
        return PretrainSource(dataset, parts, options, taken), shares

    source, shares = _rank_zero_first(build)
    for part, share in zip(source.parts, shares, strict=True):
        taken = source.num_samples * share
        _logger.info(
            "%s: the run takes %.0f samples of %d tokens, %s over its %d tokens",
            part.prefix, taken, length, format_passes(taken * length / part.tokens), part.tokens,
        )  # fmt: skip
    return source


def load_validation(prefix: str, options: PretrainOptions) -> PretrainSource:
    """Return the validation documents of one set, once; the last sample is padded. A collective in a job.

    Args:
        options: without a split, all documents are for validation.
    Raises:
        DataError: see `load_training`.
    """

    def build() -> PretrainSource:
        part = open_set(prefix, options, Split.valid)
        with _index_files([part], options, Split.valid):
            dataset = _dataset(part, None, Split.valid)
        return PretrainSource(dataset, [part], options, len(dataset))

    source = _rank_zero_first(build)
    _logger.info("%s: %d samples of %d tokens", prefix, len(source), options.model.seq_length)
    return source


def _rank_zero_first(build: Callable[[], _Built]) -> _Built:
    """Build on rank 0, which writes the index files, then on the other ranks, which read them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    built: list[_Built] = []
    for is_my_turn in (rank == 0, rank != 0):
        with all_or_none():
            if is_my_turn:
                built.append(build())
    return built[0]


@contextmanager
def _index_files(parts: Sequence[RunSet], options: PretrainOptions, split: Split) -> Iterator[None]:
    """Let rank 0 remove index files without a right checksum on entry, so that upstream makes them again, and
    store the checksums of new files on exit. File names tell training from validation."""
    folder = options.cache
    try:
        if dist.is_initialized() and dist.get_rank() != 0:
            yield
            return
        known = _checksums(folder / CHECKSUMS_FILE)
        for path in folder.glob(f"*-{split.name}-*.npy"):
            complaint = f"{path} has no checksum"
            if path.name in known:
                complaint = difference(path, known[path.name]) or ""
            if complaint:
                _logger.warning(
                    "%s: the index files are made again from data and seed, in the same order", complaint
                )
                path.unlink()
                known.pop(path.name, None)
        yield
        known |= {path.name: content(path) for path in folder.glob("*.npy") if path.name not in known}
        write_atomically(folder / CHECKSUMS_FILE, json.dumps(to_json(known), indent=1) + "\n")
    except OSError as error:
        raise DataError(
            f"{folder}: the index files of {', '.join(part.prefix for part in parts)} cannot be written by "
            f"rank 0, or read by the others: {error.strerror}; expected a folder that all machines share",
            field="output_path",
        ) from error


def _checksums(path: Path) -> dict[str, Checksum]:
    """Return the checksums by file name; empty if they cannot be read, so that all files are made again."""
    try:
        return from_json(read_json(path))
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _whole_samples(part: RunSet, length: int) -> int:
    if part.samples(length) == 0:
        raise DataError(
            f"{part.prefix}: has {part.tokens} tokens for training, expected at least {length + 1} in a set "
            "that is read together with others: leave it out, or give weights"
        )
    return part.samples(length)


def _dataset(part: RunSet, num_samples: int | None, split: Split) -> GPTDataset:
    documents = np.arange(part.documents.start, part.documents.stop, dtype=np.int32)
    return GPTDataset(part.indexed, part.prefix, documents, num_samples, split, part.config)


def _blend(
    parts: Sequence[RunSet], weights: Sequence[float] | None, num_samples: int, length: int
) -> tuple[GPTDataset | BlendedDataset, list[float]]:
    """Return a set, or upstream's blend of several, and the share of each in the samples."""
    if len(parts) == 1:
        return _dataset(parts[0], num_samples, Split.train), [1.0]
    turns = [_whole_samples(part, length) for part in parts] if weights is None else normalize(weights)
    shares = normalize(turns)
    wanted: list[int | None] = [math.ceil(math.ceil(num_samples * share) * _SURPLUS) for share in shares]
    if weights is None and num_samples <= sum(turns):
        wanted = [None] * len(parts)  # upstream's way to read each set at most once
    datasets = [_dataset(part, size, Split.train) for part, size in zip(parts, wanted, strict=True)]
    config = parts[0].config
    if not dist.is_initialized():  # with a folder, blended_dataset.py:139 asks for this process's rank
        config = dataclasses.replace(config, path_to_cache=None)
    # Upstream gives the blend the sum of the rounded shares, which may be more samples than its sets have
    # (blended_dataset.py:159 then raises). Here it has the run's samples, the first of upstream's.
    return BlendedDataset(datasets, turns, num_samples, config), shares
