"""The schedule of a pipeline: the order of passes, what is in flight, idle time.

The order is that of megatron-core's schedules (1F1B, interleaved 1F1B; schedules.py:738-825). A process
never waits for another except for what it receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from patch.config import RunConfig


class Pass(NamedTuple):
    """The forward or the backward of one micro-batch through one stage."""

    is_forward: bool
    chunk: int
    """Number among the stages of its process, counted in the order of the model."""
    micro_batch: int


class Moment(NamedTuple):
    """A pass with the micro-batches that its process holds meanwhile, this pass's own included."""

    is_forward: bool
    chunk: int
    in_flight: tuple[int, ...]
    """For each chunk: micro-batches whose forward has begun and whose backward has not ended."""


class Schedule(NamedTuple):
    """The sizes that decide the order of passes. Stage s of the model is chunk s // PP of process s % PP."""

    pp_size: int
    vp_size: int
    """Stages of a process."""
    num_micro_batches: int
    group_size: int
    """Micro-batches that pass one chunk before the process changes to its next one."""

    @staticmethod
    def of(config: RunConfig) -> Schedule:
        """The schedule of a run."""
        pp_size = config.parallel.pipeline_model_parallel_size
        count, group = config.num_micro_batches, config.micro_batch_group
        return Schedule(pp_size, config.virtual_pipeline_size, count, group)

    @property
    def formula(self) -> float:
        """Idle time over computing time if all stages take equally long: (p - 1) / (v m)."""
        return (self.pp_size - 1) / (self.vp_size * self.num_micro_batches)

    def passes(self, rank: int) -> Iterator[Pass]:
        """The passes of a process of this pipeline rank, in order."""
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
        """Forwards before the first backward, less the one that comes just before it."""
        after = self.pp_size - rank - 1
        return after if self.vp_size == 1 else 2 * after + (self.vp_size - 1) * self.group_size


@cache
def moments(schedule: Schedule, rank: int) -> frozenset[Moment]:
    """The micro-batches in flight during each pass of this pipeline rank, each case once."""
    in_flight, found = [0] * schedule.vp_size, set()
    for is_forward, chunk, _ in schedule.passes(rank):
        in_flight[chunk] += is_forward
        found.add(Moment(is_forward, chunk, tuple(in_flight)))
        in_flight[chunk] -= not is_forward
    return frozenset(found)


class Timing(NamedTuple):
    """Times of one step without its update, in the unit of the costs."""

    step: float
    """From the first forward to the last backward."""
    computing: list[float]
    """Computing time of each process."""
    ends: list[float]
    """End of each process's last pass."""

    @property
    def bubble(self) -> float:
        """Idle time of all processes over their computing time."""
        computing = sum(self.computing)
        return (self.step * len(self.computing) - computing) / computing


def simulate(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], message: float = 0.0
) -> Timing:
    """The times of a step, pass by pass: each begins when its process and its input are ready.

    Args:
        schedule: the order of passes.
        forward: time of a forward of each stage, in the order of the model.
        backward: the same of a backward.
        message: time of a message between neighbouring stages, during which both may compute.
    """
    pp_size, last = schedule.pp_size, schedule.pp_size * schedule.vp_size - 1
    ended: dict[tuple[bool, int, int], float] = {}
    clocks, computing = [0.0] * pp_size, [0.0] * pp_size
    queues = [schedule.passes(rank) for rank in range(pp_size)]
    upcoming: list[Pass | None] = [next(queue) for queue in queues]
    while any(upcoming):
        for rank, queue in enumerate(queues):
            while (own := upcoming[rank]) is not None:
                stage = own.chunk * pp_size + rank
                needed = _input_of(own, stage, last)
                if needed is not None and needed not in ended:
                    break
                cost = (forward if own.is_forward else backward)[stage]
                clocks[rank] = max(clocks[rank], ended[needed] + message if needed else 0.0) + cost
                computing[rank] += cost
                ended[own.is_forward, stage, own.micro_batch] = clocks[rank]
                upcoming[rank] = next(queue, None)
    return Timing(max(clocks), computing, clocks)


def _input_of(own: Pass, stage: int, last: int) -> tuple[bool, int, int] | None:
    """The pass of a neighbour whose result this one needs; a backward's own forward is always done before."""
    neighbour = stage - 1 if own.is_forward else stage + 1
    return (own.is_forward, neighbour, own.micro_batch) if 0 <= neighbour <= last else None
