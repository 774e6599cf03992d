"""The training set and the validation sets of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from glob import has_magic
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from patch.config.choices import RowKind
from patch.config.data_spec import DataPart, sets_of
from patch.config.schema import DataConfig, ModelConfig
from patch.data.order import Blend, Concatenation, format_passes, weights_of
from patch.data.packing import SOURCES, PackingSummary, PairSource
from patch.data.samples import SampleSource
from patch.data.sft.options import user_cache
from patch.data.sft.source import SftSource, load_sft
from patch.data.tokenizer import check_vocabulary
from patch.distributed.collectives import all_gather_object, all_or_none
from patch.errors import DataError, about
from patch.logger import get_logger
from patch.preflight.data_record import SetRecord
from patch.storage.names import DATA_CACHE_FOLDER, DATA_SUFFIXES
from patch.storage.places import StrPath
from patch.text import counted

_logger = get_logger(__name__)


class DataSets(NamedTuple):
    """Training and validation sets of a run."""

    train: SampleSource
    num_train_samples: int
    """Samples that the run trains on, in whole global batches."""
    valid: dict[str, SampleSource]
    """Validation sets by name, in the given order; may be empty."""
    valid_weights: list[float] | None
    """Weights of the validation sets, or None if the sets have no weights."""
    records: list[SetRecord]
    """Records of the training sets of raw rows, which a resumed run must find again."""
    pairs: Sequence[PairSource] = ()


def build_datasets(
    data: DataConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sft: bool,
    num_train_samples: Callable[[int], int],
    seed: int,
    index_folder: StrPath,
    row_kind: RowKind = "conversation",
) -> DataSets:
    """Read all data sets. A collective over the job. With raw rows, the tokenizer gets its chat template.

    Args:
        tokenizer: encodes raw rows; .bin/.idx sets must have its vocabulary.
        sft: whether .bin/.idx sets hold conversations, not documents that are trained whole.
        num_train_samples: maps the samples of one pass over the training sets to the samples of the run.
        seed: decides the order of samples from several sets or from a pre-training set.
        index_folder: folder of the index files of pre-training sets; all ranks must share it.
        row_kind: kind of rows that the objective reads.
    Raises:
        DataError: on all ranks, if data or tokenizer are refused, or two ranks have read different data.
    """
    check_vocabulary(tokenizer, model.vocab_size)
    sets = sets_of(data)
    train, valid = sets.values()
    if not sft:
        # These import megatron-core, which raw rows do not need.
        from patch.data.pretraining.dataset import load_run_sets
        from patch.data.pretraining.run_sets import PretrainOptions

        options = PretrainOptions(data, model, tokenizer, seed, Path(index_folder))
        source, valid_sets = load_run_sets(options, train, valid, num_train_samples)
        return _data_sets(source, source.num_samples, valid_sets, [], [])

    def load(path: str) -> SampleSource:
        if data.dataset_type == "idxmap":
            from patch.data.pretraining.indexed_sft import load_indexed_sft

            return load_indexed_sft(path, tokenizer, model)
        cache = data.cache_dir or user_cache(Path(index_folder).with_name(DATA_CACHE_FOLDER))
        return load_sft(path, tokenizer, data.max_padding_length, data, row_kind, cache)

    with all_or_none():
        sources = []
        for field, parts in sets.items():
            with about(field):
                sources += [load(part.path) for part in parts]
    _check_same_everywhere((*train, *valid), sources)
    named = zip(train, sources, strict=False)
    records = [each.record(part.path) for part, each in named if isinstance(each, SftSource)]
    sources = _samples(sources, data, (*train, *valid), row_kind)
    train_sources, valid_sources = sources[: len(train)], sources[len(train) :]
    num_samples = num_train_samples(sum(map(len, train_sources)))
    joined = _joined(train, train_sources, num_samples, seed)
    pairs = [source for source in sources if isinstance(source, PairSource)]
    return _data_sets(joined, num_samples, list(zip(valid, valid_sources, strict=True)), records, pairs)


def _samples(
    sources: Sequence[SampleSource], data: DataConfig, parts: Sequence[DataPart], row_kind: RowKind
) -> list[SampleSource]:
    """Return the sets as samples. Conversations are packed if the run packs; a .bin/.idx set stays as it was
    made. Sequences of other kinds of rows are numbered over all sets."""
    made: list[SampleSource] = []
    first = 0
    for source, part in zip(sources, parts, strict=True):
        if isinstance(source, SftSource) and (data.packing or row_kind != "conversation"):
            packed = SOURCES[row_kind](
                source, data.max_padding_length, is_packed=data.packing, first=first, name=part.path
            )
            first += 2 * len(packed.sizes)
            if data.packing:
                _logger.info("%s: %s", part.path, PackingSummary.of(packed))
            made.append(packed)
        else:
            made.append(source)
    return made


def _check_same_everywhere(parts: Sequence[DataPart], sources: Sequence[SampleSource]) -> None:
    """Refuse data sets that differ between ranks, which may read them on different machines."""
    if not dist.is_initialized():
        return
    prints = (source.fingerprint if isinstance(source, SftSource) else "" for source in sources)
    everywhere = all_gather_object(list(zip(map(len, sources), prints, strict=True)))
    for rank, theirs in enumerate(everywhere):
        for part, first, other in zip(parts, everywhere[0], theirs, strict=True):
            if first != other:
                raise DataError(
                    f"{part.path}: rank 0 has read {first[0]} samples, rank {rank} {other[0]}, which are not "
                    "the same: expected the same files, tokenizer and versions on every machine"
                )


def _joined(
    parts: Sequence[DataPart], sources: Sequence[SampleSource], num_samples: int, seed: int
) -> SampleSource:
    """Join the training sets into one, and log how often the run passes over each set."""
    weights = weights_of(parts)
    joined: SampleSource
    if len(sources) == 1:
        (joined,) = sources
    elif weights is None:
        joined = Concatenation(sources)
    else:
        joined = Blend(sources, weights, num_samples=num_samples, seed=seed)
    passes = joined.passes() if isinstance(joined, Blend) else [num_samples / len(joined)] * len(sources)
    for part, source, times in zip(parts, sources, passes, strict=True):
        _logger.info(
            "%s: the run takes %s, %s over its %d",
            part.path, counted(round(times * len(source)), "sample"), format_passes(times), len(source),
        )  # fmt: skip
    return joined


def _data_sets(
    train: SampleSource,
    num_samples: int,
    valid: Sequence[tuple[DataPart, SampleSource]],
    records: list[SetRecord],
    pairs: Sequence[PairSource],
) -> DataSets:
    """Return the sets of a run. Validation sets are named after their files or folders."""
    by_name: dict[str, SampleSource] = {}
    for part, source in valid:
        path = Path(part.path)
        while has_magic(path.name):
            path = path.parent
        while path.suffix.lower() in DATA_SUFFIXES:
            path = path.with_suffix("")
        alike = (path.name if number == 1 else f"{path.name}_{number}" for number in count(1))
        by_name[next(name for name in alike if name not in by_name)] = source
    return DataSets(train, num_samples, by_name, weights_of([part for part, _ in valid]), records, pairs)
