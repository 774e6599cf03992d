"""The data of a step: read and counted while the step before ends, or an error on all ranks."""

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


class StepWork(NamedTuple):
    """The data of one step."""

    iteration: int
    """Counted from 0."""
    batches: list[Batch]
    """This rank's micro-batches."""
    divisor: float
    """The objective's count in the global batch: the sum over all ranks."""
    attended_pairs: float
    """Attended pairs of the global batch's packed sequences (`patch.plan`); 0 without packing."""


class Reading(NamedTuple):
    """This rank's micro-batches of a step, or why they could not be read.

    An error of one rank is raised on all without a collective for it: what counts is summed over ranks
    anyway, and a rank that cannot read its data adds NaN.
    """

    batches: list[Batch]
    error: Exception | None = None

    def raise_together(self, count: float, what: str, group: dist.ProcessGroup) -> None:
        """Raise on all ranks of a group if one of them could not read.

        Ranks of other groups read the same data, and so raise too, unless it is this machine that cannot.

        Args:
            count: a sum over the group, to which a rank that could not read has added NaN.
            what: the step, for the message.
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


def read_batches(reader: StepReader, iteration: int) -> Reading:
    """This rank's micro-batches of a step; an error is kept for `raise_together`.

    Args:
        reader: gives the micro-batches.
        iteration: counted from 0.
    """
    try:
        return Reading(reader.step(iteration))
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error
        return Reading([], error)


def read_step(run: Run, iteration: int) -> Reading:
    """This rank's micro-batches of a step; none after the last step.

    Args:
        run: this rank's parts of the run.
        iteration: counted from 0.
    """
    if iteration >= run.config.training.train_iters:
        return Reading([])
    run.phases.enter(Phase.READING)
    with run.data.clock.waiting():
        return read_batches(run.data.train_reader, iteration)


def counts(run: Run, reading: Reading) -> list[float]:
    """The counts that these micro-batches add to a step's divisor and attended pairs, for a StepWork."""
    divisor = math.nan if reading.error is not None else sum(map(run.data.objective.count, reading.batches))
    packed = [batch.cu_seqlens.diff().tolist() for batch in reading.batches if batch.cu_seqlens is not None]
    pairs = attended_pairs(chain(*packed), run.config.model.window_size)
    # A context-parallel rank has its part of each row's tokens, but the lengths of all sequences.
    return [divisor, pairs / run.groups.cp.size()]


def take_work(run: Run, iteration: int) -> StepWork:
    """The data of a step: what was read before, otherwise read now.

    Args:
        run: this rank's parts of the run.
        iteration: counted from 0.
    Raises:
        DataError: on all ranks, if one of them cannot read it.
    """
    if run.data.upcoming is not None and run.data.upcoming.iteration == iteration:
        return run.data.upcoming
    reading = read_step(run, iteration)
    return counted_work(run, iteration, reading, sum_over(run.groups.dp_cp, counts(run, reading), run.device))


def counted_work(run: Run, iteration: int, reading: Reading, sums: list[float]) -> StepWork:
    """The data of a step that was read.

    Args:
        run: this rank's parts of the run.
        iteration: counted from 0.
        reading: its micro-batches on this rank.
        sums: `counts`, summed over the data-parallel ranks.
    Raises:
        DataError: on all ranks, if one of them could not read it.
    """
    reading.raise_together(sums[0], f"step {iteration + 1}", run.groups.dp_cp)
    return StepWork(iteration, reading.batches, *sums)
