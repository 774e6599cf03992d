"""The data of a step, read and counted while the previous step ends; read errors are raised on all ranks."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from patch.data import Batch
from patch.data.order import StepReader
from patch.distributed.collectives import on_all_ranks, sum_over
from patch.errors import DataError
from patch.plan.flops import attended_pairs
from patch.training.guards.phases import Phase

if TYPE_CHECKING:
    from patch.training.setup import Run


class BatchCounts(NamedTuple):
    """Counts of a rank's micro-batches, or, summed over the data-parallel ranks, of a global batch."""

    divisor: float
    """The objective's count; NaN if a rank could not read its data."""
    attended_pairs: float
    """Attended pairs of the packed sequences (`patch.plan`); 0 without packing."""


class StepBatches(NamedTuple):
    """The data of one step."""

    iteration: int
    """Counted from 0."""
    batches: list[Batch]
    """This rank's micro-batches."""
    divisor: float
    attended_pairs: float
    """Counts of the global batch, see `BatchCounts`."""


class ReadOutcome(NamedTuple):
    """This rank's micro-batches of a step, or the error of reading them.

    All ranks raise one rank's error without an additional collective: counts are summed over ranks anyway,
    and a rank that cannot read its data contributes NaN.
    """

    batches: list[Batch]
    error: Exception | None = None

    def raise_on_all_ranks(self, count: float, what: str, group: dist.ProcessGroup) -> None:
        """Raise on all ranks of a group if any of them could not read.

        Ranks of other groups read the same data. So they raise too, unless the failure is local to a machine.

        Args:
            count: a sum over the group; NaN if a rank could not read.
            what: name of the step, for the message.
            group: the ranks that read different data.
        Raises:
            Exception: this rank's error.
            DataError: on the ranks that could read.
        """
        if not math.isnan(count):
            return
        error = self.error or DataError(
            f"another rank cannot read the data of {what}; its own message says why"
        )
        raise on_all_ranks(error) if group.size() == dist.get_world_size() else error


def read_batches(reader: StepReader, iteration: int) -> ReadOutcome:
    """Read this rank's micro-batches of a step; an error is kept for `raise_on_all_ranks`."""
    try:
        return ReadOutcome(reader.step(iteration))
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error
        return ReadOutcome([], error)


def read_step(run: Run, iteration: int) -> ReadOutcome:
    """Read this rank's micro-batches of a step, counted from 0; none after the last step."""
    if iteration >= run.config.training.train_iters:
        return ReadOutcome([])
    run.phases.enter(Phase.READING)
    with run.data.clock.waiting():
        return read_batches(run.data.train_reader, iteration)


def counts(run: Run, reading: ReadOutcome) -> BatchCounts:
    """Count these micro-batches."""
    divisor = math.nan if reading.error is not None else sum(map(run.data.objective.count, reading.batches))
    packed = [batch.cu_seqlens.diff().tolist() for batch in reading.batches if batch.cu_seqlens is not None]
    pairs = attended_pairs(chain(*packed), run.config.model.window_size)
    # A context-parallel rank has a part of each row's tokens, but the lengths of all sequences.
    return BatchCounts(divisor, pairs / run.groups.cp.size())


def next_step_batches(run: Run, iteration: int) -> StepBatches:
    """Return the data of a step, counted from 0; read it unless it was read ahead.

    Raises:
        DataError: on all ranks, if any rank cannot read it.
    """
    if run.data.upcoming is not None and run.data.upcoming.iteration == iteration:
        return run.data.upcoming
    reading = read_step(run, iteration)
    sums = sum_over(run.groups.dp_cp, [*counts(run, reading)], run.device)
    return with_counts(run, iteration, reading, BatchCounts(*sums))


def with_counts(run: Run, iteration: int, reading: ReadOutcome, sums: BatchCounts) -> StepBatches:
    """Return the data of a step that was read; `sums` is `counts` summed over the data-parallel ranks.

    Raises:
        DataError: on all ranks, if any rank could not read it.
    """
    reading.raise_on_all_ranks(sums.divisor, f"step {iteration + 1}", run.groups.dp_cp)
    return StepBatches(iteration, reading.batches, *sums)
