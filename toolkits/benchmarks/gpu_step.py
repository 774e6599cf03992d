"""Measure a training step on a GPU with layers of LLaMA-3.1 8B: TFLOP/s, MFU, memory, the slowest kernels.

    python -m toolkits.benchmarks gpu_step [--quick] [--layers N] [--sequence N...] [--contenders NAME...]

It needs a GPU. Contenders run in turns in one process, in the environment that the launcher gives a worker.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import RunConfig
from patch.device import DeviceContext, MachineFacts
from patch.distributed.groups import initialize
from patch.errors import PatchError
from patch.launch.launcher import worker_environment
from patch.plan.fits import fit_of
from patch.plan.flops import flops_per_step, peak_flops
from toolkits.benchmarks._contenders import SHAPE_8B, Contender, OurTrainer, run_config, time_round
from toolkits.benchmarks._measure import dearest_kernels, needs_gpu, take_turns, try_on_gpu
from toolkits.benchmarks._report import Aim, Report, ratio, table

_SEQUENCES = (8192, 4096)
_STEPS, _QUICK_STEPS = 12, 5
_UNTIMED_STEPS = 5
"""Steps in which kernels are compiled, and offload policy `auto` fills the device."""
_MOST_LAYERS = 32
_TIMEOUT_S = 600
_MEMORY_SHARE = 0.88
_LEAST_MFU, _LEAST_FP8_TFLOPS, _MOST_WITHOUT_ENGINE = 0.50, 700.0, 1 / 0.95
_AIMED_LENGTH = 8192


class Recipe(NamedTuple):
    """Settings of a contender."""

    fields: Mapping[str, Any] = {}
    """Fields of the run that differ from our layers in bf16."""
    trainer: Callable[[RunConfig, ProcessGroupCollection, torch.device], Contender] = OurTrainer
    library: str = ""
    """Library that the contender needs beside torch."""


FP8, _DELAYED = ({"precision": "fp8", "fp8_recipe": recipe} for recipe in ("tensorwise", "delayed"))
_TE = "transformer_engine"
_ENGINE = {"transformer_impl": _TE}
CONTENDERS = {
    "local bf16": Recipe(),
    "TE bf16": Recipe(_ENGINE, library=_TE),
    "local fp8": Recipe(FP8),
    "TE fp8": Recipe(FP8 | _ENGINE, library=_TE),
    "TE fp8 delayed": Recipe(_DELAYED | _ENGINE, library=_TE),
}
_FIELDS = {"precision": "bf16", "transformer_impl": "local", "lr": 1e-5, "min_lr": 1e-5}


def options_of(contenders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the benchmark's options: these contenders, all of which are measured by default."""
    which = {"choices": contenders, "default": contenders, "help": "which, the first is the base"}
    return {
        "--layers": {"type": int, "default": 0, "help": "layers of the model (default: what fits)"},
        "--sequence": {"type": int, "nargs": "+", "default": _SEQUENCES, "help": "sequence lengths"},
        "--contenders": {"nargs": "+", **which},
    }


OPTIONS = options_of([*CONTENDERS])


class Steps(NamedTuple):
    """Steps of all contenders with one sequence length."""

    sequence: int
    layers: int
    rounds: Mapping[str, Sequence[dict[str, Any] | None]]
    """Contender -> results of each round, or None if it failed."""

    def of(self, name: str, key: str) -> float:
        """Return the median of a figure, or NaN if it was not measured."""
        found = [one[key] for one in self.rounds.get(name, ()) if one is not None and key in one]
        return median(found) if found else float("nan")

    def tflops(self, name: str) -> float:
        """Return the TFLOP/s of the model's forward and backward, without recomputation."""
        run = step_run(Recipe(), self.layers, self.sequence)
        return flops_per_step(run).model / self.of(name, "seconds") / 1e12

    def ratio(self, name: str, base: str) -> float:
        """Return the ratio of two step times, the median over the rounds in which both contenders ended."""
        pairs = zip(self.rounds[name], self.rounds[base], strict=True)
        ended = [(one["seconds"], other["seconds"]) for one, other in pairs if one and other]
        return ratio(*zip(*ended, strict=True)) if ended else float("nan")

    def table(self, base: str, gpu: str) -> str:
        """Return one row per contender. MFU refers to the bf16 peak, also for fp8. Dash: not measured."""
        peak = (peak_flops(gpu) or float("nan")) / 1e12
        rows = []
        for name in self.rounds:
            rate = self.tflops(name)
            speeds = [f"{self.of(name, 'seconds'):.3f}", f"{self.ratio(name, base):.3f}"]
            speeds += [f"{self.sequence / self.of(name, 'seconds'):.0f}", f"{rate:.0f}", f"{rate / peak:.1%}"]
            memory = [f"{self.of(name, key):.1f}" for key in ("gpu_gib", "reserved_gib", "host_gib")]
            cells = [*speeds, *memory, f"{self.of(name, 'fraction'):.2f}"]
            rows.append([name, *("-" if "nan" in cell else cell for cell in cells)])
        heads = ("s a step", f"/ {base}", "tokens/s", "TFLOP/s", "of bf16's peak", "GPU GiB", "reserved")
        title = f"{self.layers} layers, {self.sequence} tokens"
        return table((title, *heads, "host GiB", "states on it"), rows)


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    return report_steps(arguments, CONTENDERS, _MEMORY_SHARE, aims_of, with_kernels=True)


def report_steps(
    arguments: argparse.Namespace,
    contenders: Mapping[str, Recipe],
    share: float,
    aims: Callable[[Steps, str], list[Aim]],
    *,
    with_kernels: bool = False,
) -> Report:
    """Measure the chosen contenders with each sequence length.

    Args:
        arguments: `contenders`, `layers`, `sequence`, `rounds` and `quick`.
        share: share of the GPU's memory, for which the number of layers is chosen.
        aims: returns the aims of a sequence length on the named GPU.
        with_kernels: whether the slowest kernels of the longest sequences are printed.
    """
    machine, found = needs_gpu(), []
    chosen = {name: contenders[name] for name in arguments.contenders}
    recipes = {name: one for name, one in chosen.items() if not one.library or find_spec(one.library)}
    for length in arguments.sequence:
        layers = arguments.layers or layers_that_fit(machine, length, share)
        rounds = try_on_gpu(
            measure, _TIMEOUT_S * len(recipes) * arguments.rounds,
            environment=worker_environment(step_run(Recipe(), layers, length), machine, os.environ),
            recipes=recipes, layers=layers, sequence=length,
            steps=_QUICK_STEPS if arguments.quick else _STEPS, rounds=arguments.rounds,
        )  # fmt: skip
        found.append(Steps(length, layers, rounds or dict.fromkeys(recipes, [None] * arguments.rounds)))
    texts = [steps.table(next(iter(recipes)), machine.cuda_name) for steps in found]
    longest = max(found, key=lambda steps: steps.sequence).rounds if with_kernels else {}
    texts += [first["kernels"] for first, *_ in longest.values() if first is not None]
    content = {"measured": [steps._asdict() for steps in found]}
    return Report("\n".join(texts), [aim for one in found for aim in aims(one, machine.cuda_name)], content)


def aims_of(steps: Steps, gpu: str) -> list[Aim]:
    """Return the aims at 8192 tokens: speeds, and the time without / with Transformer Engine."""
    if steps.sequence != _AIMED_LENGTH:
        return []
    peak = (peak_flops(gpu) or float("nan")) / 1e12
    bars = {"bf16": _LEAST_MFU * peak, "fp8": _LEAST_FP8_TFLOPS}
    names = [name for name in steps.rounds if steps.of(name, "seconds") > 0]
    best = {kind: max((steps.tflops(name) for name in names if kind in name), default=1e-9) for kind in bars}
    aims = [Aim(f"{kind}: {bar:.0f} / TFLOP/s", bar / best[kind], 1.0) for kind, bar in bars.items()]
    for kind in bars:
        if {f"local {kind}", f"TE {kind}"} <= {*names}:
            price = steps.ratio(f"local {kind}", f"TE {kind}")
            aims.append(Aim(f"{kind}: time without TE / with it", price, _MOST_WITHOUT_ENGINE))
    return aims


def step_run(recipe: Recipe, layers: int, sequence: int) -> RunConfig:
    """Return the run: layers of LLaMA-3.1 8B with embedding and output layer, one sequence per step."""
    return run_config(sequence, num_layers=layers, **{**SHAPE_8B, **_FIELDS, **recipe.fields})


def layers_that_fit(machine: MachineFacts, sequence: int, share: float) -> int:
    """Return the number of layers that fit into this share of the GPU's memory without offload, at least 1.

    Args:
        share: share of the memory. The CUDA context, library workspaces and fragmentation take the rest.
    """
    for layers in range(_MOST_LAYERS, 1, -1):
        needed = fit_of(step_run(Recipe(), layers, sequence), machine).device_needed
        if needed <= share * machine.cuda_memory_bytes:
            return layers
    return 1


def measure(
    context: DeviceContext, recipes: dict[str, Recipe], layers: int, sequence: int, steps: int, rounds: int
) -> dict[str, list[dict[str, Any] | None]]:
    """Return the results of `time_steps` for each recipe by round, or None if it failed.

    Each recipe prints a line when it ends, because the time limit may come before the table.
    """

    def timed(name: str) -> dict[str, Any] | None:
        found = None
        try:
            found = time_steps(recipes[name], layers, sequence, steps, context)
            found["kernels"] = f"{name}, {sequence} tokens, one step:\n\n{found['kernels']}"
            figures = ", ".join(f"{key} {found[key]:.3f}" for key in ("seconds", "gpu_gib", "loss"))
            print(f"ended: {name}, {sequence} tokens: {figures}", flush=True)
        except (RuntimeError, MemoryError, PatchError) as error:
            print(f"failed: {name}, {sequence} tokens: {error}", file=sys.stderr, flush=True)
        parallel_state.destroy_model_parallel()
        gc.collect()
        if context.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return found

    return take_turns({name: partial(timed, name) for name in recipes}, rounds)


def time_steps(
    recipe: Recipe, layers: int, sequence: int, steps: int, context: DeviceContext
) -> dict[str, Any]:
    """Measure a contender in a job of one process.

    A timed step includes the end of the previous update, but not the end of its own update.

    Returns:
        seconds per step, peak memory in GiB, the last loss, the slowest kernels of one more step, and the
        share of our states that is on the host.
    """
    config = step_run(recipe, layers, sequence)
    trainer = recipe.trainer(config, initialize(config, context), context.device)
    seconds, loss = time_round(trainer, steps, context.device, _UNTIMED_STEPS)
    host_gib = psutil.Process().memory_info().rss / 2**30
    measured: dict[str, Any] = {"seconds": seconds, "loss": loss, "host_gib": host_gib, "gpu_gib": 0.0}
    if context.is_cuda:
        measured["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        measured["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    if isinstance(trainer, OurTrainer):
        report = trainer.run.optimizer.report()
        measured["fraction"] = report.offload_fraction
        # Offload policy `auto` resets torch's peak counter in each step.
        measured["gpu_gib"] = max(measured["gpu_gib"], report.largest_peak / 2**30)
    measured["kernels"] = dearest_kernels(trainer.step, context.device)
    trainer.settle()
    return measured
