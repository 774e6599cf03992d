"""What all benchmarks share: their command line, tables, aims, the plot, and the report as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

_PACKAGES = (
    "torch", "megatron-core", "transformers", "numpy", "deepspeed", "triton", "transformer_engine",
    "flash_attn_3",
)  # fmt: skip


class NotRunError(Exception):
    """This machine cannot run the benchmark; the message says why."""


class Aim(NamedTuple):
    """A measured value and the largest value that is acceptable."""

    name: str
    measured: float
    aim: float

    @property
    def is_met(self) -> bool:
        """Whether the measured value is at most the aim."""
        return self.measured <= self.aim


class Panel(NamedTuple):
    """A picture of the plot: bars with quartiles, or curves."""

    xlabel: str
    bars: Mapping[str, Sequence[float]] = {}
    """Name -> the value of each round."""
    marks: Mapping[str, float] = {}
    """Name -> a value, as a line across the bars."""
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]] = {}
    """Name -> x and y values."""
    ylabel: str = ""
    title: str = ""
    scales: tuple[str, str] = ("linear", "linear")
    """Of x and y, as matplotlib names them."""


class Report(NamedTuple):
    """What a benchmark has found."""

    text: str
    aims: Sequence[Aim]
    panels: Sequence[Panel]
    content: Mapping[str, Any]
    """More keys of the JSON, such as the raw rounds."""


def run_benchmark(
    measure: Callable[[argparse.Namespace], Report],
    argv: Sequence[str],
    *,
    rounds: tuple[int, int] = (1, 1),
    quick: str = "fewer rounds",
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> int:
    """The main program of a benchmark; 0, also where it cannot run, or 130 after Ctrl-C.

    Args:
        measure: a function of the benchmark's module, whose name and first line are shown; it gets the
            options and `rounds`, and raises NotRunError where it cannot run.
        argv: the command line.
        rounds: how many there are, and with --quick.
        quick: the help text of --quick.
        options: the benchmark's own, by name, and what argparse is told of each.
    """
    module = sys.modules[measure.__module__]
    assert module.__spec__ is not None and module.__doc__ is not None, "a benchmark runs as a module"
    name = module.__spec__.name.rpartition(".")[2]
    parser = argparse.ArgumentParser(prog=name, description=module.__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="write aims, raw rounds, machine and versions here")
    parser.add_argument("--plot", type=Path, default=Path(f"{name}.png"), help="the plot, a PNG")
    for option, told in (options or {}).items():
        parser.add_argument(option, **told)
    arguments = parser.parse_args(argv)
    arguments.rounds = rounds[arguments.quick]
    try:
        print_and_write(measure(arguments), arguments)
    except NotRunError as reason:
        print(f"not run: {reason}")
    except KeyboardInterrupt:
        return 130
    return 0


def print_and_write(report: Report, arguments: argparse.Namespace) -> None:
    """Print a report, and write its JSON and its plot."""
    print(report.text)
    for aim in report.aims:
        state = "met   " if aim.is_met else "MISSED"
        print(f"{state}  {aim.name}: {aim.measured:.3f} (aim: at most {aim.aim:.2f})")
    if arguments.json:
        aims = [{**aim._asdict(), "met": aim.is_met} for aim in report.aims]
        content = {"aims": aims, "machine": machine(), "versions": versions(), **report.content}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if report.panels:
        _plot(arguments.plot, report.panels)
        print(f"plot: {arguments.plot}", flush=True)


def table(heads: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table whose columns are aligned, the first one to the left; ends with an empty line."""
    cells = [[str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = []
    for first, *others in cells:
        padded = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines) + "\n"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    lower, middle, upper = quantiles([*values] * (1 + (len(values) == 1)), n=4, method="inclusive")
    return lower, middle, upper


def _plot(file: Path, panels: Sequence[Panel]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (6.5 * len(panels), 4)
    canvas, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, values in reversed([*panel.bars.items()]):
            lower, middle, upper = quartiles(values)
            color = "tab:blue" if "ours" in name else "tab:gray"
            axis.barh(name, middle, xerr=[[middle - lower], [upper - middle]], color=color)
        for (name, value), style in zip(panel.marks.items(), ("--", ":", "-."), strict=False):
            axis.axvline(value, linestyle=style, color="black", label=name)
        for name, (xs, ys) in panel.curves.items():
            axis.plot(xs, ys, "o-", markersize=3, label=name)
        axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        axis.set(xscale=panel.scales[0], yscale=panel.scales[1])
        if panel.marks or panel.curves:
            axis.legend(fontsize="small")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, current load, kernel."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, this repository and relevant packages; "missing" if not installed."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    found = {"python": platform.python_version(), "commit": commit or "unknown"}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found
