"""The tasks of a training step on the streams of each process of a pipeline, and what they wait for.

    compute             passes in the order of the schedule (pipeline.py), then updates
    data                reductions and gathers of buckets, the norm: one queue, as in one communicator
    forward, backward   messages to the next and to the previous stage
    ring                exchanges of context parallelism
    down, host, up      copies of offloaded gradients, updates on the host, copies of new weights

A bucket's reduction starts when backward has completed it and all earlier ones. The norm waits for the
reductions of all processes, updates wait for the norm; updates and gathers follow the order of the next
forward, in which each part waits for the gathers of its own weights. A pass that waits for nothing is one
task. All data-parallel peers of a process are taken to do the same at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from patch.config.choices import ZeroStage
from patch.plan.pipeline import Pass
from patch.plan.simulation.step import Part, Step
from patch.plan.simulation.streams import Stream, Task

NUM_STEPS = 2
"""The norm waits for all passes and reductions of its step, so a step is what comes between two norms."""


def step_tasks(step: Step) -> tuple[list[Task], list[int]]:
    """The tasks of consecutive steps, and the index of the one that ends each step's gradients (the norm)."""
    builder = _Builder(step)
    for number in range(NUM_STEPS):
        builder.add_step(number)
    return builder.tasks(), [builder.index["norm", number, 0] for number in range(NUM_STEPS)]


class _Added(NamedTuple):
    stream: Stream
    seconds: float
    after: tuple[Any, ...]
    """Indices of tasks, or keys of tasks that may be added later."""
    label: str


class _Builder:
    def __init__(self, step: Step) -> None:
        self._step = step
        self._added: list[_Added] = []
        self.index: dict[Any, int] = {}
        """Of tasks that others wait for, by key."""
        self._previous: dict[Stream, int] = {}
        """The task that each stream got last."""
        self._started: list[list[int]] = [[] for _ in range(step.schedule.pp_size)]
        """Reductions of each process, in their order."""

    def tasks(self) -> list[Task]:
        """What was added."""
        return [
            Task(own.stream, own.seconds, tuple(self.index.get(key, key) for key in own.after), own.label)
            for own in self._added
        ]

    def _add(
        self, name: str, rank: int, seconds: float, after: Iterable[Any], label: str, key: Any = None
    ) -> int:
        """Add a task to a stream of a process; its index, under which `key` finds it too."""
        index, stream = len(self._added), (name, rank)
        self._added.append(_Added(stream, seconds, tuple(after), label))
        self._previous[stream] = index
        if key is not None:
            self.index[key] = index
        return index

    def add_step(self, number: int) -> None:
        """Add the passes, reductions, updates and gathers of all processes."""
        step = self._step
        for rank in range(step.schedule.pp_size):
            for own in step.schedule.passes(rank):
                self._add_pass(number, rank, own)
            if not step.are_gradients_overlapped:
                for stage, bucket in reversed(step.buckets_of(rank)):
                    self._add_reduction("compute", number, rank, (stage, bucket), [], True)
        passed = [self._previous["compute", rank] for rank in range(step.schedule.pp_size)]
        for rank in range(step.schedule.pp_size):
            self._add_update(number, rank, passed)

    def _add_pass(self, number: int, rank: int, own: Pass) -> None:
        """A pass after its input has come, and the message with its output."""
        schedule, last_stage = self._step.schedule, len(self._step.stages) - 1
        stage = own.chunk * schedule.pp_size + rank
        direction, towards = ("forward", 1) if own.is_forward else ("backward", -1)
        source, target = stage - towards, stage + towards
        needed = [(direction, number, source, own.micro_batch)] if 0 <= source <= last_stage else []
        add = self._add_forward if own.is_forward else self._add_backward
        done = add(number, rank, stage, own.micro_batch, needed)
        self.index[direction, number, stage, own.micro_batch] = done
        if 0 <= target <= last_stage and schedule.pp_size > 1:
            key = direction, number, stage, own.micro_batch
            self._add(direction, rank, self._step.message, [done], f"message {stage} to {target}", key)

    def _add_forward(
        self, number: int, rank: int, stage: int, micro_batch: int, needed: Sequence[Any]
    ) -> int:
        parts, buckets = self._step.stages[stage]
        label, waits = f"forward {stage}.{micro_batch}", micro_batch == 0 and number > 0
        if not waits and not any(part.exchanges for part in parts):
            return self._add("compute", rank, sum(part.forward for part in parts), needed, label)
        for position, part in enumerate(parts):
            gathers = [
                ("gather", number - 1, stage, bucket)
                for bucket, use in enumerate(buckets)
                if waits and use.first_part == position
            ]
            done = self._add_part(rank, part, [*needed, *gathers], f"{label} part {position}", True)
            needed = []
        return done

    def _add_backward(
        self, number: int, rank: int, stage: int, micro_batch: int, needed: Sequence[Any]
    ) -> int:
        step, (parts, buckets) = self._step, self._step.stages[stage]
        is_staged, label = step.zero_stage is ZeroStage.GRADIENTS, f"backward {stage}.{micro_batch}"
        is_last = micro_batch == step.schedule.num_micro_batches - 1
        reduces = step.are_gradients_overlapped and (is_last or is_staged)
        if not reduces and not any(part.exchanges for part in parts):
            return self._add("compute", rank, sum(part.backward for part in parts), needed, label)
        started = self._started[rank]
        num_before = len(started)
        for position in reversed(range(len(parts))):
            done = self._add_part(rank, parts[position], needed, f"{label} part {position}", False)
            needed = []
            filled = sum(use.last_part >= position for use in buckets)
            returned = min(num_before + filled - step.num_staging, len(started))
            if is_staged and reduces and returned > 0:  # its gradients take the buffer that comes back next
                done = self._add("compute", rank, 0.0, [started[returned - 1]], "staging buffer")
            for bucket, use in enumerate(buckets):
                if reduces and use.first_part == position:
                    self._add_reduction("data", number, rank, (stage, bucket), [done], is_last)
        return done

    def _add_part(self, rank: int, part: Part, needed: Sequence[Any], label: str, is_forward: bool) -> int:
        """Compute; with a ring in pieces, each of which hides the message that the next one needs.

        Backward also sends the gradient of each piece but a rank's own home, which must be there at the end.
        """
        seconds = (part.forward if is_forward else part.backward) / (part.exchanges + 1)
        before = [self._previous[stream]] if (stream := ("compute", rank)) in self._previous else []
        done, home = self._add("compute", rank, seconds, needed, label), None
        begun: Sequence[Any] = [*before, *needed]
        for _ in range(part.exchanges):
            arrived = self._add("ring", rank, part.exchange, begun, "exchange of keys and values")
            if not is_forward:
                home = self._add("ring", rank, part.gradient_exchange, [done], "exchange of their gradients")
            begun = [done, arrived]
            done = self._add("compute", rank, seconds, [arrived], label)
        return done if home is None else self._add("compute", rank, 0.0, [home], label)

    def _add_reduction(
        self,
        stream: str,
        number: int,
        rank: int,
        place: tuple[int, int],
        after: Sequence[Any],
        is_last: bool,
    ) -> None:
        """The reduction of a bucket; the key finds that of the last micro-batch."""
        numel, label = self._step.numel(place), "reduce {}.{}".format(*place)
        seconds = self._step.reduce.of(numel) + (self._step.across.of(numel) if is_last else 0.0)
        self._started[rank].append(self._add(stream, rank, seconds, after, label, ("reduce", number, *place)))

    def _add_update(self, number: int, rank: int, passed: list[int]) -> None:
        """The norm, updates on device and host, and gathers; `passed`: the last passes of all processes."""
        step, on_host = self._step, self._step.on_host(rank)
        reduced = [
            ("reduce", number, *place)
            for other in range(step.schedule.pp_size)
            for place in step.buckets_of(other)
        ]
        norm = self._add("data", rank, step.norm, [*passed, *reduced], "norm", ("norm", number, rank))
        self._add("compute", rank, 0.0, [norm], "update")
        down = self._add_copies_down(number, rank, norm)
        is_sharded = step.zero_stage is not ZeroStage.NONE
        stream = "data" if step.are_weights_overlapped else "compute"
        for place in step.buckets_of(rank):
            numel, name = step.numel(place), "{}.{}".format(*place)
            if place in on_host:
                updated = self._add_host_update(rank, name, numel, [norm, down[place]])
            else:
                updated = self._add("compute", rank, step.update.of(numel), [norm], f"update {name}")
            seconds = step.gather.of(numel) if is_sharded else 0.0
            self._add(stream, rank, seconds, [updated], f"gather {name}", ("gather", number, *place))

    def _add_copies_down(self, number: int, rank: int, norm: int) -> dict[tuple[int, int], int]:
        """Of the gradients that the host needs, in the order of backward."""
        step, on_host, copies = self._step, self._step.on_host(rank), {}
        for place in reversed(step.buckets_of(rank)):
            if step.host is not None and place in on_host:
                stream = "down" if step.host.is_overlapped else "compute"
                after = ("reduce", number, *place) if step.host.is_overlapped else norm
                seconds, label = step.host.down.of(step.numel(place)), "down {}.{}".format(*place)
                copies[place] = self._add(stream, rank, seconds, [after], label)
        return copies

    def _add_host_update(self, rank: int, name: str, numel: int, after: Sequence[Any]) -> int:
        """An update on the host and the copy of its weights; the index of the latter."""
        host = self._step.host
        assert host is not None
        update, up = ("host", "up") if host.is_overlapped else ("compute", "compute")
        updated = self._add(update, rank, host.update.of(numel), after, f"host update {name}")
        return self._add(up, rank, host.up.of(numel), [updated], f"up {name}")
