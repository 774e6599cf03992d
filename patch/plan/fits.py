"""Whether a run fits a machine: memory of its heaviest rank, and of a node's host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.plan import memory
from patch.plan.activations import ActivationPeak, activation_peak
from patch.plan.savings import Changes, with_changes


class RankMemory(NamedTuple):
    """Bytes on the device of one process."""

    pp_rank: int
    state: int
    """Model state, without optimizer states that `auto` places."""
    staging: int
    """Buffers in which gradients are collected and travel, beside the main gradients."""
    whole: int
    """Weights that are whole for a pass, where replicas share them."""
    eight_bits: int
    """8-bit weights that are kept during a step."""
    activations: ActivationPeak

    @property
    def total(self) -> int:
        """All together."""
        return self.state + self.staging + self.whole + self.eight_bits + self.activations.total


def heaviest_rank(config: RunConfig, *, cuda: bool) -> RankMemory:
    """The pipeline rank that needs the most memory for model state and activations together."""
    ranks = (
        RankMemory(
            rank,
            memory.state_on_device(config, rank),
            memory.staging_bytes(config, rank, cuda=cuda),
            memory.whole_bytes(config, rank),
            memory.eight_bit_bytes(config, rank),
            activation_peak(config, rank, cuda=cuda),
        )
        for rank in range(config.parallel.pipeline_model_parallel_size)
    )
    return max(ranks, key=lambda rank: rank.total)


class Fit(NamedTuple):
    """Needed and usable bytes of a run; 0 usable: not known."""

    device_needed: int
    device_usable: int
    host_needed: int
    host_usable: int
    """Bytes of one machine."""

    @property
    def is_on_device(self) -> bool:
        """Whether the device has room."""
        return not 0 < self.device_usable < self.device_needed

    @property
    def is_on_host(self) -> bool:
        """Whether the host has room."""
        return not 0 < self.host_usable < self.host_needed

    @property
    def is_whole(self) -> bool:
        """Whether device and host have room."""
        return self.is_on_device and self.is_on_host


def fit_of(config: RunConfig, machine: MachineFacts) -> Fit:
    """Whether a run fits; a GPU is planned with 95 % of its memory less 1 GiB.

    Of `--precision-align`, which keeps more activations, only the model state counts. The host of a CPU run
    holds all, that of GPUs what they offload.
    """
    on_device, on_host = memory.needed_bytes(config, machine)
    if config.model.precision_align is None:
        rank = heaviest_rank(config, cuda=bool(machine.cuda_devices))
        of_process = rank.activations.on_host + (0 if machine.cuda_devices else rank.total - rank.state)
        on_device, on_host = rank.total, on_host + of_process * config.parallel.nproc_per_node
    return Fit(on_device, memory.usable_device_memory(config, machine), on_host, machine.host_memory_bytes)


class Way(NamedTuple):
    """Changes of a run, and steps of which each needs less of the device than the one before."""

    changes: Changes
    steps: Sequence[Changes] = ((),)
    """Further changes; the first of them with which the run fits the device is taken."""


class Found(NamedTuple):
    """A run that a search has looked at."""

    changes: Changes
    run: RunConfig
    """The run with the changes; what is left to `auto` is still so."""
    resolved: RunConfig
    fit: Fit
    cost: float

    @property
    def flags(self) -> str:
        """The flags to add to a command, or to replace in it."""
        return " ".join(change.flags for change in self.changes)

    @property
    def rank(self) -> tuple[float, ...]:
        """Runs that fit first, of these the cheapest with the fewest changes; else the smallest."""
        if self.fit.is_whole:
            return 0, self.cost, len(self.changes), self.fit.host_needed
        return 1, not self.fit.is_on_host, self.fit.device_needed


@dataclass(frozen=True, kw_only=True)
class Space:
    """The candidates of a search, and how it compares them."""

    ways: Iterable[Way]
    """Read one by one, so that a generator may use what the search has seen before."""
    cost: Callable[[RunConfig], float]
    """Cost of a run in any unit."""
    is_bounded: bool = False
    """No step makes a run cheaper, so that one that costs more than another of its kind is left out."""
    resolve: Callable[[RunConfig], RunConfig | None] = lambda run: run
    """Makes a run's automatic choices; None: a rule refuses the run."""
    kind: Callable[[Changes, RunConfig], Hashable] = lambda changes, run: None
    """Alternatives have the same kind: the best of each is returned."""


def best(
    config: RunConfig, machine: MachineFacts, space: Space, seen: list[Found] | None = None
) -> list[Found]:
    """Return the best run of each kind, in the order of `Found.rank`; [] if rules refuse all.

    Args:
        config: the run to change.
        machine: one of its machines.
        space: what is looked at.
        seen: all runs that were looked at are appended to it.
    """
    found: dict[Hashable, Found] = {}
    for way in space.ways:
        run = with_changes(config, way.changes)
        if (resolved := space.resolve(run)) is None:
            continue
        kind = space.kind(way.changes, resolved)
        so_far = found.get(kind)
        if space.is_bounded and so_far and so_far.fit.is_whole and space.cost(resolved) >= so_far.cost:
            continue
        step, fit = _first_that_fits(resolved, machine, way.steps)
        resolved = with_changes(resolved, step)
        cost = space.cost(resolved) if fit.is_whole else 0.0
        one = Found((*way.changes, *step), with_changes(run, step), resolved, fit, cost)
        if seen is not None:
            seen.append(one)
        if so_far is None or one.rank < so_far.rank:
            found[kind] = one
    return sorted(found.values(), key=lambda each: each.rank)


def _first_that_fits(
    config: RunConfig, machine: MachineFacts, steps: Sequence[Changes]
) -> tuple[Changes, Fit]:
    """The first step with which a run fits the device, else the last; and its fit."""

    def fit(step: Changes) -> Fit:
        return fit_of(with_changes(config, step), machine)

    last = fit(steps[-1])
    if len(steps) == 1 or not last.is_on_device:
        return steps[-1], last
    first = bisect_left(range(len(steps) - 1), True, key=lambda index: fit(steps[index]).is_on_device)
    return steps[first], last if first == len(steps) - 1 else fit(steps[first])
