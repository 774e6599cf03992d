"""Measures the attention kernels of a GPU, forward and backward, with the heads of LLaMA-3.1 8B in bf16.

    python -m toolkits.benchmarks.attention [--quick] [--json FILE] [--plot FILE]

It needs a GPU. Each kernel runs in its own process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from patch.device import MachineFacts
from patch.plan import peak_flops
from toolkits.benchmarks._attention_run import CONTENDERS, Heads, Task, num_flops, obstacle, rows_of
from toolkits.benchmarks._child import run_task
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
_QUICK_LENGTHS = (4096, 8192, 32768, 131072)
_REPEATS, _QUICK_REPEATS = 15, 5
_TIMEOUT_S = 180
_MOST = 1.05
"""Time of the kernel that we take over that of the fastest."""
_HOPPER, _BLACKWELL = (9, 0), (11, 0)
Times = dict[str, dict[int, float]]
"""Contender -> length -> milliseconds; what failed or is not installed is missing."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also without a GPU."""
    arguments = argument_parser("attention", __doc__, "fewer lengths and passes").parse_args(argv)
    machine = MachineFacts.probe()
    if not machine.cuda_devices:
        print("not run: needs a GPU, found none")
        return 0
    lengths = _QUICK_LENGTHS if arguments.quick else _LENGTHS
    repeats = _QUICK_REPEATS if arguments.quick else _REPEATS
    times: Times = {}
    for name in CONTENDERS:
        if missing := obstacle(name):
            print(f"{name}: not run, {missing}")
            continue
        measured = run_task(Task(contender=name, lengths=lengths, repeats=repeats), _TIMEOUT_S).measured
        times[name] = {int(length): value for length, value in (measured or {}).items()}
    aims = aims_of(times, default_contender(machine))
    print(table(times, lengths, machine.cuda_name))
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, milliseconds=times)
    _plot(arguments.plot, times)
    print(f"plot: {arguments.plot}")
    return 0


def default_contender(machine: MachineFacts) -> str:
    """What our layers take by default (patch/config/backends.py)."""
    return "cuDNN" if _HOPPER <= machine.compute_capability < _BLACKWELL else "FlashAttention-2"


def tflops(length: int, milliseconds: float) -> float:
    """TFLOP/s of forward and backward."""
    return num_flops(length, rows_of(length), Heads()) / milliseconds / 1e9


def aims_of(times: Times, ours: str) -> list[Aim]:
    """Our kernel's time at each length over that of the fastest."""
    aims = []
    for length, milliseconds in times.get(ours, {}).items():
        fastest = min(found[length] for found in times.values() if length in found)
        aims.append(Aim(f"{length} tokens: {ours} / the fastest", milliseconds / fastest, _MOST))
    return aims


def table(times: Times, lengths: Sequence[int], gpu: str) -> str:
    """TFLOP/s of each kernel at each length, and the share of the GPU's dense bf16 peak, as Markdown."""
    peak = peak_flops(gpu)
    lines = [
        "| TFLOP/s, forward and backward | " + " | ".join(map(str, lengths)) + " |",
        "| --- |" + " --- |" * len(lengths),
    ]
    for name, found in times.items():
        cells = []
        for length in lengths:
            rate = tflops(length, found[length]) if length in found else None
            share = f" ({rate * 1e12 / peak:.0%})" if rate is not None and peak else ""
            cells.append("failed" if rate is None else f"{rate:.0f}{share}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _plot(file: Path, times: Times) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, found in times.items():
        axis.plot(list(found), [tflops(length, value) for length, value in found.items()], "o-", label=name)
    axis.set(xscale="log", xlabel="tokens of a sequence", ylabel="TFLOP/s, forward and backward")
    axis.legend()
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
