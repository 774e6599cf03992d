"""The parts that all benchmarks share: options, aims, machine and versions, as JSON and text."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGES = (
    "torch", "megatron-core", "transformers", "numpy", "deepspeed", "triton", "transformer_engine",
    "flash_attn_3",
)  # fmt: skip


class Aim(NamedTuple):
    """A measured value and the largest value that is acceptable."""

    name: str
    measured: float
    aim: float

    @property
    def is_met(self) -> bool:
        """Whether the measured value is at most the aim."""
        return self.measured <= self.aim


def argument_parser(name: str, description: str | None, quick: str) -> argparse.ArgumentParser:
    """The options that every benchmark has.

    Args:
        name: the name of the benchmark.
        description: the docstring of its module; the first line is shown.
        quick: the help text of --quick.
    """
    parser = argparse.ArgumentParser(prog=name, description=(description or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="write aims, raw rounds, machine and versions here")
    parser.add_argument("--plot", type=Path, default=Path(f"{name}.png"), help="the plot, a PNG")
    return parser


def write_json(file: Path, aims: Sequence[Aim], **content: Any) -> None:
    """Write a JSON report.

    Args:
        file: the file to write.
        aims: the aims with the measured values.
        content: more keys of the report, such as the raw rounds.
    """
    listed = [{"name": aim.name, "measured": aim.measured, "aim": aim.aim, "met": aim.is_met} for aim in aims]
    report = {"aims": listed, "machine": machine(), "versions": versions(), **content}
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def aim_lines(aims: Sequence[Aim]) -> list[str]:
    """One line of text per aim."""
    return [
        f"{'met   ' if aim.is_met else 'MISSED'}  {aim.name}: {aim.measured:.3f} (aim: at most {aim.aim:.2f})"
        for aim in aims
    ]


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, current load, kernel."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, this repository and relevant packages; "missing" if not installed."""
    found = {"python": platform.python_version(), "commit": _commit()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
