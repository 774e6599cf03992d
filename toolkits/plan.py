"""llama-patch plan: memory, time and cost of a run on any machine, and the layouts that suit it.

    llama-patch plan --machine h100 --nodes 4 -- --model-size 70B --tensor-model-parallel-size 8 ...
    llama-patch plan --machine h100 --nodes 4 --search -- --model-size 8B --seq-length 8192
    llama-patch plan --machine h100 --nodes 1,2,4,8 --search -- --model-size 8B --seq-length 8192
    llama-patch plan --machine h100 --scaling

After `--` follows the run, in the forms of run_mcore_llama.sh: 25 positions and flags, flags alone, or
--config FILE. Nothing is started. Exit code 0: the run fits, or layouts were found; 1: it does not fit, or no
layout was found; 2: the run is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from patch.config import user_message
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.fits import fit_of
from patch.plan.planned_run import PlannedRun, plan_run
from patch.plan.report import Failures, plan_json, plan_lines, rank_groups, rank_lines
from toolkits import _scaling, _schedule, _search
from toolkits._arguments import ArgumentParser, at_dashes, exit_code_of, members, output_file, positive, typed


def main(argv: list[str]) -> int:
    """Run the command line; return 0, 1 if nothing fits, or the exit code of the error."""
    own, run = at_dashes(argv)
    options = _parser().parse_args(own)
    return exit_code_of(lambda: _plan(options, run), user_message)


def _plan(options: argparse.Namespace, argv: list[str]) -> int:
    if options.scaling:
        if argv or options.search or options.nodes or options.devices_per_node:
            raise ConfigError("--scaling takes --machine alone: its models and numbers of GPUs are its own")
        return _scaling.run(options.machine)
    if not argv:
        raise ConfigError("no run is given, expected one after `--`, such as -- --model-size 8B")
    counts = options.nodes or [None]
    if len(counts) > 1 and not options.search:
        raise ConfigError(f"--nodes: got {len(counts)} numbers, expected one; several with --search")
    if options.failures_per_week and (options.search or not options.tokens):
        raise ConfigError("--failures-per-week: expected --tokens beside it, and no --search")
    if options.search and options.explain:
        raise ConfigError("--explain: got it beside --search, expected one of them: explain what it finds")
    failures = None
    if per_week := options.failures_per_week:
        failures = Failures(per_week, 60 * options.restart_minutes)
    here = MachineFacts.probe()
    plans = [_planned(options, argv, nodes, here) for nodes in counts]
    if options.search:
        exit_code, found = _search.run(options, plans)
        _write(options.json, found)
        return exit_code
    (planned,) = plans
    for line in plan_lines(planned, options.tokens, failures, explain=options.explain):
        print(line)
    report = plan_json(planned, options.tokens, failures) if options.json else {}
    if options.schedule:
        _schedule.show(planned.resolved, None if options.schedule is True else options.schedule)
    if options.ranks:
        print(*rank_lines(planned.resolved), sep="\n")
        report["ranks"] = {name: [*map(list, each)] for name, each in rank_groups(planned.resolved).items()}
    _write(options.json, report)
    return 0 if fit_of(planned.resolved, planned.machine.facts).is_whole else 1


def _planned(
    options: argparse.Namespace, argv: list[str], nodes: int | None, here: MachineFacts
) -> PlannedRun:
    """Return the run, planned for this number of machines, with the price that the user gave."""
    planned = plan_run(
        argv, options.machine, nodes, options.devices_per_node,
        environ=os.environ, here=here, for_search=options.search,
    )  # fmt: skip
    if options.price is None:
        return planned
    return planned._replace(machine=replace(planned.machine, price_per_device_hour=options.price))


def _write(file: Path | None, report: dict[str, object]) -> None:
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _node_counts(text: str) -> list[int]:
    """Return one number of at least 1, or several with commas, as an `argparse` type."""
    return [members(number) for number in text.split(",")]


def _count(text: str) -> float:
    """Return a number above 0 such as 1e12, as an `argparse` type."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number above 0")
    return number


def _parser() -> argparse.ArgumentParser:
    usage = "%(prog)s [--machine NAME] [--nodes N] [...] -- RUN"
    gone = {"--plot": "plan a line that was found, which lists its parts"}
    parser = ArgumentParser(
        prog=typed("python -m toolkits.plan"), usage=usage, description=__doc__, gone=gone
    )
    parser.add_argument(
        "--machine", default="here", metavar="NAME",
        help="a100, h100, h200, b200 (nodes of eight), here, or a YAML or JSON file of a machine, such as "
        "toolkits.doctor writes [here]",
    )  # fmt: skip
    add = parser.add_argument
    add("--nodes", type=_node_counts, metavar="N", help="how many; N,N,...: --search on each, and its cost")
    add("--devices-per-node", type=members, metavar="N", help="of each [all]")
    add("--tokens", type=_count, metavar="X", help="also days and device hours for X tokens")
    add("--price", type=_count, metavar="X", help="of a device hour, for the cost of --tokens")
    add("--explain", action="store_true", help="print the formulas behind each line")
    add("--failures-per-week", type=_count, metavar="X", help="also the time that they cost --tokens")
    add("--restart-minutes", type=_count, default=10.0, metavar="X", help="to the step after a failure [10]")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--ranks", action="store_true", help="also print which ranks form which process groups")
    what.add_argument(
        "--schedule", nargs="?", const=True, type=output_file, metavar="FILE.svg",
        help="also draw three schedules: which stage computes what when",
    )  # fmt: skip
    what.add_argument("--search", action="store_true", help="find the fastest layouts, as command lines")
    add("--best", type=positive, default=5, metavar="N", help="--search: show the N best [5]")
    add("--json", type=output_file, metavar="FILE", help="also write all of this as JSON")
    add("--scaling", action="store_true", help="plan LLaMA 8B, 70B, 405B on 8 to 16384 devices: a table")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
