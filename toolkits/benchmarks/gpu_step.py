"""Measures a training step on a GPU with layers of LLaMA-3.1 8B: TFLOP/s, MFU, memory, the dearest kernels.

    python -m toolkits.benchmarks.gpu_step [--quick] [--json FILE] [--plot FILE] [--layers N] [--sequence N]

It needs a GPU. Each contender runs in its own process, in the environment that the launcher gives a worker.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patch.device import MachineFacts
from patch.distributed.launch import worker_environment
from patch.plan import flops_per_step, peak_flops
from toolkits.benchmarks._child import run_task
from toolkits.benchmarks._gpu_step_run import CONTENDERS, Task, layers_that_fit, step_run
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

_SEQUENCES = (8192, 4096)
_STEPS, _QUICK_STEPS = 12, 5
_TIMEOUT_S = 240
_MEMORY_SHARE = 0.88
_LEAST_MFU, _LEAST_FP8_TFLOPS, _MOST_WITHOUT_ENGINE = 0.50, 700.0, 1 / 0.95
_AIMED_LENGTH = 8192
Found = dict[int, dict[str, dict[str, Any] | None]]
"""Sequence length -> contender -> what its process measured; None: it failed."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also without a GPU."""
    arguments = _parse(argv)
    machine = MachineFacts.probe()
    if not machine.cuda_devices:
        print("not run: needs a GPU, found none")
        return 0
    found: Found = {}
    layers = {}
    for length in [arguments.sequence] if arguments.sequence else _SEQUENCES:
        layers[length] = arguments.layers or layers_that_fit(machine, length, _MEMORY_SHARE)
        steps = _QUICK_STEPS if arguments.quick else _STEPS
        found[length] = {}
        for name in contenders(machine):
            task = Task(contender=name, layers=layers[length], sequence=length, steps=steps)
            environment = worker_environment(step_run(name, layers[length], length), machine, os.environ)
            found[length][name] = run_task(task, _TIMEOUT_S, environment).measured
    aims = aims_of(found, layers, machine.cuda_name)
    print(table(found, layers, machine.cuda_name))
    print(kernel_tables(found))
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, layers=layers, measured=found)
    _plot(arguments.plot, found, layers)
    print(f"plot: {arguments.plot}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("gpu_step", __doc__, "fewer steps")
    parser.add_argument("--layers", type=int, default=0, help="layers of the model (default: what fits)")
    parser.add_argument("--sequence", type=int, choices=_SEQUENCES, help="sequence length (default: both)")
    return parser.parse_args(argv)


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


def table(found: Found, layers: dict[int, int], gpu: str) -> str:
    """One row for each contender and length, as Markdown. MFU refers to the peak of bf16, also for fp8."""
    peak = peak_flops(gpu)
    lines = [
        "| sequence | layers | contender | s a step | tokens/s | TFLOP/s | of bf16's peak | GiB | reserved |"
    ]
    lines.append("|" + " --- |" * 9)
    for length, measured in found.items():
        for name, one in measured.items():
            head = f"| {length} | {layers[length]} | {name} |"
            if one is None:
                lines.append(f"{head} failed | | | | | |")
                continue
            seconds = one["seconds"]
            rate = tflops(name, layers[length], length, seconds)
            cells = [f"{seconds:.3f}", f"{length / seconds:.0f}", f"{rate:.0f}"]
            cells.append(f"{rate * 1e12 / peak:.1%}" if peak else "")
            cells += [f"{one[key]:.1f}" if key in one else "" for key in ("allocated_gib", "reserved_gib")]
            lines.append(f"{head} {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def kernel_tables(found: Found) -> str:
    """The dearest kernels of a step of each contender at the longest length."""
    lines = []
    for name, one in found[max(found)].items():
        if one is not None:
            lines += [f"{name}, {max(found)} tokens, one step:", "", "| ms | share | calls | kernel |"]
            lines.append("| --- | --- | --- | --- |")
            lines += [
                f"| {ms:.1f} | {share:.1%} | {n} | `{kernel}` |" for kernel, n, ms, share in one["kernels"]
            ]
            lines.append("")
    return "\n".join(lines)


def _plot(file: Path, found: Found, layers: dict[int, int]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    bars = {
        f"{name}, {length}": tflops(name, layers[length], length, one["seconds"])
        for length, measured in found.items()
        for name, one in measured.items()
        if one is not None
    }
    axis.barh(list(reversed(bars)), [bars[name] for name in reversed(bars)])
    axis.set(xlabel="TFLOP/s of the model")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
