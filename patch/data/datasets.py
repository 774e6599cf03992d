"""The training set and the validation sets of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from glob import has_magic
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from patch.config.data_spec import DATA_SUFFIXES, DataPart, parse_data
from patch.config.schema import DataConfig, ModelConfig
from patch.data.blend import Blend, Concatenation
from patch.data.packing import packed
from patch.data.samples import SampleSource
from patch.data.sft.source import SftSource, load_sft
from patch.data.tokenizer import check_vocabulary
from patch.distributed.collectives import all_gather_object, all_or_none
from patch.errors import DataError
from patch.logger import get_logger

_logger = get_logger(__name__)


class DataSets(NamedTuple):
    """What a run trains on and evaluates."""

    train: SampleSource
    num_train_samples: int
    """Samples that the run takes: whole global batches."""
    valid: dict[str, SampleSource]
    """The validation sets by name, in the order in which they were given; empty if there is none."""
    valid_weights: list[float] | None
    """Of the validation sets; None if they were given without."""


def build_datasets(
    data: DataConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_train_samples: Callable[[int], int],
    seed: int,
    index_folder: Path,
) -> DataSets:
    """Read all sets; a collective over the job.

    For raw rows, a tokenizer without a chat template may be given one (see `ensure_chat_template`).

    Args:
        data: the files and their kind.
        model: vocabulary and sequence length.
        tokenizer: encodes raw rows; for a pre-training set only its end-of-document id is used.
        num_train_samples: how many samples the run takes, given those of one pass over the training sets.
        seed: decides the order of samples that come from several sets or from a pre-training set.
        index_folder: the folder of a pre-training set's index files; all ranks must share it.

    Raises:
        DataError: on all ranks, if a set or the tokenizer cannot be used, or a rank has read other data than
            the others.
    """
    check_vocabulary(tokenizer, model.vocab_size)
    train = parse_data(data.train_data_path, "train_data_path")
    valid = parse_data(data.valid_data_path, "valid_data_path") if data.valid_data_path else ()
    if data.dataset_type == "raw":
        load_raw = partial(_load_raw, data=data, tokenizer=tokenizer)
        sources, valid_sources = load_raw(train), load_raw(valid)
        num_samples = num_train_samples(sum(map(len, sources)))
        source = _joined(train, sources, num_samples, seed)
    else:
        # It imports megatron-core, which raw rows do not need.
        from patch.data.pretraining.dataset import load_pretrain, samples_in_a_pass

        if len(train) > 1:
            raise DataError("several pre-training sets are not built yet", field="train_data_path")
        load_indexed = partial(
            load_pretrain,
            sequence_length=model.seq_length,
            vocab_size=model.vocab_size,
            eod=tokenizer.eos_token_id,
            seed=seed,
            cache=index_folder,
        )
        with all_or_none():
            num_samples = num_train_samples(samples_in_a_pass([train[0].path], model.seq_length))
        source = load_indexed(train[0].path, num_samples=num_samples)
        valid_sources = [load_indexed(part.path) for part in valid]
    named = dict(zip(_names(valid), valid_sources, strict=True))
    return DataSets(source, num_samples, named, _weights(valid))


def _load_raw(
    parts: Sequence[DataPart], data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[SampleSource]:
    """Sets of rows; a collective over the job."""
    length = data.max_padding_length
    with all_or_none():
        sources = [load_sft(Path(part.path), tokenizer, sequence_length=length) for part in parts]
    _check_same_everywhere(parts, sources)
    if not data.packing:
        return list(sources)
    return [packed(source, length, part.path) for part, source in zip(parts, sources, strict=True)]


def _check_same_everywhere(parts: Sequence[DataPart], sources: Sequence[SftSource]) -> None:
    """Refuse sets that are not the same on all ranks, which may read them on different machines."""
    if not dist.is_initialized():
        return
    everywhere = all_gather_object([_fingerprint(source) for source in sources])
    for rank, theirs in enumerate(everywhere):
        for part, first, other in zip(parts, everywhere[0], theirs, strict=True):
            if first != other:
                raise DataError(
                    f"{part.path}: rank 0 has read {first[0]} samples, rank {rank} {other[0]}, which are not "
                    "the same: expected the same files, tokenizer and versions on every machine"
                )


def _fingerprint(source: SftSource) -> tuple[int, str]:
    digest = hashlib.sha256(source.sizes.tobytes())
    return len(source), digest.hexdigest()


def _joined(
    parts: Sequence[DataPart], sources: Sequence[SampleSource], num_samples: int, seed: int
) -> SampleSource:
    """The training set of a run from one set or several; the log says how often the run goes over each."""
    weights = _weights(parts)
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
            "%s: the run takes %.0f samples, %.2f passes over its %d",
            part.path, times * len(source), times, len(source),
        )  # fmt: skip
    return joined


def _weights(parts: Sequence[DataPart]) -> list[float] | None:
    """The weights of the sets, of which all have one or none."""
    return [part.weight for part in parts if part.weight is not None] or None


def _names(parts: Sequence[DataPart]) -> list[str]:
    """A name for each set, made from its file or folder: `valid_loss/NAME` is its loss."""
    names: list[str] = []
    for part in parts:
        path = Path(part.path)
        while has_magic(path.name):
            path = path.parent
        while path.suffix.lower() in DATA_SUFFIXES:
            path = path.with_suffix("")
        alike = (path.name if number == 1 else f"{path.name}_{number}" for number in count(1))
        names.append(next(name for name in alike if name not in names))
    return names
