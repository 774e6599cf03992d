"""Distillation: a student learns the likeliest tokens of a teacher (arXiv:1503.02531), stored once on disk.

`patch.training.teacher` writes the store in a job of its own. The student finds each row by its content. The
loss is in `patch.model.loss` (`TeacherTokens`). Evaluations have plain cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from patch.data import Batch, DataSets, Sample
from patch.data.pretraining.provenance import vocabulary_hash
from patch.data.samples import SampleSource
from patch.distributed.collectives import all_or_none
from patch.errors import ConfigError, DataError
from patch.model import LossMask, TeacherTokens
from patch.preflight.data_record import SetRecord
from patch.storage.teacher_store import TeacherRows
from patch.training.objectives.objective import Objective

_TEACHER = "teacher"


def digest_of(sample: Sample) -> bytes | None:
    """Return the SHA-256 of what decides a row's losses, or None if no token has a loss.

    These are the tokens up to the last one with a loss, their labels and weights, and where sequences begin.
    So the id of the padding does not count.
    """
    learned = torch.nonzero(sample.loss_mask).flatten()
    if not len(learned):
        return None
    end = int(learned[-1]) + 1
    found = sha256()
    for tensor in (sample.tokens, sample.labels, sample.loss_mask):
        found.update(tensor[:end].numpy().tobytes())
    if sample.lengths is not None:
        begins = sample.lengths.cumsum(0, dtype=torch.int64)
        found.update(begins[begins < end].numpy().tobytes())
    return found.digest()


class TaughtSource:
    """Training samples with the teacher's log-probabilities of their tokens, as extra tensors."""

    def __init__(self, source: SampleSource, rows: TeacherRows) -> None:
        self._source, self._rows = source, rows
        self.is_shuffled = source.is_shuffled

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:
        sample, count = self._source[index], self._rows.header.top_k
        taught = torch.arange(2.0 * count + 1).repeat(len(sample.tokens), 1)  # the ids are all different
        taught[:, count:] = 0
        if (digest := digest_of(sample)) is not None:
            found = torch.frombuffer(bytearray(self._rows.find(digest)), dtype=taught.dtype)
            taught[sample.loss_mask != 0] = found.view(-1, taught.shape[1])
        return sample._replace(extra_tensors={**sample.extra_tensors, _TEACHER: taught})

    def place(self, index: int) -> str:
        """See `SampleSource`."""
        return self._source.place(index)

    def refuse_missing(self, indices: range, seed: int) -> None:
        """Require the store to have these samples.

        Raises:
            DataError: it lacks one.
        """
        for index in indices:
            digest, header = digest_of(self._source[index]), self._rows.header
            if digest is not None and digest not in self._rows:
                raise DataError(
                    f"the store of {header.teacher} has {header.rows} rows (seed {header.seed}), but not "
                    f"sample {index + 1} of {len(self)} of this run (seed {seed}), {self.place(index)}; "
                    "expected the same data, chat template, packing, length and, for pre-training, seed and "
                    "number of samples. Write it with this run's flags",
                    field="distill_from",
                )


class Distillation(Objective):
    """A share of the divergence from the teacher, and cross entropy: see `TeacherTokens`."""

    reported = ("loss", "cross_entropy", "divergence")

    def build_datasets(self, tokenizer: Any, num_train_samples: Callable[[int], int]) -> DataSets:
        """Read the data sets, and find each training sample in the store.

        Raises:
            ConfigError: the store is of another tokenizer.
            DataError: the store is damaged, or lacks a sample.
        """
        sets = super().build_datasets(tokenizer, num_train_samples)
        with all_or_none():
            rows = TeacherRows(str(self.config.data.distill_from))
            if vocabulary_hash(tokenizer, self.config.model.vocab_size) != rows.header.tokenizer:
                raise ConfigError(
                    f"the tokenizer has other tokens or ids than that of the teacher {rows.header.teacher}; "
                    "expected equal vocabularies. Choose a teacher of the same family",
                    field="distill_from",
                )
            train = TaughtSource(sets.train, rows)
            own = range(dist.get_rank(), len(train), dist.get_world_size())
            train.refuse_missing(own, self.config.training.seed)
        index = rows.header.index
        store = SetRecord(rows.folder, index, "", {"the teacher's store": index}, reads_clock=False)
        return sets._replace(train=train, records=[*sets.records, store])

    def asked(self, batch: Batch, gradient: float) -> LossMask:
        """See `Objective`. Batches of an evaluation have no teacher."""
        data, teacher = self.config.data, None
        if (taught := batch.extra_tensors.get(_TEACHER)) is not None:
            teacher = TeacherTokens(taught, data.distill_alpha, data.distill_temperature)
        return LossMask(batch.loss_mask, gradient, teacher)

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """Return means over tokens of the loss and its parts; an evaluation has cross entropy alone."""
        sums = output if output.dim() else torch.stack((output, output, torch.zeros_like(output)))
        # Each quotient owns its memory: upstream's schedules free the loss, and refuse to free a view.
        return {name: own / divisor for name, own in zip(self.reported, sums, strict=True)}
