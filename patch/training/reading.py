"""Reads the batches of a step; an error of one rank is raised on all, without a collective for it.

The number of learned tokens is summed over ranks anyway; a rank that cannot read its data adds NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch.distributed as dist

from patch.data import Batch
from patch.data.prefetch import StepReader
from patch.data.samples import learned_tokens
from patch.distributed.collectives import on_all_ranks
from patch.errors import DataError


class Reading(NamedTuple):
    """This rank's micro-batches of a step, or why they could not be read."""

    batches: list[Batch]
    error: Exception | None = None

    @property
    def learned(self) -> float:
        """Learned tokens of these micro-batches; NaN, which a sum over ranks keeps, after an error."""
        return math.nan if self.error is not None else learned_tokens(self.batches)

    def raise_together(self, learned: float, what: str, group: dist.ProcessGroup) -> None:
        """Raise on all ranks of a group if one of them could not read.

        Ranks of other groups read the same data, and so raise too, unless it is this machine that cannot.

        Args:
            learned: the sum of `learned` over the group.
            what: the step, for the message.
            group: the ranks that read different data.

        Raises:
            Exception: this rank's error.
            DataError: on the ranks that could read.
        """
        if not math.isnan(learned):
            return
        error = self.error or DataError(
            f"another rank cannot read the data of {what}; its own message says why"
        )
        raise on_all_ranks(error) if group.size() == dist.get_world_size() else error


def read(reader: StepReader, iteration: int) -> Reading:
    """This rank's micro-batches of a step; an error is kept for `raise_together`.

    Args:
        reader: gives the micro-batches.
        iteration: counted from 0.
    """
    try:
        return Reading(reader.step(iteration))
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error
        return Reading([], error)
