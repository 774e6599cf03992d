"""The plan's time as text: the machine, the seconds of a step by part, tokens a second, days and cost."""

from __future__ import annotations

from collections.abc import Iterator

from patch.config import RunConfig
from patch.plan.timing.machine import Machine
from patch.plan.timing.step_time import StepTime
from patch.storage.sizes import counted, scaled, size_text, timed

_INDENT = " " * 12
_SHOWN = 0.001
"""A part below 0.1 % of a step is not shown."""


def machine_line(machine: Machine) -> str:
    """A line about the planned machine."""
    device = size_text(machine.device_memory_bytes) if machine.is_gpu else f"{machine.host_cores} cores"
    number = f"{machine.devices_per_node} x {machine.name}" if machine.is_gpu else machine.name
    return (
        f"planned for {counted(machine.nodes, 'machine')} of {number} ({device}), host memory "
        f"{size_text(machine.host_memory_bytes)}"
    )


def time_lines(time: StepTime, config: RunConfig, machine: Machine) -> Iterator[str]:
    """Lines about a planned step.

    Args:
        time: its time.
        config: the run.
        machine: what it is planned for.
    """
    each, what = time.tokens_per_second / config.world_size, "GPU" if machine.is_gpu else "process"
    mfu = f", MFU {time.mfu:.1%}" if time.mfu is not None else ""
    yield (
        f"time        {timed(time.seconds)} a step: {_count(time.tokens_per_second)} tokens/s, "
        f"{_count(each)} a {what}, {scaled(time.model_flops)}FLOP/s a {what}{mfu} (planned, not measured)"
    )
    for part in time.parts:
        if part.seconds >= _SHOWN * time.seconds:
            share = f"{part.seconds / time.seconds:.1%}"
            yield f"{_INDENT}{share:>6}  {timed(part.seconds):>8}  {part.name}"


def budget_line(time: StepTime, machine: Machine, tokens: float) -> str:
    """A line about the days, device hours and price of a number of tokens.

    Args:
        time: of a step.
        machine: what it is planned for.
        tokens: to train on.
    """
    days, hours, price = budget(time, machine, tokens)
    cost = "" if price is None else f", price {price:,.0f}"
    return f"budget      {_count(tokens)} tokens take {days:.3g} days, {hours:,.0f} device hours{cost}"


def budget(time: StepTime, machine: Machine, tokens: float) -> tuple[float, float, float | None]:
    """Days, device hours, and their price if the machine has one.

    Args:
        time, machine, tokens: see `budget_line`.
    """
    hours = tokens / time.tokens_per_second / 3600
    devices = hours * machine.num_devices
    each = machine.price_per_device_hour
    return hours / 24, devices, None if each is None else devices * each


def _count(number: float) -> str:
    return scaled(number).rstrip()
