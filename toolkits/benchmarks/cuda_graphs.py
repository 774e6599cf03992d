"""Measures what CUDA graphs of the layers save where short micro-batches let the GPU wait for launches.

    python -m toolkits.benchmarks.cuda_graphs [--quick] [--json FILE] [--plot FILE]

It needs a GPU. Each contender runs in its own process, in the environment that the launcher gives a worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patch.device import MachineFacts
from patch.distributed.launch import worker_environment
from toolkits.benchmarks._child import run_task
from toolkits.benchmarks._graph_step_run import CONTENDERS, MICRO_BATCHES, Task, graph_run
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

_LENGTHS, _QUICK_LENGTHS = (256, 1024, 4096), (512,)
_STEPS, _QUICK_STEPS = 20, 10
_LAYERS = 16
_TIMEOUT_S = 150
_WITH, _WITHOUT = "local", "none"
Found = dict[int, dict[str, dict[str, Any] | None]]
"""Sequence length -> contender -> what its process measured; None: it failed."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also without a GPU."""
    lengths = f"one length and {_QUICK_STEPS} steps instead of {len(_LENGTHS)} and {_STEPS}"
    arguments = argument_parser("cuda_graphs", __doc__, lengths).parse_args(argv)
    machine = MachineFacts.probe()
    if not machine.cuda_devices:
        print("not run: needs a GPU, found none")
        return 0
    steps = _QUICK_STEPS if arguments.quick else _STEPS
    found: Found = {}
    for length in _QUICK_LENGTHS if arguments.quick else _LENGTHS:
        found[length] = {}
        for name in CONTENDERS:
            environment = worker_environment(graph_run(name, _LAYERS, length), machine, os.environ)
            task = Task(contender=name, layers=_LAYERS, sequence=length, steps=steps)
            found[length][name] = run_task(task, _TIMEOUT_S, environment).measured
    aims = aims_of(found)
    print(table(found))
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, measured=found)
    _plot(arguments.plot, found)
    print(f"plot: {arguments.plot}")
    return 0


def aims_of(found: Found) -> list[Aim]:
    """At the shortest length a step with graphs is to take no longer than one without."""
    shortest = found[min(found)]
    graphs, plain = shortest[_WITH], shortest[_WITHOUT]
    if graphs is None or plain is None:
        return []
    return [
        Aim(f"{min(found)} tokens: time with / without graphs", graphs["seconds"] / plain["seconds"], 1.0)
    ]


def table(found: Found) -> str:
    """One row for each length and contender, as Markdown."""
    lines = ["| tokens of a micro-batch | graphs | ms a step | of none | tokens/s | GiB | loss |"]
    lines.append("|" + " --- |" * 7)
    for length, measured in found.items():
        plain = measured[_WITHOUT]
        for name, one in measured.items():
            if one is None:
                lines.append(f"| {length} | {name} | failed | | | | |")
                continue
            seconds = one["seconds"]
            share = f"{seconds / plain['seconds']:.2f}" if plain else ""
            gib = f"{one['allocated_gib']:.1f}" if "allocated_gib" in one else ""
            cells = [f"{seconds * 1e3:.1f}", share, f"{MICRO_BATCHES * length / seconds:.0f}", gib]
            lines.append(f"| {length} | {name} | {' | '.join(cells)} | {one['loss']:.4f} |")
    return "\n".join(lines) + "\n"


def _plot(file: Path, found: Found) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(7, 3), layout="constrained")
    for name in CONTENDERS:
        measured = {length: one[name] for length, one in found.items()}
        times = {str(length): one["seconds"] * 1e3 for length, one in measured.items() if one is not None}
        axis.plot(list(times), list(times.values()), marker="o", label=name)
    axis.set(xlabel="tokens of a micro-batch", ylabel="ms a step")
    axis.legend()
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
