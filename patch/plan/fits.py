"""Whether a run fits a machine: the memory of its heaviest rank, and of a node's host."""

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
    """Bytes on the device of one rank."""

    pp_rank: int
    state: int
    """Model state, without optimizer states that offload policy `auto` places."""
    beside: dict[str, int]
    """Other bytes than activations, by their name in the plan: staging buffers of gradients and messages in
    flight; with ZeRO-3, weights that are whole during a pass; casts of weights that a step keeps."""
    activations: ActivationPeak

    @property
    def total(self) -> int:
        """Sum of all fields."""
        return self.state + sum(self.beside.values()) + self.activations.total


def heaviest_rank(config: RunConfig, *, cuda: bool) -> RankMemory:
    """Return the pipeline rank that needs the most memory for model state and activations together."""

    def of(rank: int) -> RankMemory:
        beside = {
            "staging of gradients": memory.staging_bytes(config, rank, cuda=cuda),
            "weights of a pass": memory.gathered_unit_bytes(config, rank),
            f"{config.training.precision} weights": memory.cast_weight_bytes(config, rank),
        }
        state, activations = memory.state_on_device(config, rank), activation_peak(config, rank, cuda=cuda)
        return RankMemory(rank, state, beside, activations)

    return max(map(of, range(config.parallel.pipeline_model_parallel_size)), key=lambda rank: rank.total)


class Fit(NamedTuple):
    """Needed and usable bytes of a run; usable bytes are 0 if unknown."""

    device_needed: int
    device_usable: int
    host_needed: int
    host_usable: int
    """Bytes of one machine."""

    @property
    def is_on_device(self) -> bool:
        """Whether the run fits the device."""
        return not 0 < self.device_usable < self.device_needed

    @property
    def is_on_host(self) -> bool:
        """Whether the run fits the host."""
        return not 0 < self.host_usable < self.host_needed

    @property
    def is_whole(self) -> bool:
        """Whether the run fits device and host."""
        return self.is_on_device and self.is_on_host


def fit_of(config: RunConfig, machine: MachineFacts) -> Fit:
    """Return needed and usable memory of a run; a GPU is planned with 95 % of its memory less 1 GiB.

    With `--precision-align`, which keeps more activations, only the model state counts.
    """
    on_device, on_host = memory.needed_bytes(config, machine)
    if config.model.precision_align is None:
        rank = heaviest_rank(config, cuda=bool(machine.cuda_devices))
        of_process = rank.activations.on_host + (0 if machine.cuda_devices else rank.total - rank.state)
        on_device, on_host = rank.total, on_host + of_process * config.parallel.nproc_per_node
    return Fit(on_device, memory.usable_device_memory(config, machine), on_host, machine.host_memory_bytes)


class Candidates(NamedTuple):
    """Changes of a run, and steps that each need less device memory than the previous step."""

    changes: Changes
    steps: Sequence[Changes] = ((),)
    """Further changes; the first step with which the run fits the device is taken."""


class SearchResult(NamedTuple):
    """A run that a search has evaluated."""

    changes: Changes
    run: RunConfig
    """The run with the changes, its `auto` values unresolved."""
    resolved: RunConfig
    fit: Fit
    cost: float

    @property
    def flags(self) -> str:
        """The flags to add to a command, or to replace in it."""
        return " ".join(change.flags for change in self.changes)

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key: fitting runs by cost and number of changes, then the other runs by memory."""
        if self.fit.is_whole:
            return 0, self.cost, len(self.changes), self.fit.host_needed
        return 1, not self.fit.is_on_host, self.fit.device_needed


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The candidates of a search, and how the search compares them."""

    ways: Iterable[Candidates]
    """Read one by one, so a generator may use the results so far."""
    cost: Callable[[RunConfig], float]
    is_bounded: bool = False
    """Whether no step makes a run cheaper. Then a run that costs more than another of its kind is skipped."""
    resolve: Callable[[RunConfig], RunConfig | None] = lambda run: run
    """Makes a run's automatic choices, or returns None if a rule refuses the run."""
    kind: Callable[[Changes, RunConfig], Hashable] = lambda changes, run: None
    """Key of alternatives: the best run of each kind is returned."""


def best(
    config: RunConfig, machine: MachineFacts, space: SearchSpace, seen: list[SearchResult] | None = None
) -> list[SearchResult]:
    """Return the best run of each kind, by `SearchResult.rank`; every evaluated run is appended to `seen`."""
    found: dict[Hashable, SearchResult] = {}
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
        one = SearchResult((*way.changes, *step), with_changes(run, step), resolved, fit, cost)
        if seen is not None:
            seen.append(one)
        if so_far is None or one.rank < so_far.rank:
            found[kind] = one
    return sorted(found.values(), key=lambda each: each.rank)


def _first_that_fits(
    config: RunConfig, machine: MachineFacts, steps: Sequence[Changes]
) -> tuple[Changes, Fit]:
    """The first step that fits the device, else the last step; and its fit."""

    def fit(step: Changes) -> Fit:
        return fit_of(with_changes(config, step), machine)

    last = fit(steps[-1])
    if len(steps) == 1 or not last.is_on_device:
        return steps[-1], last
    first = bisect_left(range(len(steps) - 1), True, key=lambda index: fit(steps[index]).is_on_device)
    return steps[first], last if first == len(steps) - 1 else fit(steps[first])
