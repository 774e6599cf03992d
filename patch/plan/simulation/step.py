"""What a simulated step is made of: stages, their parts and buckets, and what everything costs.

Costs are seconds, wherever they come from: measured, or computed from FLOPs, bytes and rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from patch.config.choices import ZeroStage
from patch.plan.memory import NUM_STAGING
from patch.plan.pipeline import Schedule


class Cost(NamedTuple):
    """Seconds of work on a bucket."""

    latency: float = 0.0
    per_element: float = 0.0

    def of(self, numel: int) -> float:
        """Seconds for so many elements."""
        return self.latency + self.per_element * numel


class Part(NamedTuple):
    """Work of a stage that uses its own weights; seconds of a micro-batch."""

    forward: float
    backward: float
    exchanges: int = 0
    """Of context parallelism: steps of the ring; a pass is computed in one piece more."""
    exchange: float = 0.0
    """Seconds of a message of the ring: keys and values."""
    gradient_exchange: float = 0.0
    """The same of their gradients, which backward sends too."""


class BucketUse(NamedTuple):
    """A bucket, and the parts of its stage that use it."""

    numel: int
    first_part: int
    """The next forward needs it there, and there backward completes it."""
    last_part: int
    """Backward writes to it from there on."""


class Stage(NamedTuple):
    """A pipeline stage."""

    parts: tuple[Part, ...]
    """In the order of forward."""
    buckets: tuple[BucketUse, ...]
    """In the order of backward."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Optimizer states on the host."""

    fraction: float
    """Share of the elements: those that backward completes first. Exact to one bucket."""
    down: Cost
    """The copy of a gradient, and of what else the host needs."""
    update: Cost
    up: Cost
    """The copy of new weights."""
    is_overlapped: bool = True
    """Else compute does nothing while copies and updates are made, after the norm."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step, and what everything in it costs."""

    schedule: Schedule
    stages: tuple[Stage, ...]
    """In the order of the model."""
    zero_stage: ZeroStage
    reduce: Cost
    """A reduce-scatter; at ZeRO stage `none` an all-reduce."""
    across: Cost = Cost()
    """With several instances of the distributed optimizer: their sum of a bucket, after its last one."""
    gather: Cost = Cost()
    """An all-gather of new weights; at stage `none` there is none."""
    update: Cost = Cost()
    norm: float = 0.0
    """Seconds of the norm's all-reduce, the host's wait included."""
    message: float = 0.0
    """Seconds of a message between stages."""
    are_gradients_overlapped: bool = True
    """Else they are reduced after backward."""
    are_weights_overlapped: bool = True
    """Else compute waits for all of them."""
    num_staging: int = NUM_STAGING
    """Of stage `gradients`: buffers of gradients that backward fills and reductions empty."""
    contention: float = 1.0
    """Compute takes this factor longer while messages travel."""
    host: Host | None = None

    def stages_of(self, rank: int) -> range:
        """Indices of the stages of a process."""
        return range(rank, len(self.stages), self.schedule.pp_size)

    def buckets_of(self, rank: int) -> list[tuple[int, int]]:
        """The buckets of a process as (stage, bucket), in the order of the next forward."""
        return [(s, b) for s in self.stages_of(rank) for b in reversed(range(len(self.stages[s].buckets)))]

    def numel(self, place: tuple[int, int]) -> int:
        """Elements of a bucket."""
        return self.stages[place[0]].buckets[place[1]].numel

    def on_host(self, rank: int) -> set[tuple[int, int]]:
        """The buckets of a process whose states are on the host."""
        places = self.buckets_of(rank)
        left = (self.host.fraction if self.host else 0.0) * sum(map(self.numel, places))
        found = set()
        for place in reversed(places):
            if left < self.numel(place) / 2:
                break
            left -= self.numel(place)
            found.add(place)
        return found

    def computing(self, rank: int) -> float:
        """Seconds of passes and updates of a process, if nothing else were to do."""
        parts = [part for stage in self.stages_of(rank) for part in self.stages[stage].parts]
        passes = self.schedule.num_micro_batches * sum(part.forward + part.backward for part in parts)
        here = set(self.buckets_of(rank)) - self.on_host(rank)
        return passes + sum(self.update.of(self.numel(place)) for place in here)
