"""Measures what optimizer offload costs on a GPU, ours and upstream's, with layers of LLaMA-3.1 8B.

    python -m toolkits.benchmarks.offload [--quick] [--json FILE] [--plot FILE] [--layers N] [--sequence N]

First it prints what a step waits for by plan. The rest needs a GPU. Each round runs every contender in a
process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from patch.device import MachineFacts
from patch.plan import step_time
from patch.plan.timing.machine_presets import PRESETS
from toolkits.benchmarks._child import run_task
from toolkits.benchmarks._offload_run import (
    CONTENDERS,
    FRACTIONS,
    NO_OFFLOAD,
    Task,
    offload_run,
    with_offload,
)
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

_LIMITS = {4096: 1.03, 8192: 1.01}
"""Sequence length -> largest acceptable ratio of the step time at 0.25 to that without offload."""
_MOST = {"auto": 1.03, "1": 1.3}
_ROUNDS, _QUICK_ROUNDS = 3, 1
_STEPS, _QUICK_STEPS = 8, 4
_TIMEOUT_S = 600
_LAYER, _EMBEDDINGS = 218_112_000, 1_050_677_248
"""Number of parameters in a layer, and outside of layers."""
_STATE_BYTES = 18
"""Bytes per parameter of weight, gradient and states with upstream's full fp32 master; ours take 16."""
_STATE_SHARE = 0.5
"""Share of the GPU's memory for weights, gradients and states without offload."""
Rounds = dict[str, list[dict[str, float]]]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also without a GPU."""
    arguments = _parse(argv)
    machine = MachineFacts.probe()
    print(plan_text())
    if not machine.cuda_devices:
        print("not run: needs a GPU, found none")
        return 0
    begin = time.monotonic()
    layers = arguments.layers or default_layers(machine.cuda_memory_bytes)
    rounds, steps = (_QUICK_ROUNDS, _QUICK_STEPS) if arguments.quick else (_ROUNDS, _STEPS)
    sequences = [arguments.sequence] if arguments.sequence else list(_LIMITS)
    measured = {str(length): _measure(layers, length, rounds, steps) for length in sequences}
    aims = aims_of(measured)
    print(f"{layers} layers of LLaMA-3.1 8B; {time.monotonic() - begin:.0f} s\n")
    for length, found in measured.items():
        print(table(length, found))
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, layers=layers, rounds=measured)
    _plot(arguments.plot, measured)
    print(f"plot: {arguments.plot}")
    return 0


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


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("offload", __doc__, "one round of fewer steps")
    parser.add_argument(
        "--layers", type=int, default=0,
        help="layers of the model, at most 32 (default: as many as fill half of the GPU without offload)",
    )  # fmt: skip
    parser.add_argument("--sequence", type=int, choices=list(_LIMITS), help="sequence length (default: both)")
    return parser.parse_args(argv)


def default_layers(gpu_bytes: int) -> int:
    """The number of layers, up to 32, that leaves space for activations without offload."""
    parameters = gpu_bytes * _STATE_SHARE / _STATE_BYTES
    return min(32, max(1, int((parameters - _EMBEDDINGS) / _LAYER)))


def _measure(layers: int, sequence: int, rounds: int, steps: int) -> Rounds:
    found: Rounds = {name: [] for name in CONTENDERS}
    for index in range(rounds):
        first = index * 3 % len(CONTENDERS)
        for name in CONTENDERS[first:] + CONTENDERS[:first]:
            task = Task(contender=name, layers=layers, sequence=sequence, steps=steps)
            measured = run_task(task, _TIMEOUT_S).measured
            found[name] += [] if measured is None else [measured]
    return found


def _ratio(found: Rounds, name: str) -> float:
    """Median over rounds of the ratio to the step without offload in the same round; NaN if it failed."""
    baseline = found[f"ours: {NO_OFFLOAD}"]
    ratios = [one["seconds"] / base["seconds"] for one, base in zip(found[name], baseline, strict=False)]
    return median(ratios) if ratios else float("nan")


def aims_of(measured: dict[str, Rounds]) -> list[Aim]:
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


def table(length: str, found: Rounds) -> str:
    """A text table of the contenders with their medians; a dash means not measured."""
    heads = ("s a step", "/ no offload", "GPU GiB", "host GiB", "fraction")
    lines = [f"sequence {length:<16}" + "".join(f"{head:>14}" for head in heads)]
    for name, rounds in found.items():
        cells = [_cell(rounds, "seconds"), f"{_ratio(found, name):.3f}"]
        cells += [_cell(rounds, key) for key in ("gpu_gib", "host_gib", "fraction")]
        lines.append(f"{name:<25}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines) + "\n"


def _cell(rounds: list[dict[str, float]], key: str) -> str:
    values = [one[key] for one in rounds if key in one]
    return f"{median(values):.3f}" if values else "-"


def _plot(file: Path, measured: dict[str, Any]) -> None:
    """Draw bars of step times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (6.5 * len(measured), 4)
    canvas, axes = pyplot.subplots(1, len(measured), figsize=size, layout="constrained", squeeze=False)
    for axis, (length, found) in zip(axes[0], measured.items(), strict=True):
        names = [name for name in reversed(found) if found[name]]
        colors = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in names]
        axis.barh(names, [median(one["seconds"] for one in found[name]) for name in names], color=colors)
        axis.set(title=f"sequence {length}", xlabel="seconds a step (median)")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
