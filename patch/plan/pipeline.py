"""The schedule of a pipeline: the order of passes, micro-batches in flight, idle time.

The order is that of megatron-core's schedules (1F1B, interleaved 1F1B; schedules.py:738-825). A rank waits
only for its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from patch.config import RunConfig


class Pass(NamedTuple):
    """Forward or backward of one micro-batch through one stage."""

    is_forward: bool
    chunk: int
    """Index among the rank's virtual stages, in the order of the model."""
    micro_batch: int


class Schedule(NamedTuple):
    """The sizes that decide the order of passes. Stage s of the model is chunk s // PP of rank s % PP."""

    pp_size: int
    vp_size: int
    """Virtual stages of a rank."""
    num_micro_batches: int
    group_size: int
    """Micro-batches that pass one chunk before the rank changes to its next chunk."""
    all_forward: bool = False
    """Whether all forwards come before the first backward (GPipe, arXiv:1811.06965)."""

    @staticmethod
    def of(config: RunConfig) -> Schedule:
        """Return the schedule of a run."""
        pp_size = config.parallel.pipeline_model_parallel_size
        count, group = config.num_micro_batches, config.micro_batch_group
        return Schedule(pp_size, config.virtual_pipeline_size, count, group)

    @property
    def formula(self) -> float:
        """Idle time over computing time if all stages take equally long: (p - 1) / (v m)."""
        return (self.pp_size - 1) / (self.vp_size * self.num_micro_batches)

    def passes(self, rank: int) -> Iterator[Pass]:
        """Yield the passes of a pipeline rank in order."""
        forwards = list(self._forwards())
        backwards = [(self.vp_size - 1 - chunk, micro_batch) for chunk, micro_batch in forwards]
        warm_up = min(self._warm_up(rank), len(forwards))
        for index in range(len(forwards) + warm_up):
            if index < len(forwards):
                yield Pass(True, *forwards[index])
            if index >= warm_up:
                yield Pass(False, *backwards[index - warm_up])

    def _forwards(self) -> Iterator[tuple[int, int]]:
        """Chunk and micro-batch of each forward; backwards have the same order with reversed chunks."""
        for first in range(0, self.num_micro_batches, self.group_size):
            group = range(first, min(first + self.group_size, self.num_micro_batches))
            for chunk in range(self.vp_size):
                yield from ((chunk, micro_batch) for micro_batch in group)

    def _warm_up(self, rank: int) -> int:
        """Forwards before the first 1F1B pair."""
        if self.all_forward:
            return self.vp_size * self.num_micro_batches
        after = self.pp_size - rank - 1
        return after if self.vp_size == 1 else 2 * after + (self.vp_size - 1) * self.group_size


@cache
def moments(schedule: Schedule, rank: int) -> frozenset[tuple[bool, int, tuple[int, ...]]]:
    """Return the distinct moments of a rank: whether a pass is a forward, its chunk, and per chunk the
    micro-batches whose forward has begun and whose backward has not ended.
    """
    in_flight, found = [0] * schedule.vp_size, set()
    for is_forward, chunk, _ in schedule.passes(rank):
        in_flight[chunk] += is_forward
        found.add((is_forward, chunk, tuple(in_flight)))
        in_flight[chunk] -= not is_forward
    return frozenset(found)


PassKey = tuple[bool, int, int]


class Timing(NamedTuple):
    """Times of one step without its update, in the unit of the costs."""

    step: float
    """From the first forward to the last backward."""
    computing: list[float]
    """Computing time of each rank."""
    ends: list[float]
    """End of each rank's last pass."""
    passes: dict[PassKey, float]
    """End of each pass, by (is it a forward, stage of the model, micro-batch)."""

    @property
    def bubble(self) -> float:
        """Idle time of all ranks over their computing time."""
        computing = sum(self.computing)
        return (self.step * len(self.computing) - computing) / computing


def simulate(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], message: float = 0.0
) -> Timing:
    """Return the times of a step; a pass begins when its rank and its input are ready.

    Args:
        forward, backward: time of each stage, in the order of the model.
        message: time between neighbouring stages, during which both may compute.
    """
    pp_size, last = schedule.pp_size, schedule.pp_size * schedule.vp_size - 1
    ended: dict[PassKey, float] = {}
    clocks, computing = [0.0] * pp_size, [0.0] * pp_size
    queues = [schedule.passes(rank) for rank in range(pp_size)]
    upcoming: list[Pass | None] = [next(queue) for queue in queues]
    while any(upcoming):
        for rank, queue in enumerate(queues):
            while (own := upcoming[rank]) is not None:
                stage = own.chunk * pp_size + rank
                # A neighbour's pass gives the input; a backward's own forward has always ended before.
                neighbour = stage - 1 if own.is_forward else stage + 1
                needed = (own.is_forward, neighbour, own.micro_batch) if 0 <= neighbour <= last else None
                if needed and needed not in ended:
                    break
                cost = (forward if own.is_forward else backward)[stage]
                clocks[rank] = max(clocks[rank], ended[needed] + message if needed else 0.0) + cost
                computing[rank] += cost
                ended[own.is_forward, stage, own.micro_batch] = clocks[rank]
                upcoming[rank] = next(queue, None)
    return Timing(max(clocks), computing, clocks, ended)
