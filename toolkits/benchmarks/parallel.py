"""Measures a pipeline's bubble, whether the ring's messages are hidden, and what offloaded activations cost.

    python -m toolkits.benchmarks.parallel [--part pipeline|context|activations] [--quick] [--json FILE]

The pipeline's layers wait instead of computing, so that any number of processes run on any number of cores.
The two context-parallel ranks are at the ends of a cable of limited speed (needs root and iproute2).
Activations are offloaded from a simulated device, over copies of limited speed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import ParallelConfig, RunConfig
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from patch.model import build_llama_model, initialize_weights
from patch.training.setup import Run
from patch.training.step import run_schedule
from toolkits.benchmarks import _activation_step, _context_step
from toolkits.benchmarks._contenders import SameBatches, bare_run, llama, run_config
from toolkits.benchmarks._measure import Overlaps, time_on_ranks
from toolkits.benchmarks._report import Aim, NotRunError, Panel, Report, run_benchmark, table
from toolkits.benchmarks._runner import CPU, run_ranks
from toolkits.benchmarks._waiting_layers import WaitingLayer

PIPELINE, CONTEXT, ACTIVATIONS = PARTS = "pipeline", "context", "activations"
_MICRO_BATCHES: dict[int, tuple[int, ...]] = {2: (2, 4, 8), 4: (4, 8, 16)}
"""Stages p -> numbers m of micro-batches; v is 1 and 2."""
_QUICK_MICRO_BATCHES: dict[int, tuple[int, ...]] = {2: (4,)}
_WAITS_S = (0.1, 0.4)
_ROUNDS, _QUICK_ROUNDS = {PIPELINE: 5, CONTEXT: 7, ACTIVATIONS: 9}, {PIPELINE: 1, CONTEXT: 2, ACTIVATIONS: 1}
_SHARES, _QUICK_SHARES = [1.0, 0.4], [1.0]
_COPY_SHARES = [0.5, 1.0, 2.0]
_TIMEOUT_S = 900
_MOST_OFF, _MOST_OVER_BOUND = 0.05, 1.1
_PROCESS_LAYERS = 2
"""Layers of a process: one stage of two layers, or two stages of one."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    quick = "fewer cases and rounds: about a minute"
    return run_benchmark("parallel", __doc__, argv, _run, quick, _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=PARTS,
        help="what to measure (default: all)",
    )  # fmt: skip


def _run(arguments: argparse.Namespace) -> Report:
    aims: list[Aim] = []
    panels: list[Panel] = []
    content: dict[str, Any] = {PIPELINE: [], CONTEXT: [], ACTIVATIONS: {}}
    rounds = _QUICK_ROUNDS if arguments.quick else _ROUNDS
    if PIPELINE in arguments.part:
        bubbles = _measure_bubbles(_QUICK_MICRO_BATCHES if arguments.quick else _MICRO_BATCHES, rounds)
        print(bubble_table(bubbles), flush=True)
        aims += bubble_aims(bubbles)
        panels.append(_bubble_panel(bubbles))
        content[PIPELINE] = [vars(one) for one in bubbles]
    if CONTEXT in arguments.part:
        try:
            found = _context_step.run(
                _QUICK_SHARES if arguments.quick else _SHARES, rounds[CONTEXT], _TIMEOUT_S
            )
        except NotRunError as reason:
            print(f"context: not run: {reason}\n")
            found = []
        for one in found:
            title = f"{one['bytes'] / 1e6:.1f} MB a rank and step over {one['mbit']:.0f} Mbit/s each way"
            figures = Overlaps(one["rounds"])
            print(figures.table(title, _context_step.WHOLE), flush=True)
            panels.append(figures.panel(title))
            name = (
                f"ring step / max(compute, messages), where messages alone take {one['share']:g} of compute"
            )
            aims.append(Aim(name, figures.over_bound(_context_step.RING), _MOST_OVER_BOUND))
        content[CONTEXT] = found
    if ACTIVATIONS in arguments.part:
        content[ACTIVATIONS] = _activation_step.measure(_COPY_SHARES, rounds[ACTIVATIONS])
        print(_activation_step.rounds_table(content[ACTIVATIONS]), flush=True)
    return Report("", aims, panels, content)


@dataclass(frozen=True)
class Bubble:
    """The steps of one pipeline: its bubble is what a step takes beyond its compute, as a share of it."""

    stages: int
    """p, processes."""
    virtual: int
    """v, stages of a process."""
    micro_batches: int
    """m."""
    rounds: dict[float, list[tuple[float, float]]]
    """Seconds of a micro-batch on a process -> in each round, seconds of the step, and of compute in it."""

    @property
    def formula(self) -> float:
        """(p - 1) / (v m)."""
        return (self.stages - 1) / (self.virtual * self.micro_batches)

    def at(self, wait_s: float) -> float:
        """The bubble, with the costs of messages and of the schedule."""
        return median(step / compute for step, compute in self.rounds[wait_s]) - 1

    @property
    def without_constant(self) -> float:
        """The bubble without what a step costs however short its compute is: from two lengths of waiting."""
        short, long = (self.rounds[wait_s] for wait_s in (min(self.rounds), max(self.rounds)))
        steps, computes = ([median(column) for column in zip(*rows, strict=True)] for rows in (short, long))
        return (computes[0] - steps[0]) / (computes[1] - steps[1]) - 1


def bubble_table(bubbles: Sequence[Bubble]) -> str:
    """A row for each pipeline."""
    waits = sorted(bubbles[0].rounds)
    heads = ["p", "v", "m", "formula"]
    for head in (*(f"{wait_s * 1e3:.0f} ms" for wait_s in waits), "no constant"):
        heads += [head, "/ formula"]
    rows = []
    for one in bubbles:
        found = [*(one.at(wait_s) for wait_s in waits), one.without_constant]
        cells = [f"{value:.3f}" for measured in found for value in (measured, measured / one.formula)]
        rows.append([one.stages, one.virtual, one.micro_batches, f"{one.formula:.4f}", *cells])
    return table(heads, rows)


def _bubble_panel(bubbles: Sequence[Bubble]) -> Panel:
    """Bubbles against the formula."""
    formulas = sorted(one.formula for one in bubbles)
    curves: dict[str, Any] = {"formula": (formulas, formulas)}
    for virtual in (1, 2):
        own = sorted((one.formula, one.at(max(_WAITS_S))) for one in bubbles if one.virtual == virtual)
        curves[f"v = {virtual}"] = ([x for x, _ in own], [y for _, y in own])
    return Panel("(p - 1) / (v m)", curves=curves, ylabel="bubble / compute")


def _measure_bubbles(numbers: dict[int, tuple[int, ...]], rounds: dict[str, int]) -> list[Bubble]:
    found = []
    for stages, micro_batches in numbers.items():
        cases = [(v, m, wait_s) for v in (1, 2) for m in micro_batches for wait_s in _WAITS_S]
        measured = run_ranks(measure, stages, _TIMEOUT_S, on_cpu=True, cases=cases, rounds=rounds[PIPELINE])
        by_case = dict(zip(cases, measured, strict=True))
        found += [
            Bubble(stages, v, m, {wait_s: by_case[v, m, wait_s] for wait_s in _WAITS_S})
            for v in (1, 2)
            for m in micro_batches
        ]
    return found


def bubble_aims(bubbles: Sequence[Bubble]) -> list[Aim]:
    """How far bubbles and steps are from the formula's."""
    longest = max(_WAITS_S)
    return [
        Aim(
            "pipeline: farthest bubble from the formula, as a share of the formula, without constant costs",
            max(abs(one.without_constant / one.formula - 1) for one in bubbles), _MOST_OFF,
        ),
        Aim(
            f"pipeline: farthest step from the formula's, as a share of it, at {longest * 1e3:.0f} ms",
            max(abs((1 + one.at(longest)) / (1 + one.formula) - 1) for one in bubbles), _MOST_OFF,
        ),
    ]  # fmt: skip


class ComputeTimers:
    """Adds up what upstream's schedules call the compute of this process; takes the place of their timers."""

    def __init__(self) -> None:
        self.compute_s = 0.0
        self._name, self._begin = "", 0.0

    def __call__(self, name: str, log_level: int = 0) -> ComputeTimers:
        """Upstream's protocol: choose a timer; those of compute count, and never run at the same time."""
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        """Upstream's protocol."""
        if self._name.endswith("-compute"):
            self._begin = time.perf_counter()

    def stop(self) -> None:
        """Upstream's protocol."""
        if self._name.endswith("-compute"):
            self.compute_s += time.perf_counter() - self._begin


def pipeline_run(stages: int, virtual: int, micro_batches: int) -> RunConfig:
    """A model so small that all but the waiting takes next to no time."""
    model = llama(
        8, num_layers=_PROCESS_LAYERS * stages, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1,
        num_query_groups=1, kv_channels=8, vocab_size=16,
    )  # fmt: skip
    parallel = ParallelConfig(
        nproc_per_node=stages, pipeline_model_parallel_size=stages,
        num_layers_per_virtual_pipeline_stage=_PROCESS_LAYERS // virtual if virtual > 1 else None,
    )  # fmt: skip
    return run_config(model, parallel, global_batch_size=micro_batches)


def build_waiting_run(config: RunConfig, groups: ProcessGroupCollection, wait_s: float) -> Run:
    """A run whose layers wait.

    Args:
        config: the run.
        groups: the process groups of the job.
        wait_s: seconds of a micro-batch in the layers of a process, forward and backward.
    """
    stages = build_llama_model(config.model, groups, CPU.device, config.execution)
    initialize_weights(stages, config.model, config.training.seed)
    for layers in (stage.decoder.layers for stage in stages):
        for index in range(len(layers)):
            layers[index] = WaitingLayer(None, wait_s / _PROCESS_LAYERS)
    return bare_run(config, groups, CPU.device, stages, SameBatches(config, 0))


def time_step(run: Run) -> tuple[float, float]:
    """Forward and backward of a step: seconds of the slowest process, mean compute seconds of a process."""
    run.stages[0].config.timers = timers = ComputeTimers()
    run.optimizer.zero_grad(0.0)
    batches = run.train_reader.step(0)
    seconds = time_on_ranks(lambda: run_schedule(run, batches, tokens=1.0, loss_scale=1.0), CPU)
    compute = torch.tensor(timers.compute_s)
    dist.all_reduce(compute)
    return seconds, compute.item() / dist.get_world_size()


def measure(
    context: DeviceContext, cases: Sequence[tuple[int, int, float]], rounds: int
) -> list[list[tuple[float, float]]]:
    """What `time_step` found for each case in each round.

    Args:
        context: the device.
        cases: v, stages of a process; m, micro-batches; seconds of a micro-batch on a process, both ways.
        rounds: how often each takes a step.
    """
    stages = dist.get_world_size()
    groups = initialize(pipeline_run(stages, 1, stages), context)
    runs = [
        build_waiting_run(pipeline_run(stages, virtual, micro_batches), groups, wait_s)
        for virtual, micro_batches, wait_s in cases
    ]
    found = [[time_step(run) for run in runs] for _ in range(rounds)]
    return [list(case) for case in zip(*found, strict=True)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
