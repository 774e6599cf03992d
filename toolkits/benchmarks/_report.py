"""Common parts of benchmarks: rounds, tables, aims, machine and versions."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from patch.device import installed_version

COMPUTE, COMMUNICATION = "compute alone", "communication alone"
_PACKAGES = (
    "torch", "megatron-core", "transformers", "numpy", "deepspeed", "triton", "transformer_engine",
    "flash_attn_3",
)  # fmt: skip


class NotRunError(Exception):
    """The benchmark cannot run on this machine; the message says why."""


class Aim(NamedTuple):
    """A measured value and its largest acceptable value."""

    name: str
    measured: float
    aim: float

    @property
    def is_met(self) -> bool:
        """Whether the measured value is at most the aim."""
        return self.measured <= self.aim


class Report(NamedTuple):
    """The results of a benchmark."""

    text: str
    aims: Sequence[Aim]
    content: Mapping[str, Any]
    """Further keys of the JSON file, such as the raw rounds."""


def table(heads: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with aligned columns, the first one to the left. It ends with a line break."""
    cells = [[str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    padded_rows = ([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])] for first, *others in cells)
    return "".join(f"| {' | '.join(padded)} |\n" for padded in padded_rows)


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """Return the median of the ratios within a round. Other work on the machine slows both values alike."""
    return median(this / that for this, that in zip(these, those, strict=True))


class Rounds(NamedTuple):
    """Seconds of contenders in each round; some benchmarks add compute alone and communication alone."""

    values: Mapping[str, Sequence[float]]
    """Name -> one value per round, measured on the slowest rank."""

    @property
    def _bound(self) -> list[float] | None:
        """max(compute, communication) of each round, the time with perfect overlap."""
        if COMMUNICATION not in self.values:
            return None
        return list(map(max, self.values[COMPUTE], self.values[COMMUNICATION]))

    def ratio(self, name: str, other: str) -> float:
        """Return the seconds of `name` divided by those of `other`."""
        return ratio(self.values[name], self.values[other])

    def over_bound(self, name: str) -> float:
        """Return the step time divided by max(compute, communication)."""
        assert self._bound is not None
        return ratio(self.values[name], self._bound)

    def best(self, *prefixes: str) -> str:
        """Return the fastest contender whose name begins with one of the prefixes."""
        names = [name for name in self.values if name.startswith(prefixes)]
        return min(names, key=lambda name: median(self.values[name]))

    def table(self, title: str, base: str, columns: Mapping[str, Callable[[str], str]] | None = None) -> str:
        """Return a table with one row per contender.

        Args:
            title: head of the first column.
            base: contender that the other times are divided by.
            columns: further columns: head -> function from a contender's name to its cell.
        """
        is_bounded, more = self._bound is not None, columns or {}
        heads = [title, "median s", "quartiles", f"/ {base}"]
        heads += ["/ max(compute, comm.)"] * is_bounded + [*more]
        rows = []
        for name, values in self.values.items():
            lower, middle, upper = quantiles([*values] * (1 + (len(values) == 1)), n=4, method="inclusive")
            cells = [name, f"{middle:.4g}", f"{lower:.4g} - {upper:.4g}", f"{self.ratio(name, base):.3f}"]
            if is_bounded:
                cells.append("" if name in (COMPUTE, COMMUNICATION) else f"{self.over_bound(name):.3f}")
            rows.append([*cells, *(cell(name) for cell in more.values())])
        return table(heads, rows)


def machine() -> dict[str, Any]:
    """Return the processor, the cores usable by this process, the current load, and the kernel."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, this repository and relevant packages, or "missing"."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    packages = {package: installed_version(package) or "missing" for package in _PACKAGES}
    return {"python": platform.python_version(), "commit": commit or "unknown", **packages}
