"""Checks, their findings, and the report. A check that fails does not stop the others."""

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
"""ok: nothing to complain of; warning: works, but slowly or not everywhere; broken: cannot work."""


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    name: str
    status: Status
    value: str
    """Finding in words."""
    advice: str = ""
    """Cure of a finding that is not ok."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Figures for the JSON report."""


def graded(name: str, value: str, is_bad: bool, cure: str, **data: Any) -> Finding:
    """Return a finding that is ok, or a warning with its cure.

    Args:
        value: the finding in words.
        is_bad: whether it is a warning.
        data: figures for the JSON report.
    """
    return Finding(name, "warning" if is_bad else "ok", value, cure if is_bad else "", data)


@dataclass(frozen=True)
class Settings:
    """Settings of the checks."""

    machine: MachineFacts
    num_processes: int
    """Processes of measurements between processes."""


def run_check(
    title: str, check: Callable[[Settings], Iterable[Finding]], settings: Settings
) -> list[Finding]:
    """Run a check; return its findings. If the check fails, its error is a finding too."""
    found: list[Finding] = []
    try:
        found.extend(check(settings))  # keeps what came before an error
    except Exception as error:  # noqa: BLE001 - the other checks must go on
        what = f"this check failed: {type(error).__name__}: {error}"
        found.append(Finding(title, "warning", what, "attach the JSON report to an issue"))
    return found


Report = Mapping[str, Sequence[Finding]]
"""Title of a check -> its findings."""
_WIDTH = 22


def lines_of(title: str, findings: Sequence[Finding]) -> list[str]:
    """Return a section of the report as lines of text. A cure is below its finding."""
    lines = [title]
    for finding in findings:
        lines.append(f"  {finding.status:<8} {finding.name:<{_WIDTH}} {finding.value}")
        if finding.advice:
            lines.append(f"  {'':<8} {'':<{_WIDTH}} -> {finding.advice}")
    return lines


def verdict_of(report: Report) -> str:
    """Return the worst status of all findings: `broken`, `warnings` or `ok`."""
    statuses = {finding.status for findings in report.values() for finding in findings}
    return "broken" if "broken" in statuses else "warnings" if "warning" in statuses else "ok"


def json_of(report: Report, machine: Mapping[str, Any]) -> str:
    """Return the report as JSON, without names of users, folders and machines.

    Args:
        machine: fields that `llama-patch plan --machine` reads.
    """
    checks = {title: [asdict(finding) for finding in findings] for title, findings in report.items()}
    text = json.dumps({"verdict": verdict_of(report), "machine": machine, "checks": checks}, indent=1)
    host, user = socket.gethostname(), os.environ.get("USER", "")
    names = {str(Path.cwd()): "HERE", str(Path.home()): "HOME", host: "HOST", user: "USER"}
    for name in sorted(names.keys() - {"", "/", "root", "localhost"}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", names[name], text)
    return text + "\n"
