"""Draws what runs beside what in one step, from the traces of --profile, and says what is exposed.

    llama-patch timeline OUTPUT_BASEPATH/log/traces [--step N] [--output page.html] [--json FILE]

Exit code: 0; 3 if a file is no trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from patch.errors import DataError
from patch.storage.atomic import write_atomically
from toolkits._arguments import ArgumentParser, exit_code_of, output_file, positive, typed
from toolkits.timeline.figures import LEGEND, choose_step, figures_of, most_exposed, page_of
from toolkits.timeline.trace import RankTrace, read_trace

_COLUMNS = {
    "step_ms": "step",
    "compute_ms": "compute",
    "communication_ms": "messages",
    "exposed_communication_ms": "exposed",
    "copies_ms": "copies",
    "exposed_copies_ms": "exposed",
    "host_waits_ms": "host waits",
    "idle_ms": "idle",
}


def main(argv: list[str]) -> int:
    """Run the command line; returns 0, or the exit code of the error."""
    options = _parse(argv)
    return exit_code_of(lambda: _draw(options))


def _draw(options: argparse.Namespace) -> None:
    files = trace_files(options.traces)
    traces = [read_trace(file) for file in files]
    step = choose_step(traces, options.step)
    lanes = sorted((trace.cut(step) for trace in traces), key=lambda each: each.rank)
    page = options.output or files[0].parent.parent / "timeline.html"
    write_atomically(page, page_of(lanes, step))
    if options.json:
        ranks = [
            {"rank": each.rank, "is_gpu": each.is_gpu, **figures_of(each, step),
             "most_exposed": dict(most_exposed(each))}
            for each in lanes
        ]  # fmt: skip
        write_atomically(options.json, json.dumps({"step": step, "ranks": ranks}, indent=1) + "\n")
    print(table(lanes, step))
    print(f"page: {page}")


def trace_files(paths: Sequence[Path]) -> list[Path]:
    """The traces that paths name: files, or all of a folder or of a run.

    Raises:
        DataError: a path is not there, or a folder has no trace.
    """
    found: list[Path] = []
    for path in paths:
        inside = [path]
        if path.is_dir():
            folder = path / "log" / "traces" if (path / "log" / "traces").is_dir() else path
            inside = [*folder.glob("rank_*.json"), *folder.glob("rank_*.json.gz")]
        if not inside or not path.exists():
            raise DataError(f"{path}: expected the folder of a run with --profile, or its log/traces")
        found += sorted(inside)
    return found


def table(lanes: Sequence[RankTrace], step: int) -> str:
    """The figures of each rank in milliseconds, and the messages that cost most."""
    lines = [f"step {step}, ms", f"{'rank':>5}" + "".join(f"{name:>12}" for name in _COLUMNS.values())]
    for each in lanes:
        figures = figures_of(each, step)
        lines.append(f"{each.rank:>5}" + "".join(f"{figures[name]:>12.2f}" for name in _COLUMNS))
    for each in lanes:
        named = ", ".join(f"{name} {ms:.2f}" for name, ms in most_exposed(each))
        lines.append(f"rank {each.rank}: most exposed: {named or 'nothing'}")
    return "\n".join([*lines, LEGEND])


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog=typed("python -m toolkits.timeline"), description=__doc__)
    parser.add_argument(
        "traces", nargs="+", type=Path, metavar="TRACE",
        help="the folder of a run with --profile (OUTPUT_BASEPATH), or files of its log/traces",
    )  # fmt: skip
    parser.add_argument("--step", type=positive, metavar="N", help="the step; default: the last one of all")
    parser.add_argument(
        "--output",
        type=output_file,
        metavar="FILE",
        help="the page; default: timeline.html beside the traces' folder, OUTPUT_BASEPATH/log/timeline.html",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here, too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
