"""Measures a training step on a GPU with layers of LLaMA-3.1 8B: TFLOP/s, MFU, memory, the dearest kernels.

    python -m toolkits.benchmarks.gpu_step [--quick] [--json FILE] [--plot FILE] [--layers N] [--sequence N]

It needs a GPU. Each contender runs in its own process, in the environment that the launcher gives a worker.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from patch.config.schema import RunConfig
from patch.device import DeviceContext, MachineFacts
from patch.distributed.groups import initialize
from patch.distributed.launch import worker_environment
from patch.families import TransformerImpl
from patch.plan.fits import fit_of
from patch.plan.flops import flops_per_step, peak_flops
from toolkits.benchmarks._contenders import OurTrainer, SameBatches, llama_8b, run_config
from toolkits.benchmarks._measure import dearest_kernels, now
from toolkits.benchmarks._report import Aim, Panel, Report, run_benchmark, table
from toolkits.benchmarks._runner import needs_gpu, try_alone

_SEQUENCES = (8192, 4096)
_STEPS, _QUICK_STEPS = 12, 5
_WARM_UP_STEPS = 3
_MOST_LAYERS = 32
_TIMEOUT_S = 240
_MEMORY_SHARE = 0.88
_LEAST_MFU, _LEAST_FP8_TFLOPS, _MOST_WITHOUT_ENGINE = 0.50, 700.0, 1 / 0.95
_AIMED_LENGTH = 8192
Found = dict[int, dict[str, dict[str, Any] | None]]
"""Sequence length -> contender -> what its process measured; None: it failed."""
CONTENDERS: dict[str, tuple[TransformerImpl, dict[str, Any]]] = {
    "local bf16": ("local", {"precision": "bf16"}),
    "TE bf16": ("transformer_engine", {"precision": "bf16"}),
    "local fp8": ("local", {"precision": "fp8", "fp8_recipe": "tensorwise"}),
    "TE fp8": ("transformer_engine", {"precision": "fp8", "fp8_recipe": "tensorwise"}),
    "TE fp8 delayed": ("transformer_engine", {"precision": "fp8", "fp8_recipe": "delayed"}),
}
"""Name -> whose layers, and fields of the training. The weights' type changes nothing about memory."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark("gpu_step", __doc__, argv, _run, "fewer steps", _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=0, help="layers of the model (default: what fits)")
    parser.add_argument("--sequence", type=int, choices=_SEQUENCES, help="sequence length (default: both)")


def _run(arguments: argparse.Namespace) -> Report:
    machine = needs_gpu()
    found: Found = {}
    layers = {}
    for length in [arguments.sequence] if arguments.sequence else _SEQUENCES:
        layers[length] = arguments.layers or layers_that_fit(machine, length, _MEMORY_SHARE)
        found[length] = {
            name: try_alone(
                measure, _TIMEOUT_S, contender=name, layers=layers[length], sequence=length, threads=0,
                steps=_QUICK_STEPS if arguments.quick else _STEPS,
                environment=worker_environment(step_run(name, layers[length], length), machine, os.environ),
            )
            for name in contenders(machine)
        }  # fmt: skip
    text = f"{step_table(found, layers, machine.cuda_name)}\n{kernel_tables(found)}"
    rates = {
        f"{name}, {length}": [tflops(name, layers[length], length, one["seconds"])]
        for length, measured in found.items()
        for name, one in measured.items()
        if one is not None
    }
    aims = aims_of(found, layers, machine.cuda_name)
    content = {"layers": layers, "measured": found}
    return Report(text, aims, [Panel("TFLOP/s of the model", rates)], content)


def contenders(machine: MachineFacts) -> list[str]:
    """Those that this machine's libraries can run."""
    has_engine = "transformer_engine" in machine.libraries
    return [name for name, (impl, _) in CONTENDERS.items() if impl == "local" or has_engine]


def tflops(name: str, layers: int, length: int, seconds: float) -> float:
    """TFLOP/s of the model: what forward and backward need, without recomputation."""
    return flops_per_step(step_run(name, layers, length)).model / seconds / 1e12


def aims_of(found: Found, layers: dict[int, int], gpu: str) -> list[Aim]:
    """The aims at 8192 tokens, as ratios that are to be at most 1, and the price of having no engine."""
    rates = {
        name: tflops(name, layers[_AIMED_LENGTH], _AIMED_LENGTH, measured["seconds"])
        for name, measured in found.get(_AIMED_LENGTH, {}).items()
        if measured is not None
    }
    peak = (peak_flops(gpu) or float("nan")) / 1e12
    best = {
        kind: max((rate for name, rate in rates.items() if kind in name), default=0.0)
        for kind in ("bf16", "fp8")
    }
    aims = [
        Aim("bf16: half of the dense peak / TFLOP/s", _over(_LEAST_MFU * peak, best["bf16"]), 1.0),
        Aim("fp8: 700 / TFLOP/s", _over(_LEAST_FP8_TFLOPS, best["fp8"]), 1.0),
    ]
    for kind in ("bf16", "fp8"):
        if (ours := rates.get(f"local {kind}")) and (engine := rates.get(f"TE {kind}")):
            aims.append(Aim(f"{kind}: time without TE / with it", engine / ours, _MOST_WITHOUT_ENGINE))
    return aims


def _over(aim: float, measured: float) -> float:
    return aim / measured if measured else float("inf")


def step_table(found: Found, layers: dict[int, int], gpu: str) -> str:
    """One row for each contender and length. MFU refers to the peak of bf16, also for fp8."""
    peak = peak_flops(gpu)
    rows = []
    for length, measured in found.items():
        for name, one in measured.items():
            cells = ["failed", "", "", "", "", ""]
            if one is not None:
                seconds = one["seconds"]
                rate = tflops(name, layers[length], length, seconds)
                cells = [f"{seconds:.3f}", f"{length / seconds:.0f}", f"{rate:.0f}"]
                cells.append(f"{rate * 1e12 / peak:.1%}" if peak else "")
                cells += [
                    f"{one[key]:.1f}" if key in one else "" for key in ("allocated_gib", "reserved_gib")
                ]
            rows.append([name, length, layers[length], *cells])
    heads = ("contender", "sequence", "layers", "s a step", "tokens/s", "TFLOP/s", "of bf16's peak", "GiB")
    return table((*heads, "reserved"), rows)


def kernel_tables(found: Found) -> str:
    """The dearest kernels of a step of each contender at the longest length."""
    lines = []
    for name, one in found[max(found)].items():
        if one is not None:
            rows = [(f"`{kernel}`", f"{ms:.1f}", f"{part:.1%}", n) for kernel, n, ms, part in one["kernels"]]
            lines += [
                f"{name}, {max(found)} tokens, one step:\n",
                table(("kernel", "ms", "share", "calls"), rows),
            ]
    return "\n".join(lines)


def step_run(contender: str, layers: int, sequence: int) -> RunConfig:
    """Layers of LLaMA-3.1 8B with its embedding and output layer; one sequence a step, no offload."""
    impl, training = CONTENDERS[contender]
    model = llama_8b(sequence, layers, transformer_impl=impl)
    return run_config(model, optimizer={"lr": 1e-5, "min_lr": 1e-5}, **training)


def layers_that_fit(machine: MachineFacts, sequence: int, share: float) -> int:
    """As many layers as the plan puts into this share of the GPU's memory; at least 1.

    Args:
        machine: the GPU.
        sequence: tokens of a sequence.
        share: of its memory; the rest is the CUDA context, the libraries' workspaces and fragmentation.
    """
    for layers in range(_MOST_LAYERS, 1, -1):
        needed = fit_of(step_run("local bf16", layers, sequence), machine).device_needed
        if needed <= share * machine.cuda_memory_bytes:
            return layers
    return 1


def measure(context: DeviceContext, contender: str, layers: int, sequence: int, steps: int) -> dict[str, Any]:
    """`time_steps` of a model with layers of 8B."""
    return time_steps(step_run(contender, layers, sequence), context, steps)


def time_steps(config: RunConfig, context: DeviceContext, steps: int) -> dict[str, Any]:
    """Measure a run in a job of one process.

    Args:
        config: the run.
        context: the device.
        steps: number of timed steps.
    Returns:
        seconds a step, peak memory in GiB, the last loss, and the dearest kernels of one more step.
    """
    groups = initialize(config, context)
    trainer = OurTrainer(config, groups, context.device, SameBatches(config, 0))
    for _ in range(_WARM_UP_STEPS):
        trainer.step()
    begin = now(context.device)
    for _ in range(steps):
        loss = trainer.step()
    measured: dict[str, Any] = {"seconds": (now(context.device) - begin) / steps, "loss": loss}
    if context.is_cuda:
        measured["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        measured["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    measured["kernels"] = dearest_kernels(trainer.step, context.device)
    trainer.settle()
    return measured


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
