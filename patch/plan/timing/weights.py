"""Seconds that passes wait for weights which come for each of them: from other ranks, from host memory.

The next module's weights travel while one computes, so that a pass takes as long as the slowest of compute,
gathers, copies from the host and copies of gradients to it. Nothing hides what its first module needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from patch.config import RunConfig
from patch.numbers import timed
from patch.plan.memory import weights_on_host
from patch.plan.parameters import Unit, element_bytes, freed_units
from patch.plan.timing.communication import group_of, ring
from patch.plan.timing.machine import Machine


class PassWaits(NamedTuple):
    """What the passes of one stage and micro-batch wait for weights, in seconds."""

    forward: float = 0.0
    backward: float = 0.0
    gather: float = 0.0
    """In each of both passes weights travel so long between ranks."""
    words: str = ""
    """How the waits were computed."""


def pass_waits(
    config: RunConfig, machine: Machine, forward: Sequence[float], backward: Sequence[float]
) -> tuple[PassWaits, ...]:
    """What each stage waits for its weights.

    Args:
        config: the run.
        machine: its devices and links.
        forward, backward: seconds of each stage's passes without waits.
    """
    if not config.frees_weights:
        return (PassWaits(),) * len(forward)
    rates = _Rates(config, machine)
    stages = zip(freed_units(config), forward, backward, strict=True)
    return tuple(_waits(rates, *stage) for stage in stages)


def host_rate(config: RunConfig, machine: Machine) -> float:
    """Bytes/s of host memory that each process of a node has."""
    return machine.host_bandwidth * machine.reached.host_bandwidth / config.parallel.nproc_per_node


class _Rates:
    """Seconds of units of weights on each way.

    Args:
        config, machine: see `pass_waits`.
    """

    def __init__(self, config: RunConfig, machine: Machine) -> None:
        instances = config.parallel.num_distributed_optimizer_instances
        self._others = ring(machine, group_of(config, "dp", "cp", instances=instances), 1)
        self._experts = ring(machine, group_of(config, "dp", of_experts=True), 1)
        self._parts = config.num_state_shares, config.num_expert_copies
        self._on_host, self._memory = weights_on_host(config), host_rate(config, machine)
        self._link = machine.host_link_bandwidth * machine.reached.host_link
        sizes = (element_bytes(p) for p in (config.optimizer.main_grads_dtype, config.training.precision))
        main, weight = sizes
        self._gradients = main / weight
        self._touches = (
            1 if config.num_micro_batches == 1 else 4
        )  # added up there: two are read, one is written
        self.contention = machine.reached.contention

    def gather(self, unit: Unit) -> float:
        """Between the ranks that share it."""
        experts = self._experts.seconds(unit.experts) if unit.experts else 0.0
        return self._others.seconds(unit.others) + experts

    def from_host(self, unit: Unit) -> float:
        """Of this rank's part to its device."""
        num_bytes = self._part(unit)
        return max(num_bytes / self._link, num_bytes / self._memory)

    def beside_host(self, unit: Unit) -> float:
        """The same while the part's gradients travel the other way, where the host adds them up."""
        weights = self._part(unit)
        gradients = weights * self._gradients
        in_memory = (weights + gradients * self._touches) / self._memory
        return max(weights / self._link, gradients / self._link, in_memory)

    def _part(self, unit: Unit) -> float:
        others, experts = (num_bytes / parts for num_bytes, parts in zip(unit, self._parts, strict=True))
        return self._on_host * (others + experts)


def _waits(rates: _Rates, units: Sequence[Unit], forward: float, backward: float) -> PassWaits:
    gather, down, both = (sum(map(way, units)) for way in (rates.gather, rates.from_host, rates.beside_host))
    first, last = (rates.gather(unit) + rates.from_host(unit) for unit in (units[0], units[-1]))
    slower = rates.contention * gather
    words = f"gathers {timed(gather)} a pass"
    if down:
        words += f", from the host {timed(down)}, and with gradients to it {timed(both)}"
    return PassWaits(
        max(first, max(gather, down) - forward) + slower,
        max(last, max(gather, both) - backward) + slower,
        gather,
        f"{words}; first modules {timed(first)} and {timed(last)}",
    )
