"""`--search` of `llama-patch plan`: the fastest layouts of a run, on one number of machines or on several."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patch.config.fields import FIELDS, scalar_of
from patch.config.flags import flag_words
from patch.config.positions import POSITIONS, VARIABLES, position_word
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.numbers import scaled, size_text, timed
from patch.plan.memory import weights_on_host
from patch.plan.planned_run import NAMED_LATER, Planned
from patch.plan.report import budget, budget_line, machine_line
from patch.plan.savings import share_on_host
from patch.plan.search import Found, fits_somewhere, search
from patch.preflight.parse import parse_args

_WIDTH = 160
"""Columns where the output is no terminal."""
_TOKENS = 1e9
"""Whose device hours are compared, if --tokens gives no number."""
_DOUBLINGS = 6
"""Doublings of the number of machines, where no layout fits."""
_ON_DISK: dict[str, Any] = {
    "offload_folder": "DIR", "optimizer_offload_host_share": 0.0, "main_grads_dtype": "bf16",
}  # fmt: skip
"""What a run takes last, where no layout fits."""
_BY_THE_MACHINE = ("nnodes", "nproc_per_node")
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
    planned, first = layouts[0]
    if options.tokens and len({each.machine.nodes for each, _ in layouts}) == 1:
        print(budget_line(first.time, planned.machine, options.tokens).replace("budget", "budget 1", 1))
    for number, line in enumerate(lines, 1):
        print(f"\n{number}  {line}")
    if assumed := _assumed(planned, first):
        print(f"\nnot given by you, so set them in the line that you start: {', '.join(assumed)}")


def row(planned: Planned, layout: Found, tokens: float | None) -> dict[str, Any]:
    """A layout of a search: machines, sizes, savings, memory and speed, days and device hours.

    Args:
        planned: the run and the machines that the layout is for.
        layout: it.
        tokens: of the training; None: a thousand million.
    """
    run, machine = layout.resolved, planned.machine
    return {
        "nodes": machine.nodes,
        "devices": machine.num_devices,
        **layout.layout._asdict(),
        "dp": run.data_parallel_size,
        "sharding": run.zero_stage.name.lower(),
        "bucket_size": run.optimizer.reduce_bucket_size,
        "recompute": run.recompute or "none",
        "host_fraction": share_on_host(run),
        "weights_on_host": weights_on_host(run),
        "device_bytes": layout.fit.device_needed,
        "step_seconds": layout.time.seconds,
        "tokens_per_second_per_device": layout.time.tokens_per_second / run.world_size,
        "mfu": layout.time.mfu,
        **budget(layout.time, machine, tokens or _TOKENS),
    }


def _line(planned: Planned, layout: Found) -> str:
    """A line for a shell, with the environment variables that set fields."""
    environ = planned.environ
    variables = [f"{name}={shlex.quote(environ[name])} " for name in VARIABLES if name in environ]
    argv = launch_argv(layout.run, environ, planned.machine.facts)
    line = "".join(variables) + shlex.join(["bash", "examples/llama3_1/run_mcore_llama.sh", *argv])
    for name in NAMED_LATER:
        line = line.replace(os.path.abspath(name), name)
    return line


def launch_argv(config: RunConfig, environ: Mapping[str, str], machine: MachineFacts) -> list[str]:
    """The arguments of run_mcore_llama.sh that give a run on this machine with these variables.

    Args:
        config: the run, of a preset's size or with its shape in position 22.
        environ: the environment variables that say how many machines there are, and which one this is.
        machine: one of them.
    Returns:
        ENV `dsw`, or `dlc` for several machines, the other positions, and a flag for each field that they
        leave different.
    """
    positions = [_position(config, position.name, position.fields) for position in POSITIONS]
    found = parse_args(positions, environ, machine).config
    flags = []
    for field in FIELDS.values():
        wanted = scalar_of(config, field.name)
        if field.name in _BY_THE_MACHINE or scalar_of(found, field.name) == wanted:
            continue
        flags.append("=".join(flag_words(field, wanted)))
    return positions + flags


def _position(config: RunConfig, name: str, fields: tuple[str, ...]) -> str:
    training = config.training
    if name == "ENV":
        return "dlc" if config.parallel.nnodes > 1 else "dsw"
    if name == "FL":
        return "true" if scalar_of(config, "attention_backend") == "flash" else "false"
    if name == "AC":
        word = position_word("recompute_granularity", scalar_of(config, "recompute_granularity"))
        return "offload" if training.cpu_offloading and word == "none" else word
    value = scalar_of(config, fields[0])
    if fields[0] in ("train_iters", "lr_warmup_iters") and not training.sft:
        # A run whose length is in epochs has no steps yet; the flags say so.
        steps = max(int(value), 1) if fields[0] == "train_iters" else int(value)
        value = steps * training.global_batch_size * config.model.seq_length
    return position_word(fields[0], value)


def _assumed(planned: Planned, layout: Found) -> list[str]:
    """The positions of a line that hold values which the user has not given: "5 LR 0.0003"."""
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
    """What lacks, and with what on a disk, or on how many machines, a layout would fit."""
    machine, optimizer = planned.machine, planned.run.optimizer
    what = f"no layout fits {machine.num_devices} devices of this memory" if machine.is_gpu else (
        f"no layout fits: the host memory of {machine.nodes * machine.host_memory_bytes / 2**30:.0f} GiB is "
        "too small"
    )  # fmt: skip
    on_disk = dataclasses.replace(planned.run, optimizer=dataclasses.replace(optimizer, **_ON_DISK))
    if machine.is_gpu and optimizer.offload_folder is None and fits_somewhere(on_disk, machine):
        words = (f"{FIELDS[name].flag} {scalar_of(on_disk, name)}" for name in _ON_DISK)
        what += f"; one would fit with {' '.join(words)}, its states on a disk"
    for doubled in range(1, _DOUBLINGS + 1):
        larger = dataclasses.replace(machine, nodes=machine.nodes * 2**doubled)
        if fits_somewhere(planned.run, larger):
            return f"{what}; one would fit {larger.nodes} machines like it: --nodes {larger.nodes}"
    return f"{what}, nor {2**_DOUBLINGS} times as many machines: take shorter sequences or larger devices"


def _show(rows: list[dict[str, Any]], tokens: float | None, *, by_count: bool) -> None:
    """A table of layouts; by the number of machines with the cost of training at each."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=True)
    of_experts = ["ep"] if any(row["ep"] > 1 for row in rows) else []
    names = ["TP", "PP", "VPP", "CP", *map(str.upper, of_experts), "DP", "micro-batch"]
    names += ["sharding", "AC", "on host", "memory", "step"]
    names = ["nodes" if by_count else "", *names, "tokens/s/device", "MFU"]
    if by_count:
        names += ["days", f"device hours of {scaled(tokens or _TOKENS).strip()} tokens"]
        names += ["price"] if rows[0]["price"] is not None else []
    for name in names:
        table.add_column(name, justify="right")
    for number, row in enumerate(rows, 1):
        fields = ("tp", "pp", "vpp", "cp", *of_experts, "dp", "micro_batch", "sharding", "recompute")
        sizes = [str(row[name]) for name in fields]
        speed = [timed(row["step_seconds"]), scaled(row["tokens_per_second_per_device"]).strip()]
        host, memory = f"{row['host_fraction']:.0%}", size_text(row["device_bytes"])
        host += f", weights {row['weights_on_host']:.0%}" if row["weights_on_host"] else ""
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
