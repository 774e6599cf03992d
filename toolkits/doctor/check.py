"""A check, what it finds, and the report of all: a check that fails stops no other one."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from patch.device import MachineFacts

Status = Literal["ok", "warning", "broken"]
"""Fine, or with nothing to say against; works, but slowly or not everywhere; cannot work."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    value: str
    """The finding, in words."""
    advice: str = ""
    """The cure, of a finding that is not ok."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Numbers for the JSON report."""


def graded(name: str, value: str, is_bad: bool, cure: str, **data: Any) -> Finding:
    """A finding that is ok, or a warning with its cure.

    Args:
        name: of the finding.
        value: what was found, in words.
        is_bad: whether it is a warning.
        cure: of the warning.
        data: numbers for the JSON report.
    """
    return Finding(name, "warning" if is_bad else "ok", value, cure if is_bad else "", data)


@dataclass(frozen=True)
class Settings:
    """The settings of the checks."""

    machine: MachineFacts
    num_processes: int
    """Processes that measurements between processes start."""

    @property
    def has_gpus(self) -> bool:
        """Whether torch sees a GPU."""
        return self.machine.cuda_devices > 0


def run_check(
    title: str, check: Callable[[Settings], Iterable[Finding]], settings: Settings
) -> list[Finding]:
    """The findings of one check; its failure is one of them.

    Args:
        title: of the check.
        check: yields its findings.
        settings: what it is about.
    """
    found: list[Finding] = []
    try:
        for finding in check(settings):
            found.append(finding)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a machine, the others go on
        what = f"this check failed: {type(error).__name__}: {error}"
        found.append(Finding(title, "warning", what, "attach the JSON report to an issue"))
    return found


Report = Mapping[str, Sequence[Finding]]
"""The findings of each check, by its title."""
_WIDTH = 22


def lines_of(title: str, findings: Sequence[Finding]) -> list[str]:
    """A part of the report as text; the cure is below what it cures."""
    lines = [title]
    for finding in findings:
        lines.append(f"  {finding.status:<8} {finding.name:<{_WIDTH}} {finding.value}")
        if finding.advice:
            lines.append(f"  {'':<8} {'':<{_WIDTH}} -> {finding.advice}")
    return lines


def verdict_of(report: Report) -> str:
    """`broken`, `warnings` or `ok`: the worst of all findings."""
    statuses = {finding.status for findings in report.values() for finding in findings}
    return "broken" if "broken" in statuses else "warnings" if "warning" in statuses else "ok"


def json_of(report: Report, machine: Mapping[str, Any]) -> str:
    """The report to attach to an issue, without names of users, folders and machines.

    Args:
        report: all findings.
        machine: what `toolkits.plan --machine` reads.
    """
    checks = {title: [asdict(finding) for finding in findings] for title, findings in report.items()}
    text = json.dumps({"verdict": verdict_of(report), "machine": machine, "checks": checks}, indent=1)
    host, user = socket.gethostname(), os.environ.get("USER", "")
    names = {str(Path.cwd()): "HERE", str(Path.home()): "HOME", host: "HOST", user: "USER"}
    for name in sorted(names.keys() - {"", "/", "root", "localhost"}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", names[name], text)
    return text + "\n"
