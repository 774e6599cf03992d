"""Evaluation: means of the objective's reported values, over each validation set and over all sets."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from patch.data import BatchReader
from patch.data.order import StepReader, read_ahead
from patch.data.samples import Batch
from patch.distributed.collectives import barrier, max_over_world, sum_over
from patch.logger import get_logger
from patch.progress import LineTimer
from patch.training.guards.phases import Phase
from patch.training.state_placement import OomRetry
from patch.training.step import Report, run_schedule
from patch.training.step_data import raise_on_all_ranks, read_batches

if TYPE_CHECKING:
    from patch.training.setup import Run

_logger = get_logger(__name__)


@contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """Context for work with the model between two steps; all ranks enter and leave it together.

    The context uses the weights of the last step and keeps no gradients. The hang guard gives a rank as much
    time as a collective has; call `run.phases.enter(Phase.EVALUATION)` to signal progress.
    """
    run.phases.enter(Phase.EVALUATION)
    # Each rank starts its gathers when its host has updated: never beside other messages of the same group.
    run.optimizer.finish_param_sync()
    for stage in run.stages:
        stage.eval()
    with torch.no_grad():
        yield
    for stage in run.stages:
        stage.train()
    run.optimizer.placement.record_memory("evaluate")
    barrier(run.device)  # the next step's time limit must not count ranks that still evaluate


def evaluate(run: Run) -> dict[str, float]:
    """Evaluate each validation set once, or at most `--eval-iters` global batches of it.

    Returns:
        The metrics that `Objective.evaluated` makes of the means over all sets (`valid_loss`, `valid_ppl`).
        If VALID_DATASET_PATH has weights, these are weighted means over the sets. With several sets, also
        `valid_loss/NAME` etc. for each set. `valid_tokens` is the count over all sets. Equal on all ranks.
    Raises:
        DataError: on all ranks, if any rank cannot read its data.
    """
    assert run.data.valid_readers, "there is something to evaluate"
    with evaluating(run):
        found = [
            _sums_over_set(run, f"the validation set {name}", reader)
            for name, reader in run.data.valid_readers.items()
        ]
    sums, counts = zip(*found, strict=True)
    data, record = run.data, dict[str, float]()
    of_sets = [[total / max(count, 1.0) for total in own] for own, count in zip(sums, counts, strict=True)]
    if data.valid_weights is None:
        means = [sum(column) / max(sum(counts), 1.0) for column in zip(*sums, strict=True)]
    else:
        total, columns = sum(data.valid_weights), zip(*of_sets, strict=True)
        means = [sum(map(operator.mul, column, data.valid_weights)) / total for column in columns]
    named = {"": means}
    if len(of_sets) > 1:
        named |= {f"/{name}": own for name, own in zip(data.valid_readers, of_sets, strict=True)}
    for ending, own in named.items():
        metrics = data.objective.evaluated(dict(zip(data.objective.reported, own, strict=True)))
        record |= {f"{key}{ending}": value for key, value in metrics.items()}
    return {**record, f"valid_{data.objective.unit}": sum(counts)}


def _sums_over_set(run: Run, name: str, reader: BatchReader) -> tuple[list[float], float]:
    """Return the sums of the reported values over a set, and its count; the same on all ranks."""
    names, count = run.data.objective.reported, 0.0
    totals = [0.0] * len(names)
    for batches, counted in global_batches(run, reader, name, run.config.data.eval_iters):
        run.data.objective.before_step(run, batches)
        reports = forward_only(run, batches)
        # Stages before the last have no reports.
        own = [sum(each[name].item() for each in reports) if reports else -math.inf for name in names]
        sums = sum_over(run.groups.dp_cp, own, run.device)
        totals = [total + each for total, each in zip(totals, sums, strict=True)]
        count += counted
    return max_over_world(totals, run.device), count


def global_batches(
    run: Run, reader: BatchReader, name: str, limit: int | None = None, *, work: str | None = None
) -> Iterator[tuple[list[Batch], float]]:
    """Yield this rank's micro-batches of each global batch of a set, and their count; inside `evaluating`.

    Args:
        name: the name of the set, for errors.
        limit: the largest number of global batches, or None for all.
        work: a name for the work, whose progress is then logged, or None.
    """
    steps, timer = range(len(reader) if limit is None else min(limit, len(reader))), LineTimer()
    with read_ahead(reader, steps, run.config.data.data_prefetch) as ahead:
        for index in steps:
            run.phases.enter(Phase.EVALUATION)
            yield _read_global_batch(run, ahead, index, name)
            if work is not None and timer.is_due():
                _logger.info("%s: %d of %d steps", work, index + 1, len(reader))


def _read_global_batch(run: Run, reader: StepReader, index: int, name: str) -> tuple[list[Batch], float]:
    """Return this rank's micro-batches of a global batch, and the count over the micro-batches of all ranks.

    The last global batch of a set is padded with samples without learned tokens. Micro-batches with only
    such samples on every rank are dropped, unless interleaved stages need their fixed number.

    Raises:
        DataError: on all ranks, with the `name` of the set, if any rank cannot read.
    """
    batches, error = read_batches(reader, index)
    of_batches = [run.data.objective.count(batch) for batch in batches]
    if error is not None:
        of_batches = [math.nan] * run.config.num_micro_batches
    of_batches = sum_over(run.groups.dp_cp, of_batches, run.device)
    counted = sum(of_batches)
    raise_on_all_ranks(error, counted, name, run.groups.dp_cp)
    if run.config.virtual_pipeline_size > 1:
        return batches, counted
    num_needed = max((number for number, count in enumerate(of_batches, 1) if count), default=1)
    return batches[:num_needed], counted


def forward_only(run: Run, batches: list[Batch]) -> list[Report]:
    """Return the reports of these micro-batches on the last stage; retry if ranks run out of memory."""
    retry = OomRetry(run.optimizer, "the evaluation", has_backward=False)
    for _ in retry.attempts():
        with retry.computing() as reports:
            reports += run_schedule(run, batches, 1.0, loss_scale=None)
        retry.start_agreement()
    return reports
