"""Compares the Adam update on a CPU: ours, torch's fused kernel and DeepSpeed's CPUAdam.

    python -m toolkits.benchmarks.adam_cpu [--quick] [--json FILE] [--plot FILE]

All contenders update the same tensors of 100 million elements in one process, one after the other, in rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles

import torch

from patch.optimizer.kernels.build import BuildError
from toolkits.benchmarks._adam_contenders import Contender, Tensors, contenders
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

_NUMEL = 99_999_936
_ROUNDS, _QUICK_ROUNDS = 31, 9
Seconds = dict[tuple[str, str], list[float]]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also without a compiler or without DeepSpeed."""
    arguments = _parse(argv)
    try:
        found, missing = contenders(Tensors(_NUMEL))
    except BuildError as reason:
        print(f"not run: {reason}")
        return 0
    rounds = _QUICK_ROUNDS if arguments.quick else _ROUNDS
    seconds = _measure(found, rounds)
    aims = _aims(seconds)
    print(f"{_NUMEL / 1e6:.0f} M parameters, {torch.get_num_threads()} threads, {rounds} rounds\n")
    print(_table(found, seconds))
    print("\n".join([*aim_lines(aims), *([missing] if missing else [])]))
    if arguments.json:
        rows = [{"case": c, "name": n, "seconds": s} for (c, n), s in seconds.items()]
        threads = torch.get_num_threads()
        write_json(arguments.json, aims, numel=_NUMEL, threads=threads, rounds=rows, missing=missing)
    _plot(arguments.plot, found, seconds)
    print(f"plot: {arguments.plot}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    return argument_parser("adam_cpu", __doc__, "fewer rounds: about a third of the time").parse_args(argv)


def _measure(found: Sequence[Contender], rounds: int) -> Seconds:
    """Seconds of one update by contender; each round runs every contender once, in a new order."""
    seconds: Seconds = {(one.case, one.name): [] for one in found}
    order = list(found)
    for contender in order:
        contender.update()
    for index in range(rounds):
        Random(index).shuffle(order)
        for contender in order:
            begin = time.perf_counter()
            contender.update()
            seconds[contender.case, contender.name].append(time.perf_counter() - begin)
    return seconds


def _ratio(seconds: Seconds, case: str, name: str, other: str) -> float:
    """Median over rounds of the ratio within a round: other work on the machine hits neighbours alike."""
    these, those = seconds[case, name], seconds[case, other]
    return median(this / that for this, that in zip(these, those, strict=True))


def _best(seconds: Seconds, case: str, prefixes: Sequence[str]) -> str:
    names = [name for found, name in seconds if found == case and name.startswith(tuple(prefixes))]
    return min(names, key=lambda name: median(seconds[case, name]))


def _aims(seconds: Seconds) -> list[Aim]:
    """The thresholds of the issue, as ratios of times."""
    peers = [name for name in ("torch fused", "DeepSpeed") if ("fp32", name) in seconds]
    best = _best(seconds, "fp32", peers)
    aims = [Aim(f"fp32: ours / best peer ({best})", _ratio(seconds, "fp32", "ours", best), 1 / 0.98)]
    for peer in peers:
        best = _best(seconds, "bf16", [peer])
        aims.append(Aim(f"bf16: ours / {best}", _ratio(seconds, "bf16", "ours", best), 1 / 1.4))
    split = _ratio(seconds, "bf16", "ours, split master", "ours")
    return [*aims, Aim("bf16: ours, split master / ours", split, 1 / 1.1)]


def _table(found: Sequence[Contender], seconds: Seconds) -> str:
    lines = [f"{'':<37}{'median ms':>10}{'quartiles':>18}{'GB/s':>8}{'/ ours':>8}"]
    for case, name, num_bytes, _ in found:
        lower, middle, upper = quantiles(seconds[case, name], n=4, method="inclusive")
        quartiles = f"{lower * 1e3:.1f} - {upper * 1e3:.1f}"
        speed = num_bytes * _NUMEL / middle / 1e9
        line = f"{case:<6}{name:<31}{middle * 1e3:>10.1f}{quartiles:>18}{speed:>8.1f}"
        lines.append(line + (f"{_ratio(seconds, case, name, 'ours'):>8.2f}" if case != "copy" else ""))
    return "\n".join(lines) + "\n"


def _plot(file: Path, found: Sequence[Contender], seconds: Seconds) -> None:
    """Bars of the times of one update with quartiles, case by case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for case, name, *_ in reversed(found):
        lower, middle, upper = (
            1e3 * value for value in quantiles(seconds[case, name], n=4, method="inclusive")
        )
        color = "tab:blue" if name.startswith("ours") else "tab:gray"
        axis.barh(f"{case}: {name}", middle, xerr=[[middle - lower], [upper - middle]], color=color)
    axis.set(xlabel=f"ms for {_NUMEL / 1e6:.0f} M parameters (median, quartiles)")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
