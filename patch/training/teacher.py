"""The pass of a teacher over a training set: it writes the store that students learn from.

It is a job without training, with the teacher's own layout. For each token with a loss it stores the K
likeliest tokens (`patch.storage.teacher_store`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from patch.checks.run_length import num_train_samples
from patch.config.schema import RunConfig
from patch.data.pretraining.provenance import vocabulary_hash
from patch.data.samples import SampleSource
from patch.distributed.collectives import all_or_none
from patch.distributed.context_group import Zigzag
from patch.distributed.groups import shutdown
from patch.errors import DataError
from patch.logger import get_logger
from patch.model import LikeliestTokens
from patch.storage.teacher_store import TeacherWriter
from patch.text import size_text
from patch.training.evaluation import evaluating, forward_only, global_batches
from patch.training.objectives.distillation import digest_of
from patch.training.objectives.objective import TokenQuery
from patch.training.setup import Run
from patch.training.tasks.suite import run_of_weights

_logger = get_logger(__name__)


def write_store(config: RunConfig, folder: Path, top_k: int, temperature: float) -> None:
    """Join a job, write the store of the weights at --load and the training set, leave the job.

    The store is a new folder, with the `top_k` likeliest tokens at a temperature. Rank 0 writes; other ranks
    need no access to the folder.

    Raises:
        PatchError: weights, tokenizer or data cannot be read, or the store cannot be written; on all ranks.
    """
    run = run_of_weights(config)
    run.data.objective = objective = TokenQuery(
        config, lambda batch: LikeliestTokens(batch.loss_mask, top_k, temperature)
    )
    source = objective.build_datasets(run.tokenizer, partial(_num_samples, config)).train
    facts = {
        "teacher": str(config.checkpoint.load), "vocab_size": config.model.vocab_size,
        "tokenizer": vocabulary_hash(run.tokenizer, config.model.vocab_size),
        "seed": config.training.seed, "temperature": temperature, "top_k": top_k,
    }  # fmt: skip
    writer: TeacherWriter | None = None
    with ExitStack() as stack, evaluating(run):
        with _written(folder):
            if dist.get_rank() == 0:
                writer = stack.enter_context(closing(TeacherWriter(folder)))
        for first, found in _likeliest_of(run, source, 2 * top_k + 1):
            with _written(folder):
                if writer is not None:
                    _add(writer, source, first, found.cpu())
        with _written(folder):
            if writer is not None:
                header = writer.publish(facts)
                size = size_text(header.num_bytes)
                _logger.info("%s: %d rows, %d tokens, %s", folder, header.rows, header.tokens, size)
    shutdown()


def _num_samples(config: RunConfig, samples_per_epoch: int) -> int:
    """Return the samples of a student's run; of rows at least one epoch."""
    least = samples_per_epoch if config.data.dataset_type == "raw" else 0
    return max(least, num_train_samples(config, samples_per_epoch))


def _likeliest_of(run: Run, source: SampleSource, width: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first of DP x B samples, and their results [DP B, S, width], equal on all ranks."""
    training, groups, length = run.config.training, run.groups, run.config.sample_length
    size, reader = training.micro_batch_size, run.data.objective.reader(source, groups)
    shape = groups.dp.size() * size, length, width
    positions = Zigzag.of(groups.cp).cut(torch.arange(length), 0).to(run.device)
    own = slice(groups.dp.rank() * size, (groups.dp.rank() + 1) * size)
    steps = global_batches(run, reader, "the training set", work="teacher")
    for begin, (batches, _) in zip(count(0, training.global_batch_size), steps, strict=False):
        reports = forward_only(run, batches)
        for number in range(len(batches)):
            whole = torch.zeros(shape, device=run.device)
            if reports and not groups.tp.rank():  # other TP ranks have the same, earlier stages have none
                whole[own, positions] = reports[number]["found"]
            dist.all_reduce(whole)
            yield begin + number * shape[0], whole


def _add(writer: TeacherWriter, source: SampleSource, first: int, found: torch.Tensor) -> None:
    """Add samples from `first` on with their results [n, S, 2 K + 1]; the last ones may only fill a batch."""
    for index, result in enumerate(found[: len(source) - first], first):
        sample = source[index]
        if (digest := digest_of(sample)) is not None:
            learned = result[sample.loss_mask != 0]
            writer.add(digest, learned.numpy().tobytes(), len(learned))


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Context in which rank 0 writes to the store; errors are raised on all ranks."""
    with all_or_none():
        try:
            yield
        except OSError as error:
            why = f"{error.strerror or error}; make room there, or name another folder"
            raise DataError(f"the store {folder} cannot be written: {why}") from error
