"""The whole plan of a run on its machines, with a step's time: as lines with their formulas, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from patch.config import RunConfig
from patch.config.fields import scalars_of
from patch.device import MachineFacts
from patch.layout import groups_along
from patch.numbers import counted, scaled, size_text, timed
from patch.plan.cures import suggestions, what_lacks
from patch.plan.describe import INDENT, PlanRow, describe_plan, plan_rows
from patch.plan.fits import fit_of
from patch.plan.memory import bytes_per_rank
from patch.plan.parameters import parameters_per_rank, total_parameters
from patch.plan.planned_run import Planned
from patch.plan.timing.machine import Machine, machines_of
from patch.plan.timing.step_time import StepTime, step_time

_SHOWN_RANKS = 16
"""Ranks of an axis that are named."""
_SHOWN = 0.001
"""A part below 0.1 % of a step is not shown."""


def describe_here(config: RunConfig, facts: MachineFacts) -> list[str]:
    """The plan of a run on this machine, or on several like it: what `--dry-run` prints.

    A step's time is planned where the GPU's rates are known.
    """
    lines = describe_plan(config, facts).splitlines()
    machine = machines_of(config, facts)
    if machine is None:  # a GPU that no preset is like
        return [f"planned for this machine and those like it: {facts.cuda_name}", *lines]
    note = "; for other machines: llama-patch plan --machine h100 --nodes 4 -- RUN"
    times = _time(step_time(config, machine), config, machine).lines if machine.is_gpu else ()
    return [machine_line(machine) + note, *lines, *times]


def plan_lines(planned: Planned, tokens: float | None, *, explain: bool) -> Iterator[str]:
    """The plan of a run.

    Args:
        planned: the run and its machine.
        tokens: of the whole training, for days and cost; None: none are said.
        explain: whether the formulas follow each line.
    """
    config, machine = planned.resolved, planned.machine
    time = step_time(config, machine)
    rows = [
        PlanRow([machine_line(machine)], list(_rates(machine))),
        *plan_rows(config, machine.facts),
        _time(time, config, machine),
        *([PlanRow([budget_line(time, machine, tokens)])] if tokens else []),
        PlanRow(list(_advice(planned))),
    ]
    for row in rows:
        yield from row.lines
        if explain:
            yield from (f"{INDENT}= {formula}" for formula in row.formulas)
    if explain:
        yield from (f"chosen      {note}" for note in planned.notes)


def machine_line(machine: Machine) -> str:
    """A line about the planned machine."""
    device = size_text(machine.device_memory_bytes) if machine.is_gpu else f"{machine.host_cores} cores"
    number = f"{machine.devices_per_node} x {machine.name}" if machine.is_gpu else machine.name
    return (
        f"planned for {counted(machine.nodes, 'machine')} of {number} ({device}), host memory "
        f"{size_text(machine.host_memory_bytes)}"
    )


def _rates(machine: Machine) -> Iterator[str]:
    """All rates of a machine that are set, and the shares of them that a run reaches."""
    fields = machine.to_json()
    reached = fields.pop("reached")
    for words, values in (("rates", fields), ("shares that are reached", reached)):
        numbers = [f"{name} {value:g}" for name, value in values.items() if type(value) is float and value]
        yield f"{words}: {', '.join(numbers)}"


def rank_groups(config: RunConfig) -> dict[str, list[range]]:
    """The process groups of several ranks by their axes; those of experts are ETP, EP and EDP."""
    places = [(axis.upper(), config.axes, axis) for axis in config.axes]
    if config.model.num_experts:
        of_experts = (("ETP", "tp"), ("EP", "ep"), ("EDP", "dp"))
        places += [(name, config.expert_axes, axis) for name, axis in of_experts]
    return {name: list(groups_along(axes, axis)) for name, axes, axis in places if axes.get(axis, 1) > 1}


def rank_lines(config: RunConfig) -> Iterator[str]:
    """The ranks of each process group: all of 16 ranks, of more the first groups."""
    experts = f", of experts {'-'.join(config.expert_axes)}" if config.model.num_experts else ""
    yield f"ranks       {config.world_size} in the order {'-'.join(config.axes)}{experts}, the fastest first"
    for name, groups in rank_groups(config).items():
        size, first = len(groups[0]), groups[0]
        shown = [" ".join(map(str, group)) for group in groups[: _SHOWN_RANKS // size]]
        shown = shown or [f"{first[0]} {first[1]} {first[2]} ... {first[-1]}"]
        more = ", ..." if len(groups) > len(shown) else ""
        counts = f"{counted(len(groups), 'group')} of {size}, {first.step} apart"
        yield f"{INDENT}{name:<4}{counts}: {', '.join(shown)}{more}"


def _time(time: StepTime, config: RunConfig, machine: Machine) -> PlanRow:
    """A planned step and its parts."""
    what, total = "GPU" if machine.is_gpu else "process", time.tokens_per_second
    both = [scaled(rate).rstrip() for rate in (total, total / config.world_size)]
    mfu = f", MFU {time.mfu:.1%}" if time.mfu is not None else ""
    has_stages = config.parallel.pipeline_model_parallel_size > 1
    mfu += f", stages idle {time.idle:.1%} of their computing time" if has_stages else ""
    lines = [
        f"time        {timed(time.seconds)} a step: {both[0]} tokens/s, {both[1]} a {what}, "
        f"{scaled(time.model_flops)}FLOP/s a {what}{mfu} (planned, not measured)"
    ]
    for part in time.parts:
        if part.seconds >= _SHOWN * time.seconds:
            share = f"{part.seconds / time.seconds:.1%}"
            lines.append(f"{INDENT}{share:>6}  {timed(part.seconds):>8}  {part.name}")
    formulas = [f"{part.name}: {part.formula}" for part in time.parts if part.seconds and part.formula]
    return PlanRow(lines, formulas)


def budget_line(time: StepTime, machine: Machine, tokens: float) -> str:
    """A line about the days, device hours and price of a number of tokens.

    Args:
        time, machine, tokens: see `budget`.
    """
    cost = budget(time, machine, tokens)
    price = "" if cost["price"] is None else f", price {cost['price']:,.0f}"
    days, hours = f"{cost['days']:.3g} days", f"{cost['device_hours']:,.0f} device hours"
    return f"budget      {scaled(tokens).rstrip()} tokens take {days}, {hours}{price}"


def budget(time: StepTime, machine: Machine, tokens: float) -> dict[str, Any]:
    """The cost of a training: `days`, `device_hours`, and their `price`, None if the machine has none.

    Args:
        time: of a step.
        machine: what it is planned for.
        tokens: to train on.
    """
    hours = tokens / time.tokens_per_second / 3600
    devices, each = hours * machine.num_devices, machine.price_per_device_hour
    return {"days": hours / 24, "device_hours": devices, "price": None if each is None else devices * each}


def _advice(planned: Planned) -> Iterator[str]:
    """Whether the run fits, and what would make it fit."""
    config, facts = planned.resolved, planned.machine.facts
    if fit_of(config, facts).is_whole:
        yield "fits        yes"
        return
    found = suggestions(config, facts, planned.machine)
    yield f"fits        no: {'it would with one of' if found else what_lacks(config, facts)}"
    yield from (f"{INDENT}{each}" for each in found)


def plan_json(planned: Planned, tokens: float | None) -> dict[str, Any]:
    """The plan of a run for JSON: bytes, seconds, FLOP/s.

    Args:
        planned: the run and its machine.
        tokens: see `plan_lines`.
    """
    config, machine = planned.resolved, planned.machine
    time, fit = step_time(config, machine), fit_of(config, machine.facts)
    ranks = range(config.parallel.pipeline_model_parallel_size)
    report = {
        "machine": machine.to_json(),
        "run": scalars_of(config),
        "parameters": total_parameters(config.model),
        "parameters_per_rank": parameters_per_rank(config.model, config.parallel, config.experts),
        "state": [bytes_per_rank(config, rank)._asdict() for rank in ranks],
        "memory": fit._asdict(),
        "fits": fit.is_whole,
        "time": {
            "step_seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second,
            "model_flops_per_device": time.model_flops,
            "mfu": time.mfu,
            "parts": [part._asdict() for part in time.parts],
        },
    }
    if tokens:
        report["budget"] = {"tokens": tokens, **budget(time, machine, tokens)}
    return report
