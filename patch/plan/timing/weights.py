"""Seconds that passes wait for weights which come for each of them: from other ranks, from host memory.

The next module's weights travel while one computes, so that a pass takes as long as the slowest of compute,
gathers, copies from the host and copies of gradients to it. Nothing hides what its first module needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from patch.config import RunConfig
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
    stages = zip(freed_units(config), zip(forward, backward, strict=True), strict=True)
    return tuple(_waits(config, machine, units, own) for units, own in stages)


def host_rate(config: RunConfig, machine: Machine) -> float:
    """Bytes/s of host memory that each process of a node has."""
    return machine.host_bandwidth * machine.reached.host_bandwidth / config.parallel.nproc_per_node


def _waits(config: RunConfig, machine: Machine, units: Sequence[Unit], own: Sequence[float]) -> PassWaits:
    """The waits of a stage.

    Args:
        config, machine: see `pass_waits`.
        units: its weights, in the order of forward.
        own: seconds of its forward and its backward.
    """
    instances = config.parallel.num_distributed_optimizer_instances
    between = ring(machine, group_of(config, "dp", "cp", instances=instances), 1)
    of_experts = ring(machine, group_of(config, "dp", of_experts=True), 1)
    link, memory = machine.host_link_bandwidth * machine.reached.host_link, host_rate(config, machine)
    main, weight = (element_bytes(p) for p in (config.optimizer.main_grads_dtype, config.training.precision))
    # Gradients on the host are added up there: two are read, one is written.
    touches = 1 if config.num_micro_batches == 1 else 4

    def gather(unit: Unit) -> float:
        return between.seconds(unit.others) + (of_experts.seconds(unit.experts) if unit.experts else 0.0)

    def down(unit: Unit, gradients: float = 0.0) -> float:
        """Copy a rank's part from the host, beside this many bytes of gradients for each byte to it."""
        part = unit.others / config.num_state_shares + unit.experts / config.num_expert_copies
        part *= weights_on_host(config)
        return part * max(1 / link, gradients / link, (1 + gradients * touches) / memory)

    gathers, slower = sum(map(gather, units)), machine.reached.contention * sum(map(gather, units))
    copies = sum(map(down, units)), sum(down(unit, main / weight) for unit in units)
    first, last = (gather(unit) + down(unit) for unit in (units[0], units[-1]))
    forward, backward = (
        max(alone, max(gathers, copy) - seconds) + slower
        for alone, copy, seconds in zip((first, last), copies, own, strict=True)
    )
    return PassWaits(forward, backward, gathers)
