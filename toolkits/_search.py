"""`--search` of `llama-patch plan`: the fastest layouts of a run, on one number of machines or on several."""

from __future__ import annotations

import dataclasses
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patch.config.positions import POSITIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patch.plan.planned_run import Planned
    from patch.plan.search import Found

_WIDTH = 160
"""Columns where the output is no terminal."""
_TOKENS = 1e9
"""Whose device hours are compared, if --tokens gives no number."""
_DOUBLINGS = 6
"""Doublings of the number of machines, where no layout fits."""
_BY_THE_SEARCH = {
    "ENV", "MODEL_SIZE", "BATCH_SIZE", "TP", "PP", "CP", "SP", "DO", "FL", "AC", "OPTIMIZER_OFFLOAD",
}  # fmt: skip


def run(options: Namespace, plans: Sequence[Planned]) -> tuple[int, dict[str, Any]]:
    """Print the fastest layouts with their command lines.

    Args:
        options: those of `llama-patch plan`.
        plans: the run on each number of machines.
    Returns:
        the exit code, and what is printed as JSON.
    """
    from patch.plan.report import machine_line
    from patch.plan.search import search

    best = options.best if len(plans) == 1 else 1
    found = [search(planned.run, planned.machine, best) for planned in plans]
    print(machine_line(plans[-1].machine))
    layouts = [(planned, layout) for planned, some in zip(plans, found, strict=True) for layout in some]
    if not layouts:
        print(_none_found(plans[-1]))
        return 1, {}
    rows = [row(planned, layout, options.tokens) for planned, layout in layouts]
    _show(rows, options.tokens, by_count=len(plans) > 1)
    for planned, some in zip(plans, found, strict=True):
        if not some:
            print(f"no layout fits {planned.machine.num_devices} devices")
    lines = [_line(planned, layout) for planned, layout in layouts]
    _say_more(options, layouts, lines)
    if options.plot:
        _plot([layout for _, layout in layouts], options.plot)
    commands = [{**each, "command": line} for each, line in zip(rows, lines, strict=True)]
    return 0, {"machine": plans[0].machine.to_json(), "layouts": commands}


def _say_more(options: Namespace, layouts: list[tuple[Planned, Found]], lines: list[str]) -> None:
    """Days and cost, the command lines, and which of their values are not the user's."""
    from patch.plan.report import budget_line

    planned, first = layouts[0]
    if options.tokens and len({each.machine.nodes for each, _ in layouts}) == 1:
        print(budget_line(first.time, planned.machine, options.tokens).replace("budget", "budget 1", 1))
    for number, line in enumerate(lines, 1):
        print(f"\n{number}  {line}")
    if assumed := _assumed(planned, first):
        print(f"\nnot given by you, so set them in the line that you start: {', '.join(assumed)}")


def row(planned: Planned, layout: Found, tokens: float | None) -> dict[str, Any]:
    """A layout of a search with its machines, days and device hours.

    Args:
        planned: the run and the machines that the layout is for.
        layout: it.
        tokens: of the training; None: a thousand million.
    """
    from patch.plan.report import budget, found_row

    names = ("days", "device_hours", "price")
    cost = dict(zip(names, budget(layout.time, planned.machine, tokens or _TOKENS), strict=True))
    machine = planned.machine
    return {"nodes": machine.nodes, "devices": machine.num_devices, **found_row(layout), **cost}


def _line(planned: Planned, layout: Found) -> str:
    from patch.plan.planned_run import NAMED_LATER
    from toolkits._launch_line import launch_line

    line = launch_line(layout.run, planned.environ, planned.machine.facts)
    for name in NAMED_LATER:
        line = line.replace(os.path.abspath(name), name)
    return line


def _assumed(planned: Planned, layout: Found) -> list[str]:
    """The positions of a line that hold values which the user has not given: "5 LR 0.0003"."""
    from patch.plan.planned_run import NAMED_LATER
    from toolkits._launch_line import launch_argv

    argv = launch_argv(layout.run, planned.environ, planned.machine.facts)
    words = []
    for number, position in enumerate(POSITIONS, 1):
        if position.name not in _BY_THE_SEARCH and set(position.fields) & planned.assumed:
            value = argv[number - 1]
            is_named = any(value == os.path.abspath(name) for name in NAMED_LATER)
            words.append(f"{number} {position.name}" + ("" if is_named else f" {value}"))
    if "tokenizer_name_or_path" in planned.assumed:
        words.append("TOKENIZER_PATH")
    return words


def _none_found(planned: Planned) -> str:
    """What lacks, and on how many machines a layout would fit."""
    from patch.plan.search import fits_somewhere

    machine = planned.machine
    what = f"no layout fits {machine.num_devices} devices of this memory" if machine.is_gpu else (
        f"no layout fits: the host memory of {machine.nodes * machine.host_memory_bytes / 2**30:.0f} GiB is "
        "too small"
    )  # fmt: skip
    for doubled in range(1, _DOUBLINGS + 1):
        larger = dataclasses.replace(machine, nodes=machine.nodes * 2**doubled)
        if fits_somewhere(planned.run, larger):
            return f"{what}; one would fit {larger.nodes} machines like it: --nodes {larger.nodes}"
    return f"{what}, nor {2**_DOUBLINGS} times as many machines: take shorter sequences or larger devices"


def _show(rows: list[dict[str, Any]], tokens: float | None, *, by_count: bool) -> None:
    """A table of layouts; by the number of machines with the cost of training at each."""
    from rich.console import Console
    from rich.table import Table

    from patch.storage.sizes import scaled, size_text, timed

    table = Table(box=None, pad_edge=True)
    names = ["TP", "PP", "VPP", "CP", "DP", "micro-batch", "sharding", "AC", "on host", "memory", "step"]
    names = ["nodes" if by_count else "", *names, "tokens/s/device", "MFU"]
    if by_count:
        names += ["days", f"device hours of {scaled(tokens or _TOKENS).strip()} tokens"]
        names += ["price"] if rows[0]["price"] is not None else []
    for name in names:
        table.add_column(name, justify="right")
    for number, row in enumerate(rows, 1):
        fields = ("tp", "pp", "vpp", "cp", "dp", "micro_batch", "sharding", "recompute")
        sizes = [str(row[name]) for name in fields]
        speed = [timed(row["step_seconds"]), scaled(row["tokens_per_second_per_device"]).strip()]
        host, memory = f"{row['host_fraction']:.0%}", size_text(row["device_bytes"])
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        cost = [f"{row['days']:.3g}", f"{row['device_hours']:,.1f}"] if by_count else []
        cost += [f"{row['price']:,.0f}"] if by_count and row["price"] is not None else []
        table.add_row(str(row["nodes"] if by_count else number), *sizes, host, memory, *speed, mfu, *cost)
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
