"""Measures what optimizer offload costs on a GPU, ours and upstream's, with layers of LLaMA-3.1 8B.

    python -m toolkits.benchmarks.offload [--quick] [--json FILE] [--plot FILE] [--layers N] [--sequence N]

First it prints what a step waits for by plan. The rest needs a GPU. Each round runs every contender in a
process of its own, so that memory peaks and pinned memory are its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from patch.config.schema import RunConfig
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from patch.plan.timing.machine_presets import PRESETS
from patch.plan.timing.step_time import step_time
from toolkits.benchmarks._contenders import Contender, OurTrainer, SameBatches, llama_8b, run_config
from toolkits.benchmarks._measure import now, take_turns
from toolkits.benchmarks._report import Aim, Panel, Report, run_benchmark, table
from toolkits.benchmarks._runner import needs_gpu, try_alone
from toolkits.benchmarks._upstream import Overlap, UpstreamTrainer

_LIMITS = {4096: 1.03, 8192: 1.01}
"""Sequence length -> largest acceptable ratio of the step time at 0.25 to that without offload."""
_MOST = {"auto": 1.03, "1": 1.3}
_ROUNDS, _QUICK_ROUNDS = 3, 1
_STEPS, _QUICK_STEPS = 8, 4
_WARM_UP_STEPS = 5
"""Untimed steps, in which kernels are built and `auto` fills the device."""
_TIMEOUT_S = 600
_LAYER, _EMBEDDINGS = 218_112_000, 1_050_677_248
"""Number of parameters in a layer, and outside of layers."""
_STATE_BYTES = 18
"""Bytes per parameter of weight, gradient and states with upstream's full fp32 master; ours take 16."""
_STATE_SHARE = 0.5
"""Share of the GPU's memory for weights, gradients and states without offload."""
FRACTIONS = (0.25, 0.5, 1.0)
NO_OFFLOAD = "no offload"
CONTENDERS = (
    *(f"{side}: {NO_OFFLOAD}" for side in ("ours", "upstream")),
    *(f"{side}: {fraction:g}" for fraction in FRACTIONS for side in ("ours", "upstream")),
    "ours: auto",
)
"""A number is the share of states on the host, with our `static` or upstream's HybridDeviceOptimizer."""
Rounds = Mapping[str, Sequence[dict[str, float] | None]]
"""Contender -> what each round measured; None: it failed."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark("offload", __doc__, argv, _run, "one round of fewer steps", _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layers", type=int, default=0,
        help="layers of the model, at most 32 (default: as many as fill half of the GPU without offload)",
    )  # fmt: skip
    parser.add_argument("--sequence", type=int, choices=list(_LIMITS), help="sequence length (default: both)")


def _run(arguments: argparse.Namespace) -> Report:
    print(plan_text())
    machine = needs_gpu()
    begin = time.monotonic()
    layers = arguments.layers or default_layers(machine.cuda_memory_bytes)
    rounds, steps = (_QUICK_ROUNDS, _QUICK_STEPS) if arguments.quick else (_ROUNDS, _STEPS)
    measured: dict[str, Rounds] = {}
    for length in [arguments.sequence] if arguments.sequence else _LIMITS:
        options = {"layers": layers, "sequence": length, "steps": steps, "threads": 0}
        measured[str(length)] = take_turns(
            {name: partial(try_alone, measure, _TIMEOUT_S, contender=name, **options) for name in CONTENDERS},
            rounds,
        )
    tables = [rounds_table(length, found) for length, found in measured.items()]
    head = f"{layers} layers of LLaMA-3.1 8B; {time.monotonic() - begin:.0f} s\n"
    panels = [
        Panel("seconds a step", {name: _values(found, name, "seconds") for name in found if any(found[name])},
              title=f"sequence {length}")
        for length, found in measured.items()
    ]  # fmt: skip
    content = {"layers": layers, "rounds": measured}
    return Report("\n".join([head, *tables]), aims_of(measured), panels, content)


def plan_text() -> str:
    """The plan of all layers of 8B on one H100, sequences of 8192 tokens: a prediction, not measured."""
    machine, config = PRESETS["h100"], offload_run(32, 8192)
    base = step_time(config, machine).seconds
    lines = [f"PLAN, not measured: 8B, one sequence of 8192 tokens, {machine.name}: {base:.2f} s a step"]
    for fraction in FRACTIONS:
        step = step_time(with_offload(config, f"ours: {fraction}"), machine)
        (part,) = (part for part in step.parts if "host" in part.name and "exposed" in part.name)
        ratio = step.seconds / base
        said = f"{part.seconds:.2f} s exposed, {ratio:.2f} of none: {part.formula}"
        lines.append(f"  {fraction:g} on the host: {said}")
    return "\n".join(lines) + "\n"


def default_layers(gpu_bytes: int) -> int:
    """The number of layers, up to 32, that leaves space for activations without offload."""
    parameters = gpu_bytes * _STATE_SHARE / _STATE_BYTES
    return min(32, max(1, int((parameters - _EMBEDDINGS) / _LAYER)))


def _values(found: Rounds, name: str, key: str) -> list[float]:
    return [one[key] for one in found[name] if one is not None and key in one]


def _ratio(found: Rounds, name: str) -> float:
    """Median over rounds of the ratio to the step without offload in the same round; NaN if it failed."""
    pairs = zip(found[name], found[f"ours: {NO_OFFLOAD}"], strict=True)
    ratios = [one["seconds"] / base["seconds"] for one, base in pairs if one and base]
    return median(ratios) if ratios else float("nan")


def aims_of(measured: Mapping[str, Rounds]) -> list[Aim]:
    """The aims; a fraction of 0.25 is about what the whole 8B model needs on one H200."""
    aims = []
    for length, found in measured.items():
        ours, upstream = (_ratio(found, f"{side}: 0.25") for side in ("ours", "upstream"))
        aims.append(Aim(f"sequence {length}: ours at 0.25 / no offload", ours, _LIMITS[int(length)]))
        aims.append(Aim(f"sequence {length}: ours at 0.25 / upstream's at 0.25", ours / upstream, 1.0))
        for share, most in _MOST.items():
            aims.append(
                Aim(f"sequence {length}: ours at {share} / none", _ratio(found, f"ours: {share}"), most)
            )
    return aims


def rounds_table(length: str, found: Rounds) -> str:
    """The contenders with their medians; a dash means not measured."""
    rows = []
    for name in found:
        cells = [_values(found, name, key) for key in ("seconds", "gpu_gib", "host_gib", "fraction")]
        first, *others = (f"{median(values):.3f}" if values else "-" for values in cells)
        rows.append([name, first, f"{_ratio(found, name):.3f}", *others])
    heads = (f"sequence {length}", "s a step", "/ no offload", "GPU GiB", "host GiB", "fraction")
    return table(heads, rows)


def offload_run(layers: int, sequence: int) -> RunConfig:
    """A model with some of LLaMA-3.1 8B's layers: bf16 weights, fp32 gradients, one sequence per step."""
    return run_config(llama_8b(sequence, layers), optimizer={"lr": 1e-5, "min_lr": 1e-5}, precision="bf16")


def with_offload(config: RunConfig, contender: str) -> RunConfig:
    """The run with the offload flags of one of our contenders."""
    share = contender.split(": ")[1]
    if share == NO_OFFLOAD:
        return config
    changes: dict[str, Any] = {"optimizer_offload_policy": "auto"}
    if share != "auto":
        changes = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": float(share)}
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **changes))


def measure(
    context: DeviceContext, contender: str, layers: int, sequence: int, steps: int
) -> dict[str, float]:
    """`time_steps` of a model with layers of 8B."""
    return time_steps(offload_run(layers, sequence), context, contender, steps)


def time_steps(config: RunConfig, context: DeviceContext, contender: str, steps: int) -> dict[str, float]:
    """Measure one contender in a job of one process.

    A timed step includes the end of the previous update, but not the end of its own.

    Args:
        config: the run without offload.
        context: the device.
        contender: one of CONTENDERS.
        steps: number of timed steps.
    Returns:
        seconds per step, memory peaks in GiB, and the last loss.
    """
    groups = initialize(config, context)
    reader = SameBatches(config, 0)
    side, share = contender.split(": ")
    trainer: Contender
    if side == "ours":
        trainer = OurTrainer(with_offload(config, contender), groups, context.device, reader)
    else:
        offload = 0.0 if share == NO_OFFLOAD else float(share)
        trainer = UpstreamTrainer(config, groups, context.device, reader.batches, Overlap(offload=offload))
    for _ in range(_WARM_UP_STEPS):
        trainer.step()
    begin = now(context.device)
    for _ in range(steps):
        loss = trainer.step()
    seconds = (now(context.device) - begin) / steps
    trainer.settle()
    measured = {"seconds": seconds, "loss": loss, "host_gib": _host_peak()}
    if context.is_cuda:
        measured["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if isinstance(trainer, OurTrainer):
        report = trainer.run.optimizer.report()
        measured["fraction"] = report.offload_fraction
        # `auto` resets torch's peak counter in each step.
        measured["gpu_gib"] = max(measured.get("gpu_gib", 0.0), report.largest_peak / 2**30)
    return measured


def _host_peak() -> float:
    """The peak of this process's resident memory, in GiB."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    return float("nan")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
