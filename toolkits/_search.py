"""`llama-patch plan --search`: the fastest layouts of a run, for one or several numbers of machines."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patch.config.fields import FIELDS, scalar_of
from patch.config.flags import flag_words
from patch.config.positions import POSITIONS, VARIABLES, position_word
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.plan.memory import weights_on_host
from patch.plan.planned_run import NAMED_LATER, PlannedRun
from patch.plan.report import budget, budget_line, machine_line
from patch.plan.savings import share_on_host, with_values
from patch.plan.search import Candidate, search
from patch.preflight.parse import parse_args
from patch.text import scaled, size_text, timed
from toolkits._arguments import console
from toolkits._program import LAUNCHER

_TOKENS = 1e9
"""Tokens for which device hours are compared, if --tokens is not given."""
_BY_THE_MACHINE = ("nnodes", "nproc_per_node")
_BY_THE_SEARCH = {
    "ENV", "MODEL_SIZE", "BATCH_SIZE", "TP", "PP", "CP", "SP", "DO", "FL", "AC", "OPTIMIZER_OFFLOAD",
}  # fmt: skip


def run(options: Namespace, plans: Sequence[PlannedRun]) -> tuple[int, dict[str, Any]]:
    """Print the fastest layouts with their command lines.

    Args:
        options: options of `llama-patch plan`.
        plans: the run, planned for each number of machines.
    Returns:
        the exit code, and the printed results for JSON.
    """
    num_best = options.best if len(plans) == 1 else 1
    layouts = [(each, layout) for each in plans for layout in search(each.run, each.machine, num_best)]
    print(machine_line(plans[-1].machine))
    if not layouts:
        memory = f"memory of {plans[-1].machine.num_devices} devices and their hosts"
        print(
            f"no layout fits the {memory}: take more machines (--nodes), larger devices, shorter sequences, "
            "or states on a disk (--offload-folder)"
        )
        return 1, {}
    rows = [row(planned, layout, options.tokens) for planned, layout in layouts]
    _show(rows, options.tokens, by_count=len(plans) > 1)
    for number in [each.machine.num_devices for each in plans]:
        if number not in [each["devices"] for each in rows]:
            print(f"no layout fits {number} devices")
    planned, first = layouts[0]
    if options.tokens and len({each["nodes"] for each in rows}) == 1:
        print(budget_line(first.time, planned.machine, options.tokens).replace("budget", "budget 1", 1))
    lines = [_line(*each) for each in layouts]
    print(*(f"\n{number}  {line}" for number, line in enumerate(lines, 1)), sep="\n")
    if line := _with_narrow_moments(planned, first):
        print(f"\n{line}")
    if assumed := _assumed(planned, first):
        print(f"\nnot given by you, so set them in the line that you start: {', '.join(assumed)}")
    commands = [{**each, "command": line} for each, line in zip(rows, lines, strict=True)]
    return 0, {"machine": plans[0].machine.to_json(), "layouts": commands}


def row(planned: PlannedRun, layout: Candidate, tokens: float | None) -> dict[str, Any]:
    """Return a layout as a row of the table: machines, sizes, memory, speed, days and device hours.

    Args:
        tokens: tokens of the training, or None for `_TOKENS`.
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


def _line(planned: PlannedRun, layout: Candidate) -> str:
    """Return a shell command line, with the environment variables that set fields."""
    environ = planned.environ
    variables = [f"{name}={shlex.quote(environ[name])} " for name in VARIABLES if name in environ]
    argv = launch_argv(layout.run, environ, planned.machine.facts)
    line = "".join(variables) + shlex.join(["bash", _launcher(), *argv])
    for name in NAMED_LATER:
        line = line.replace(os.path.abspath(name), name)
    return line


def _with_narrow_moments(planned: PlannedRun, first: Candidate) -> str:
    """Return a line about the fastest layout with bf16 moments, if it leaves more states on the device."""
    if not share_on_host(first.run):
        return ""
    run = with_values(planned.run, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    best = search(run, planned.machine, 1)[0]  # what fits with fp32 moments fits
    share = share_on_host(best.run)
    if share >= share_on_host(first.run):
        return ""
    where = f"{share:.0%} of the states are" if share else "no states are"
    flags = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    return f"with {flags} (other numerics) {where} on the host: {timed(best.time.seconds)} a step"


def _launcher() -> str:
    """Return the path of the launcher script, relative to the current folder if it is below it."""
    here = Path.cwd().resolve()
    return str(LAUNCHER.relative_to(here) if LAUNCHER.is_relative_to(here) else LAUNCHER)


def launch_argv(config: RunConfig, environ: Mapping[str, str], machine: MachineFacts) -> list[str]:
    """Return the arguments of run_mcore_llama.sh that start this run.

    Args:
        config: the run. Its model is a preset, or its shape is read from position 22.
        environ: environment variables; they give the number of machines and the number of this machine.
        machine: one of the machines.
    Returns:
        the positions, with ENV `dsw`, or `dlc` for several machines, and a flag for each field that the
        positions do not set.
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
        # A run whose length is given in epochs has no number of steps yet; its flags set the length.
        steps = max(int(value), 1) if fields[0] == "train_iters" else int(value)
        value = steps * training.global_batch_size * config.model.seq_length
    return position_word(fields[0], value)


def _assumed(planned: PlannedRun, layout: Candidate) -> list[str]:
    """Return the positions whose values the user has not given, such as "5 LR 0.0003"."""
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


_COLUMNS = {
    "TP": "tp", "PP": "pp", "VPP": "vpp", "CP": "cp", "EP": "ep", "DP": "dp", "micro-batch": "micro_batch",
    "sharding": "sharding", "AC": "recompute",
}  # fmt: skip
"""Title -> key of a row, for columns that are printed as they are."""


def _show(rows: list[dict[str, Any]], tokens: float | None, *, by_count: bool) -> None:
    """Print the layouts. With `by_count`, each row is a number of machines with its cost of training."""
    from rich.table import Table

    has_experts = any(row["ep"] > 1 for row in rows)
    columns = {title: key for title, key in _COLUMNS.items() if has_experts or key != "ep"}
    cells: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        own: dict[str, Any] = {"nodes": row["nodes"]} if by_count else {"": number}
        own |= {title: row[key] for title, key in columns.items()}
        weights = f", weights {row['weights_on_host']:.0%}" if row["weights_on_host"] else ""
        own["on host"] = f"{row['host_fraction']:.0%}{weights}"
        own["memory"], own["step"] = size_text(row["device_bytes"]), timed(row["step_seconds"])
        own["tokens/s/device"] = scaled(row["tokens_per_second_per_device"]).strip()
        own["MFU"] = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        if by_count:
            own["days"] = f"{row['days']:.3g}"
            own[f"device hours of {scaled(tokens or _TOKENS).strip()} tokens"] = f"{row['device_hours']:,.1f}"
            own |= {} if row["price"] is None else {"price": f"{row['price']:,.0f}"}
        cells.append(own)
    table = Table(box=None, pad_edge=True)
    for name in cells[0]:
        table.add_column(name, justify="right")
    for own in cells:
        table.add_row(*map(str, own.values()))
    console().print(table)
