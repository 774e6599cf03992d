"""The whole plan of a run on its machines, with a step's time: as lines with formulas, and as JSON.

The time that failures and saves cost a training: a failure loses half an interval between saves on average,
and the restart. Failures come at random times, also in lost time. A save stalls for the copy of a rank's
weights and states to host memory; writing overlaps with training. The best interval is sqrt(2 x stall x time
between failures). Source: Young, "A first order approximation to the optimum checkpoint interval", CACM
17(9), 1974; Daly, FGCS 22(3), 2006, refines it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from patch.config import RunConfig
from patch.config.fields import scalars_of, with_values
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.layout import groups_along
from patch.plan.describe import INDENT, PlanRow, describe_plan, plan_rows
from patch.plan.fits import fit_of
from patch.plan.memory import bytes_per_rank
from patch.plan.parameters import parameters_per_rank, total_parameters
from patch.plan.planned_run import PlannedRun
from patch.plan.suggest import memory_shortfall, suggestions
from patch.plan.timing.machine import Machine, machines_of
from patch.plan.timing.step_time import StepTime, step_time
from patch.text import counted, scaled, size_text, timed

_SHOWN_RANKS = 16
"""Named ranks per axis."""
_SHOWN = 0.001
"""Smallest share of a step that is shown."""
_WEEK = 7 * 86400


def describe_here(config: RunConfig, facts: MachineFacts) -> list[str]:
    """Return the lines that `--dry-run` prints: the plan here, with a step's time if rates are known."""
    lines = describe_plan(config, facts).splitlines()
    machine = machines_of(config, facts)
    if machine is None:  # a GPU that no preset is like
        return [f"planned for this machine and those like it: {facts.cuda_name}", *lines]
    note = "; for other machines: llama-patch plan --machine h100 --nodes 4 -- RUN"
    if machine.is_gpu and config.optimizer.optimizer_offload_policy:
        note += "; the host's rates are assumed: llama-patch doctor measures them"
    times = _time(step_time(config, machine), config, machine).lines if machine.is_gpu else ()
    return [machine_line(machine) + note, *lines, *times]


def plan_lines(
    planned: PlannedRun, tokens: float | None, failures: Failures | None = None, *, explain: bool
) -> Iterator[str]:
    """Yield the plan of a run, with days and cost of a training on `tokens`, and formulas if `explain`.

    Args:
        failures: add the time that they cost a training on `tokens`.
    """
    config, machine = planned.resolved, planned.machine
    time = step_time(config, machine)
    rows = [
        PlanRow([machine_line(machine)], list(_rates(machine))),
        *plan_rows(config, machine.facts),
        _time(time, config, machine),
        *([PlanRow([budget_line(time, machine, tokens)])] if tokens else []),
        *([lost_time(config, machine, time, tokens, failures).row] if tokens and failures else []),
        PlanRow(list(_advice(planned))),
    ]
    for row in rows:
        yield from row.lines
        if explain:
            yield from (f"{INDENT}= {formula}" for formula in row.formulas)
    if explain:
        yield from (f"chosen      {note}" for note in planned.notes)


def machine_line(machine: Machine) -> str:
    """Return a line about the planned machine."""
    device = size_text(machine.device_memory_bytes) if machine.is_gpu else f"{machine.host_cores} cores"
    number = f"{machine.devices_per_node} x {machine.name}" if machine.is_gpu else machine.name
    return (
        f"planned for {counted(machine.nodes, 'machine')} of {number} ({device}), host memory "
        f"{size_text(machine.host_memory_bytes)}"
    )


def _rates(machine: Machine) -> Iterator[str]:
    fields = machine.to_json()
    reached = fields.pop("reached")
    for words, values in (("rates", fields), ("shares that are reached", reached)):
        numbers = [f"{name} {value:g}" for name, value in values.items() if type(value) is float and value]
        yield f"{words}: {', '.join(numbers)}"


def rank_groups(config: RunConfig) -> dict[str, list[range]]:
    """Return the process groups with several ranks, by axis; axes of experts are ETP, EP and EDP."""
    places = [(axis.upper(), config.axes, axis) for axis in config.axes]
    if config.model.num_experts:
        of_experts = (("ETP", "tp"), ("EP", "ep"), ("EDP", "dp"))
        places += [(name, config.expert_axes, axis) for name, axis in of_experts]
    return {name: list(groups_along(axes, axis)) for name, axes, axis in places if axes.get(axis, 1) > 1}


def rank_lines(config: RunConfig) -> Iterator[str]:
    """Yield the ranks of each process group: all of up to 16 ranks, otherwise the first groups."""
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
    if streamed := config.optimizer.optimizer_offload_streamed:
        less = step_time(with_values(config, optimizer_offload_streamed=0.0), machine).seconds
        if less < time.seconds * (1 - _SHOWN):
            text = f"--optimizer-offload-streamed {streamed:g} slows the step: without it {timed(less)}"
            lines.append(f"warning     {text}")
    formulas = [f"{part.name}: {part.formula}" for part in time.parts if part.seconds and part.formula]
    return PlanRow(lines, formulas)


def budget_line(time: StepTime, machine: Machine, tokens: float) -> str:
    """Return a line about the days, device hours and price of a number of tokens."""
    cost = budget(time, machine, tokens)
    price = "" if cost["price"] is None else f", price {cost['price']:,.0f}"
    days, hours = f"{cost['days']:.3g} days", f"{cost['device_hours']:,.0f} device hours"
    return f"budget      {scaled(tokens).rstrip()} tokens take {days}, {hours}{price}"


def budget(time: StepTime, machine: Machine, tokens: float) -> dict[str, Any]:
    """Return `days`, `device_hours` and `price` of training on `tokens`; `price` may be None."""
    hours = tokens / time.tokens_per_second / 3600
    devices, each = hours * machine.num_devices, machine.price_per_device_hour
    return {"days": hours / 24, "device_hours": devices, "price": None if each is None else devices * each}


class Failures(NamedTuple):
    """Failures that end a run, at random times."""

    per_week: float
    """Number in a week of wall time."""
    restart_seconds: float
    """From a failure to the next step."""


class LostTime(NamedTuple):
    """Seconds beyond the steps of a training on a number of tokens, and what they consist of."""

    total: float
    failures: float
    """Number of failures."""
    saving: float
    """Stalls of all saves."""
    best_steps: int
    """Steps between saves that lose least."""
    row: PlanRow


def lost_time(
    config: RunConfig, machine: Machine, time: StepTime, tokens: float, failures: Failures
) -> LostTime:
    """Return the time that saves and failures add to a training on `tokens`.

    Args:
        time: of a step of this run on these machines.

    Raises:
        ConfigError: failures cost all of the time.
    """
    state, interval = bytes_per_rank(config), config.checkpoint.save_interval * time.seconds
    stall = (state.weights + state.optimizer) / (machine.host_link_bandwidth * machine.reached.host_link)
    useful, between = tokens / time.tokens_per_second, _WEEK / failures.per_week
    restart = failures.restart_seconds
    each, best = interval / 2 + restart, math.sqrt(2 * stall * between)
    if each >= between:
        raise ConfigError(
            f"--failures-per-week {failures.per_week:g}: a failure costs {_duration(each)}, and the next one "
            f"comes after {_duration(between)}. The run would never end. Save more often (--save-interval)"
        )
    saving = useful / interval * stall
    wall = (useful + saving) / (1 - each / between)
    number, steps = wall / between, max(1, round(best / time.seconds))
    lost, saved, again, young = map(_duration, (wall - useful, interval, restart, best))
    lines = [
        f"failures    {number:.3g} lose {lost}, {1 - useful / wall:.2%} of the time: each half of the "
        f"{saved} between saves and {again} of restart; saves stall for {_duration(saving)}",
        f"{INDENT}saves every {counted(steps, 'step')} ({young}) lose least, if writing keeps up "
        "(Young 1974)",
    ]
    formulas = [
        f"{number:.3g} x ({timed(interval / 2)} + {timed(restart)}) + {timed(saving)}",
        f"sqrt(2 x {timed(stall)} of a save x {_duration(between)} between failures); a save stalls for the "
        "copy to host memory",
    ]
    return LostTime(wall - useful, number, saving, steps, PlanRow(lines, formulas))


def _duration(seconds: float) -> str:
    units = (("days", 86400), ("h", 3600), ("min", 60))
    return next((f"{seconds / n:.3g} {unit}" for unit, n in units if seconds >= 2 * n), timed(seconds))


def _advice(planned: PlannedRun) -> Iterator[str]:
    config, facts = planned.resolved, planned.machine.facts
    if fit_of(config, facts).is_whole:
        yield "fits        yes"
        return
    found = suggestions(config, facts, planned.machine)
    yield f"fits        no: {'it would with one of' if found else memory_shortfall(config, facts)}"
    yield from (f"{INDENT}{each}" for each in found)


def plan_json(planned: PlannedRun, tokens: float | None, failures: Failures | None = None) -> dict[str, Any]:
    """Return the plan of a run as JSON values: bytes, seconds, FLOP/s. For arguments see `plan_lines`."""
    config, machine = planned.resolved, planned.machine
    time, fit = step_time(config, machine), fit_of(config, machine.facts)
    ranks = range(config.parallel.pipeline_model_parallel_size)
    report = {
        "machine": machine.to_json(),
        "run": scalars_of(config),
        "parameters": total_parameters(config.model),
        "parameters_per_rank": parameters_per_rank(config),
        "state": [bytes_per_rank(config, rank)._asdict() for rank in ranks],
        "memory": fit._asdict(),
        "fits": fit.is_whole,
        "time": {
            "step_seconds": time.seconds, "tokens_per_second": time.tokens_per_second,
            "model_flops_per_device": time.model_flops, "mfu": time.mfu,
            "parts": [part._asdict() for part in time.parts],
        },
    }  # fmt: skip
    if tokens:
        report["budget"] = {"tokens": tokens, **budget(time, machine, tokens)}
    if tokens and failures:
        report["lost_seconds"] = lost_time(config, machine, time, tokens, failures).total
    return report
