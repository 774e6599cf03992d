"""A plan as lines with their formulas, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from patch.config import RunConfig
from patch.config.fields import SECTIONS, scalar_of
from patch.device import MachineFacts
from patch.plan.cures import cures, what_lacks
from patch.plan.describe import describe_plan
from patch.plan.describe_time import budget, budget_line, machine_line, time_lines
from patch.plan.explain import explanations
from patch.plan.fits import fit_of
from patch.plan.memory import bytes_per_rank
from patch.plan.parameters import parameters_per_rank, total_parameters
from patch.plan.planned_run import Planned
from patch.plan.search import Found
from patch.plan.timing.machine_presets import machines_of
from patch.plan.timing.step_time import StepTime, step_time

_INDENT = " " * 12


def describe_here(config: RunConfig, facts: MachineFacts) -> list[str]:
    """The plan of a run on this machine, or on several like it: what `--dry-run` prints.

    A step's time is planned where the GPU's rates are known.

    Args:
        config: the run, its automatic choices made.
        facts: this machine.
    """
    lines = describe_plan(config, facts).splitlines()
    machine = machines_of(config, facts)
    if machine is None:  # a GPU that no preset is like
        return [f"planned for this machine and those like it: {facts.cuda_name}", *lines]
    note = "; for other machines: llama-patch plan --machine h100 --nodes 4 -- RUN"
    times = time_lines(step_time(config, machine), config, machine) if machine.is_gpu else ()
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
    lines = [
        machine_line(machine),
        *describe_plan(config, machine.facts).splitlines(),
        *time_lines(time, config, machine),
        *([budget_line(time, machine, tokens)] if tokens else []),
        *_advice(planned),
    ]
    formulas = explanations(config, machine, time) if explain else {}
    label = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        yield line
        label = line.split()[0] if not line.startswith(" ") else label
        if not following.startswith(" "):  # the lines of a label stay together
            yield from (f"{_INDENT}= {formula}" for formula in formulas.get(label, []))
    if explain:
        yield from (f"chosen      {note}" for note in planned.notes)


def _advice(planned: Planned) -> Iterator[str]:
    """Whether the run fits, and what would make it fit."""
    config, facts = planned.resolved, planned.machine.facts
    if fit_of(config, facts).is_whole:
        yield "fits        yes"
        return
    found = cures(config, facts, planned.machine)
    yield f"fits        no: {'it would with one of' if found else what_lacks(config, facts)}"
    yield from (f"{_INDENT}{cure}" for cure in found)


def plan_json(planned: Planned, tokens: float | None) -> dict[str, Any]:
    """The plan of a run for JSON: bytes, seconds, FLOP/s.

    Args:
        planned: the run and its machine.
        tokens: see `plan_lines`.
    """
    config, machine = planned.resolved, planned.machine
    time, fit = step_time(config, machine), fit_of(config, machine.facts)
    report = {
        "machine": machine.to_json(),
        "run": {
            section: {field.name: scalar_of(config, field.name) for field in dataclasses.fields(cls)}
            for section, cls in SECTIONS.items()
        },
        "parameters": total_parameters(config.model),
        "parameters_per_rank": parameters_per_rank(config.model, config.parallel),
        "state": [
            bytes_per_rank(config, rank)._asdict()
            for rank in range(config.parallel.pipeline_model_parallel_size)
        ],
        "memory": fit._asdict(),
        "fits": fit.is_whole,
        "time": _time_json(time),
    }
    if tokens:
        names = ("days", "device_hours", "price")
        report["budget"] = {"tokens": tokens, **dict(zip(names, budget(time, machine, tokens), strict=True))}
    return report


def _time_json(time: StepTime) -> dict[str, Any]:
    return {
        "step_seconds": time.seconds,
        "tokens_per_second": time.tokens_per_second,
        "model_flops_per_device": time.model_flops,
        "mfu": time.mfu,
        "parts": [part._asdict() for part in time.parts],
    }


def found_row(found: Found) -> dict[str, Any]:
    """A layout of a search: its sizes, savings, memory and speed.

    Args:
        found: the layout.
    """
    run, optimizer = found.resolved, found.resolved.optimizer
    return {
        **found.layout._asdict(),
        "dp": run.data_parallel_size,
        "sharding": run.zero_stage.name.lower(),
        "bucket_size": optimizer.reduce_bucket_size,
        "recompute": found.resolved.recompute or "none",
        "host_fraction": optimizer.optimizer_offload_fraction if optimizer.optimizer_offload_policy else 0.0,
        "device_bytes": found.fit.device_needed,
        "step_seconds": found.time.seconds,
        "tokens_per_second_per_device": found.time.tokens_per_second / run.world_size,
        "mfu": found.time.mfu,
    }
