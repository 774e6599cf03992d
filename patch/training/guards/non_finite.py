"""Steps whose gradients are not finite: the run stops, or skips the update.

Finite steps pay nothing: the gradient norm is computed anyway, and is equal on all ranks. Only after a
non-finite step do ranks exchange which losses were not finite. If all losses were finite, the step is
computed again, to find the ranks whose gradients are not finite before the reduction. That also reveals a
fault that does not repeat, such as a broken device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from patch.distributed.collectives import all_gather_object, on_all_ranks
from patch.errors import TrainingError
from patch.logger import get_logger

if TYPE_CHECKING:
    from patch.training.setup import Run
    from patch.training.step_data import StepBatches

_logger = get_logger(__name__)

MOST_SKIPS = 10
"""Consecutive skipped steps that end the run: then the weights are at fault, not the data."""
_MOST_PLACES = 8
"""Maximum number of samples whose places in the data a message names."""


def handle_non_finite(
    run: Run,
    work: StepBatches,
    losses: Sequence[torch.Tensor],
    grad_norm: float,
    repeat: Callable[[], bool],
) -> None:
    """Report a step whose gradient norm is not finite, and stop the run or count the skip; a collective.

    Args:
        losses: losses of this rank's micro-batches; empty on stages before the last.
        repeat: collective that computes the step again and returns whether this rank's gradients are finite.
    Raises:
        TrainingError: on all ranks, if the run must stop.
    """
    where = _bad_losses(run, work, losses) or _bad_gradients(run, work, repeat)
    message = f"step {work.iteration + 1}: gradient norm {grad_norm}, expected a finite number; {where}."
    run.num_skips += 1
    if run.config.training.on_non_finite == "stop":
        message += (
            " The weights are those of the step before. Lower --lr, raise --lr-warmup-iters, look at these "
            "samples, or have such steps skipped"
        )
        raise on_all_ranks(TrainingError(message, field="on_non_finite"))
    if run.num_skips >= MOST_SKIPS:
        message += (
            f" This is step {run.num_skips} in a row without an update; the weights are those before them. "
            "Lower --lr, or go back to an older checkpoint"
        )
        raise on_all_ranks(TrainingError(message))
    _logger.warning("%s The step is skipped, number %d in a row", message, run.num_skips)


def named_samples(run: Run, numbers: Sequence[int]) -> str:
    """Format ascending sample numbers, counted from 0; the first few get their places in the data."""
    place = run.data.sample_place
    named = [
        str(number) if place is None else f"{number} ({place(number)})" for number in numbers[:_MOST_PLACES]
    ]
    return ", ".join(named + _ranges(numbers[_MOST_PLACES:]))


def samples_of_step(run: Run, iteration: int) -> range:
    """Return the numbers in the run of a step's samples over all ranks; steps count from 0."""
    return range(run.consumed_samples(iteration), run.consumed_samples(iteration + 1))


def _bad_losses(run: Run, work: StepBatches, losses: Sequence[torch.Tensor]) -> str:
    """Describe the ranks and samples whose loss is not finite; "" if there are none."""
    size, dp = run.config.training.micro_batch_size, run.groups.dp
    first = samples_of_step(run, work.iteration)[0]
    bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss.item())]
    begins = [first + (number * dp.size() + dp.rank()) * size for number in bad]
    found = all_gather_object([begin + offset for begin in begins for offset in range(size)])
    samples = sorted({number for numbers in found for number in numbers})
    if not samples:
        return ""
    ranks = _ranges([rank for rank, numbers in enumerate(found) if numbers])
    return f"the loss is not finite on rank(s) {', '.join(ranks)}, of sample(s) {named_samples(run, samples)}"


def _bad_gradients(run: Run, work: StepBatches, repeat: Callable[[], bool]) -> str:
    """Compute the step again and describe the ranks whose gradients are not finite."""
    found = all_gather_object(repeat())
    ranks = _ranges([rank for rank, is_finite in enumerate(found) if not is_finite])
    if not ranks:
        return (
            "all losses are finite, and all gradients too when the step is computed again: a fault that does "
            "not repeat, as of a broken device or link"
        )
    samples = named_samples(run, samples_of_step(run, work.iteration))
    return f"all losses are finite, the gradients are not on rank(s) {', '.join(ranks)}; samples {samples}"


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Format ascending numbers, such as ["3", "5 to 9"]."""
    borders = [index for index, (one, next_) in enumerate(pairwise(numbers), 1) if next_ != one + 1]
    parts = [numbers[begin:end] for begin, end in pairwise([0, *borders, len(numbers)])] if numbers else []
    return [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts]
