"""Run a benchmark and report.

    python -m toolkits.benchmarks NAME [--quick] [--json FILE] [the benchmark's own options]

A benchmark is a module with a function `run`, which takes the options and returns a Report. Optional names of
the module: `ROUNDS` (rounds without and with --quick), `OPTIONS` (name -> arguments of argparse).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from toolkits.benchmarks._report import NotRunError, machine, versions


def main(argv: Sequence[str]) -> int:
    """Run a benchmark; return 0, also if this machine cannot run it, or 130 after Ctrl-C."""
    names = argparse.ArgumentParser(prog="python -m toolkits.benchmarks")
    modules = sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py"))
    names.add_argument("name", choices=modules, help="the benchmark; its own options are in NAME --help")
    benchmark = import_module(f"toolkits.benchmarks.{names.parse_args(argv[:1]).name}")
    described = vars(benchmark)
    parser = argparse.ArgumentParser(prog=argv[0], description=(benchmark.__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, steps or sizes")
    parser.add_argument("--json", type=Path, help="write aims, raw rounds, machine and versions here")
    for option, told in described.get("OPTIONS", {}).items():
        parser.add_argument(option, **told)
    arguments = parser.parse_args(argv[1:])
    arguments.rounds = described.get("ROUNDS", (1, 1))[arguments.quick]
    try:
        report = benchmark.run(arguments)
    except NotRunError as reason:
        print(f"not run: {reason}")
        return 0
    except KeyboardInterrupt:
        return 130
    print(report.text)
    for aim in report.aims:
        state = "met   " if aim.is_met else "MISSED"
        print(f"{state}  {aim.name}: {aim.measured:.3f} (aim: at most {aim.aim:.2f})", flush=True)
    if arguments.json:
        aims = [{**aim._asdict(), "met": aim.is_met} for aim in report.aims]
        content = {"aims": aims, "machine": machine(), "versions": versions(), **report.content}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
