"""The one search of the planner: of the ways to change a run, the cheapest that fit device and host.

What a search looks at is a `Space`: cures, layouts, activations, sharding, weights on the host and 8-bit
weights each have one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.plan.fits import Fit, fit_of
from patch.plan.savings import Changes, with_changes


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
    def rank(self) -> tuple[float, ...]:
        """Runs that fit first, of these the cheapest with the fewest changes; else the smallest."""
        if self.fit.is_whole:
            return 0, self.cost, len(self.changes), self.fit.host_needed
        return 1, not self.fit.is_on_host, self.fit.device_needed


@dataclass(frozen=True, kw_only=True)
class Space:
    """What a search looks at, and what it compares."""

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
