"""The pass of a teacher over a training set: it writes the store that students learn from.

It is a job without training, with the teacher's own layout. For each token with a loss it stores the K
likeliest tokens (`patch.storage.teacher_store`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from patch.checks.run_length import num_train_samples
from patch.config.schema import RunConfig
from patch.data import Batch, BatchReader
from patch.data.order import read_ahead
from patch.data.samples import SampleSource
from patch.distributed.collectives import all_or_none
from patch.distributed.context_group import Zigzag
from patch.distributed.groups import shutdown
from patch.errors import DataError
from patch.logger import get_logger
from patch.model import LikeliestTokens, LlamaModel, PackedSequences
from patch.progress import LineTimer
from patch.storage.teacher_store import TeacherWriter
from patch.text import size_text
from patch.training.evaluation import evaluating, forward_only, read_global_batch
from patch.training.guards.phases import Phase
from patch.training.objectives.distillation import digest_of, vocabulary_hash
from patch.training.objectives.objective import Objective
from patch.training.setup import Run
from patch.training.tasks.suite import run_of_weights

_logger = get_logger(__name__)


class TeacherPass(NamedTuple):
    """Settings of a teacher's pass: the new folder, the number of tokens (K), and the temperature."""

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
