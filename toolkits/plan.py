"""python -m toolkits.plan: what a run needs on a machine that may not be here, and the layouts that suit it.

    python -m toolkits.plan --machine h100 --nodes 4 -- --model-size 70B --tensor-model-parallel-size 8 ...
    python -m toolkits.plan --machine h100 --nodes 4 --search -- --model-size 8B --seq-length 8192
    python -m toolkits.plan --machine h100 --scaling scaling.png

After `--` follows the run, as run_mcore_llama.sh takes it: 25 positions and flags, flags alone, or --config
FILE. Nothing is started. Exit code 0: it fits, or layouts were found; 1: it does not, or none was; 2: the run
is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from patch.errors import ConfigError, PatchError
from toolkits import _scaling
from toolkits._arguments import ArgumentParser, positive

if TYPE_CHECKING:
    from patch.plan.planned_run import Planned
    from patch.plan.search import Found

_WIDTH = 160
"""Columns where the output is no terminal."""


def main(argv: list[str]) -> int:
    """Run the command line; returns 0, 1 if nothing fits, or the exit code of the error."""
    from patch.config import user_message
    from patch.logger import configure_logging

    configure_logging()
    own, run = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = _parser().parse_args(own)
    try:
        return _plan(options, run)
    except PatchError as error:
        print(f"ERROR {user_message(error)}", file=sys.stderr)
        return error.exit_code


def _plan(options: argparse.Namespace, argv: list[str]) -> int:
    import dataclasses

    from patch.device import MachineFacts
    from patch.plan.planned_run import machine_named, plan_run

    here = MachineFacts.probe()
    if options.scaling:
        if argv or options.search or options.nodes or options.devices_per_node:
            raise ConfigError("--scaling takes --machine alone: its models and numbers of GPUs are its own")
        return _scaling.run(options.scaling, machine_named(options.machine, here, 1))
    if not argv:
        raise ConfigError("no run is given, expected one after `--`, such as -- --model-size 8B")
    planned = plan_run(argv, os.environ, options.machine, options.nodes, options.devices_per_node, here)
    if options.price is not None:
        machine = dataclasses.replace(planned.machine, price_per_device_hour=options.price)
        planned = planned._replace(machine=machine)
    if options.search:
        return _search(options, planned)
    from patch.plan.fits import fit_of
    from patch.plan.report import plan_json, plan_lines

    for line in plan_lines(planned, options.tokens, explain=options.explain):
        print(line)
    _write(options.json, plan_json(planned, options.tokens) if options.json else {})
    return 0 if fit_of(planned.resolved, planned.machine.facts).is_whole else 1


def _search(options: argparse.Namespace, planned: Planned) -> int:
    from patch.config.launch_line import launch_line
    from patch.plan.describe_time import budget_line, machine_line
    from patch.plan.planned_run import NAMED_LATER
    from patch.plan.report import found_row
    from patch.plan.search import search

    machine = planned.machine
    print(machine_line(machine))
    layouts = search(planned.run, machine, options.best)
    rows = [found_row(found) for found in layouts]
    lines = [launch_line(found.run, planned.environ, machine.facts) for found in layouts]
    for name in NAMED_LATER:
        lines = [line.replace(os.path.abspath(name), name) for line in lines]
    if not layouts:
        print("no layout fits: more or larger devices are needed, or shorter sequences")
        return 1
    _show(layouts)
    if options.tokens:
        print(budget_line(layouts[0].time, machine, options.tokens).replace("budget", "budget 1", 1))
    for number, line in enumerate(lines, 1):
        print(f"\n{number}  {line}")
    found = [{**row, "command": line} for row, line in zip(rows, lines, strict=True)]
    _write(options.json, {"machine": machine.to_json(), "layouts": found})
    if options.plot:
        _plot(layouts, options.plot)
    return 0


def _show(layouts: list[Found]) -> None:
    from rich.console import Console
    from rich.table import Table

    from patch.plan.report import found_row
    from patch.storage.sizes import scaled, size_text, timed

    table = Table(box=None, pad_edge=True)
    names = ("", "TP", "PP", "VPP", "CP", "DP", "micro-batch", "sharding", "AC", "on host", "memory", "step")
    for name in (*names, "tokens/s/device", "MFU"):
        table.add_column(name, justify="right")
    for number, found in enumerate(layouts, 1):
        row = found_row(found)
        sizes = [
            str(row[name]) for name in ("tp", "pp", "vpp", "cp", "dp", "micro_batch", "sharding", "recompute")
        ]
        speed = [timed(row["step_seconds"]), scaled(row["tokens_per_second_per_device"]).strip()]
        host, memory = f"{row['host_fraction']:.0%}", size_text(row["device_bytes"])
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        table.add_row(str(number), *sizes, host, memory, *speed, mfu)
    width = None if sys.stdout.isatty() else _WIDTH
    Console(width=width, highlight=False, markup=False, emoji=False).print(table)


def _plot(layouts: list[Found], file: Path) -> None:
    """Stacked parts of a step of each layout."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(part.name for found in layouts for part in found.time.parts))
    labels = [f"TP {f.layout.tp} PP {f.layout.pp}x{f.layout.vpp} CP {f.layout.cp}" for f in layouts]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.6 * len(layouts)), layout="constrained")
    left = [0.0] * len(layouts)
    for name in names:
        seconds = [sum(p.seconds for p in found.time.parts if p.name == name) for found in layouts]
        if max(seconds) > 0:
            axes.barh(labels, seconds, left=left, label=name)
        left = [start + each for start, each in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step, planned")
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file)
    pyplot.close(figure)


def _write(file: Path | None, report: dict[str, object]) -> None:
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _count(text: str) -> float:
    """A number above 0 such as 1e12, for `argparse`'s `type`."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number above 0")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="python -m toolkits.plan",
        usage="python -m toolkits.plan [--machine NAME] [--nodes N] [...] -- RUN",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--machine", default="here", metavar="NAME",
        help="a100, h100, h200, b200 (nodes of eight), here, or a YAML or JSON file of a machine, such as "
        "toolkits.doctor writes [here]",
    )  # fmt: skip
    parser.add_argument("--nodes", type=positive, metavar="N", help="how many [as the run says, else 1]")
    parser.add_argument("--devices-per-node", type=positive, metavar="N", help="of each [all]")
    parser.add_argument("--tokens", type=_count, metavar="X", help="also days and device hours of so many")
    parser.add_argument(
        "--price", type=_count, metavar="X", help="of a device hour, for the cost of --tokens"
    )
    parser.add_argument("--explain", action="store_true", help="print the formulas behind each line")
    parser.add_argument(
        "--search", action="store_true", help="find the fastest layouts that fit, and their command lines"
    )
    parser.add_argument("--best", type=positive, default=5, metavar="N", help="--search: so many [5]")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="--search: draw the parts of a step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of this as JSON")
    _scaling.add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
