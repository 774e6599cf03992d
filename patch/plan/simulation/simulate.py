"""The time of a training step by simulation: what of its messages, copies and idle time nothing hides."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from patch.plan.simulation.step import Step
from patch.plan.simulation.streams import Span, Task, simulate
from patch.plan.simulation.tasks import NUM_STEPS, step_tasks


@dataclass(frozen=True)
class StepResult:
    """A step after many others."""

    seconds: float
    computing: float
    """Of the process that computes longest."""
    tasks: list[Task] = field(repr=False)
    spans: list[Span] = field(repr=False)
    """Of all simulated steps; the last one counts."""

    @property
    def exposed(self) -> float:
        """Seconds that nothing hides: messages, copies, the pipeline's idle time, slower compute."""
        return self.seconds - self.computing


def simulate_step(step: Step) -> StepResult:
    """The time of a step that follows another: from norm to norm."""
    tasks, ends = step_tasks(step)
    ranks = range(step.schedule.pp_size)
    slowed = [(("compute", rank), (other, rank)) for rank in ranks for other in ("data", "ring")]
    spans = simulate(tasks, dict.fromkeys(slowed, step.contention) if step.contention != 1.0 else None)
    seconds = spans[ends[NUM_STEPS - 1]].end - spans[ends[NUM_STEPS - 2]].end
    return StepResult(seconds, max(map(step.computing, ranks)), tasks, spans)


def step_seconds(step: Step) -> float:
    """The time of a step with many micro-batches, from two with fewer.

    Once the pipeline is full, each round of micro-batches takes as long as the round before.
    """
    schedule = step.schedule
    round_size = max(schedule.pp_size, schedule.group_size)
    few, many = round_size, 2 * round_size
    rounds, left = divmod(schedule.num_micro_batches - many, round_size)
    if rounds < 1 or left:
        return simulate_step(step).seconds
    first, second = (
        simulate_step(replace(step, schedule=schedule._replace(num_micro_batches=count))).seconds
        for count in (few, many)
    )
    return second + rounds * (second - first)
