"""Distillation: a student learns the likeliest tokens of a teacher (arXiv:1503.02531), stored once on disk.

The teacher's pass (`write_store`) is a job of its own, with its own model and layout. For each token with a
loss it writes the K likeliest tokens (`patch.storage.teacher_store`). The student finds each row by its
content. The loss is in `patch.model.loss` (`TeacherTokens`). Evaluations have plain cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from patch.checks.run_length import num_train_samples
from patch.config.schema import RunConfig
from patch.data import Batch, BatchReader, DataSets, Sample
from patch.data.order import read_ahead
from patch.data.samples import SampleSource
from patch.distributed.collectives import all_or_none
from patch.distributed.context_group import Zigzag
from patch.distributed.groups import shutdown
from patch.errors import ConfigError, DataError
from patch.logger import get_logger
from patch.model import LikeliestTokens, LlamaModel, LossMask, PackedSequences, TeacherTokens
from patch.progress import LineTimer
from patch.storage.teacher_store import TeacherRows, TeacherWriter
from patch.text import size_text
from patch.training.evaluation import evaluating, forward_only, read_global_batch
from patch.training.guards.phases import Phase
from patch.training.objectives.objective import Objective
from patch.training.setup import Run
from patch.training.tasks.suite import run_of_weights

_logger = get_logger(__name__)
_IDS, _LOGS = "teacher_ids", "teacher_logs"


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


def vocabulary_hash(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's tokens and their ids."""
    return sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


class TaughtSource:
    """Training samples with the teacher's log-probabilities of their tokens, as extra tensors."""

    def __init__(self, source: SampleSource, rows: TeacherRows) -> None:
        self._source, self._rows = source, rows
        self.is_shuffled = source.is_shuffled

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:
        sample, count = self._source[index], self._rows.header.top_k
        ids = torch.arange(count, dtype=torch.int32).repeat(len(sample.tokens), 1)  # all different
        logs = torch.zeros(len(sample.tokens), count + 1)
        if (digest := digest_of(sample)) is not None:
            learned = sample.loss_mask != 0
            stored = self._rows.find(digest)
            for whole, own in zip((ids, logs), stored, strict=True):
                found = torch.frombuffer(bytearray(own), dtype=whole.dtype)
                whole[learned] = found.view(-1, whole.shape[1])
        return sample._replace(extra_tensors={**sample.extra_tensors, _IDS: ids, _LOGS: logs})

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
                    "expected the same data, chat template, packing and, for pre-training, seed and number "
                    "of samples. Write it with this run's flags",
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
            if vocabulary_hash(tokenizer) != rows.header.tokenizer:
                raise ConfigError(
                    f"the tokenizer has other tokens or ids than that of the teacher {rows.header.teacher}; "
                    "expected equal vocabularies. Choose a teacher of the same family",
                    field="distill_from",
                )
            train = TaughtSource(sets.train, rows)
            own = range(dist.get_rank(), len(train), dist.get_world_size())
            train.refuse_missing(own, self.config.training.seed)
        return sets._replace(train=train)

    def forward(
        self, model: LlamaModel, batch: Batch, packed: PackedSequences | None, gradient: float
    ) -> torch.Tensor:
        """See `Objective`. Batches of an evaluation have no teacher."""
        data, teacher = self.config.data, None
        if _IDS in batch.extra_tensors:
            ids, logs = batch.extra_tensors[_IDS], batch.extra_tensors[_LOGS]
            teacher = TeacherTokens(ids, logs, data.distill_alpha, data.distill_temperature)
        learned = LossMask(batch.loss_mask, gradient, teacher)
        return model(
            batch.tokens, None, None, labels=batch.labels, loss_mask=learned, packed_seq_params=packed
        )

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """Return means over tokens of the loss and its parts; an evaluation has cross entropy alone."""
        sums = output if output.dim() else torch.stack((output, output, torch.zeros_like(output)))
        return dict(zip(self.reported, sums / divisor, strict=True))


class TeacherPass(NamedTuple):
    """What a teacher writes: the K likeliest tokens at a temperature, into a new folder."""

    folder: Path
    top_k: int
    temperature: float


class _Teacher(Objective):
    """Reports the results of `likeliest_tokens`; nothing is learned."""

    def __init__(self, config: RunConfig, asked: TeacherPass) -> None:
        super().__init__(config)
        self._asked = asked

    def forward(
        self, model: LlamaModel, batch: Batch, packed: PackedSequences | None, gradient: float
    ) -> torch.Tensor:
        asked = LikeliestTokens(batch.loss_mask, self._asked.top_k, self._asked.temperature)
        return model(
            batch.tokens, None, None, labels=batch.labels, loss_mask=asked, packed_seq_params=packed
        )

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """Return the output itself, and a zero loss that upstream's schedules require."""
        return {"loss": output.new_zeros(()), "likeliest": output}


def write_store(config: RunConfig, asked: TeacherPass) -> None:
    """Join a job, write the store of the weights at --load and the training set, leave the job.

    Rank 0 writes; other ranks need no access to the folder.

    Raises:
        PatchError: weights, tokenizer or data cannot be read, or the store cannot be written; on all ranks.
    """
    run = run_of_weights(config)
    run.data.objective = objective = _Teacher(config, asked)
    source = objective.build_datasets(run.tokenizer, partial(num_train_samples, config)).train
    facts = {
        "teacher": str(config.checkpoint.load), "vocab_size": config.model.vocab_size,
        "tokenizer": vocabulary_hash(run.tokenizer), "sequence_length": config.sample_length,
        "packing": config.data.packing, "seed": config.training.seed, "temperature": asked.temperature,
        "top_k": asked.top_k,
    }  # fmt: skip
    with ExitStack() as stack, evaluating(run):
        writers: list[TeacherWriter] = []
        with all_or_none(), _written(asked.folder):
            if dist.get_rank() == 0:
                writers.append(stack.enter_context(closing(TeacherWriter(asked.folder))))
        for first, found in _likeliest_of(run, source, asked):
            with all_or_none(), _written(asked.folder):
                for writer in writers:
                    _add(writer, source, first, found.cpu())
        with all_or_none(), _written(asked.folder):
            for writer in writers:
                header = writer.publish(facts)
                size = size_text(header.num_bytes)
                _logger.info("%s: %d rows, %d tokens, %s", asked.folder, header.rows, header.tokens, size)
    shutdown()


def _likeliest_of(run: Run, source: SampleSource, asked: TeacherPass) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first of DP x B samples, and their results [DP B, S, 2 K + 1], equal on all ranks."""
    config, groups, timer = run.config, run.groups, LineTimer()
    size, zigzag = config.training.micro_batch_size, Zigzag.of(groups.cp)
    reader = BatchReader(
        source, micro_batch_size=size, global_batch_size=config.training.global_batch_size,
        dp_rank=groups.dp.rank(), dp_size=groups.dp.size(), seed=config.training.seed, shuffle=False,
        zigzag=zigzag,
    )  # fmt: skip
    shape = groups.dp.size() * size, config.sample_length, 2 * asked.top_k + 1
    positions = zigzag.cut(torch.arange(config.sample_length), 0).to(run.device)
    own, steps = slice(groups.dp.rank() * size, (groups.dp.rank() + 1) * size), range(len(reader))
    with read_ahead(reader, steps, config.data.data_prefetch) as ahead:
        for index in steps:
            run.phases.enter(Phase.EVALUATION)
            batches, _ = read_global_batch(run, ahead, index, "the training set")
            reports = forward_only(run, batches)
            for number in range(len(batches)):
                whole = torch.zeros(shape, device=run.device)
                if reports and not groups.tp.rank():  # other TP ranks have the same, earlier stages have none
                    whole[own, positions] = reports[number]["likeliest"]
                dist.all_reduce(whole)
                yield index * config.training.global_batch_size + number * shape[0], whole
            if timer.is_due():
                _logger.info("teacher: %d of %d steps", index + 1, len(reader))


def _add(writer: TeacherWriter, source: SampleSource, first: int, found: torch.Tensor) -> None:
    """Add samples from `first` on with their results [n, S, 2 K + 1]; the last ones may only fill a batch."""
    for index, result in enumerate(found[: len(source) - first], first):
        sample = source[index]
        if (digest := digest_of(sample)) is not None:
            ids, logs = result[sample.loss_mask != 0].tensor_split([found.shape[2] // 2], dim=1)
            writer.add(digest, ids.int().numpy().tobytes(), logs.numpy().tobytes(), len(ids))


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"{error.strerror or error}; make room there, or name another folder"
        raise DataError(f"the store {folder} cannot be written: {why}") from error
