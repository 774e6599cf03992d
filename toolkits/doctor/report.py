"""The report: lines of text, a verdict with cures, and JSON without names of people and machines."""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkits.doctor.check import Finding

Report = Mapping[str, Sequence[Finding]]
"""The findings of each check, by its title."""
_FORMAT = 1
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


def verdict_lines(report: Report) -> list[str]:
    """The verdict, and again what is not ok, the worst first."""
    listed = [finding for findings in report.values() for finding in findings if finding.status != "ok"]
    listed.sort(key=lambda finding: finding.status)  # "broken" comes before "warning"
    lines = [f"{finding.status:<8} {finding.name}: {finding.value}" for finding in listed]
    cures = [f"         cure: {finding.advice}" if finding.advice else "" for finding in listed]
    shown = [line for pair in zip(lines, cures, strict=True) for line in pair if line]
    return [*shown, f"verdict: {verdict_of(report)}"]


def json_of(report: Report, machine: Mapping[str, Any], folder: Path) -> str:
    """The report to attach to an issue.

    Args:
        report: all findings.
        machine: what `toolkits.plan --machine` reads.
        folder: a path that is not shown, besides the home folder.
    """
    checks = {
        title: [
            {"name": f.name, "status": f.status, "value": f.value, "advice": f.advice, "data": f.data}
            for f in findings
        ]
        for title, findings in report.items()
    }
    content = {"doctor": _FORMAT, "verdict": verdict_of(report), "machine": machine, "checks": checks}
    return json.dumps(_anonymous(content, _names(folder)), indent=1) + "\n"


def _names(folder: Path) -> dict[str, str]:
    """What must not be in a report, and what stands for it; long ones first, since they hold shorter ones."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        user = ""
    host = socket.gethostname()
    names = {str(folder.resolve()): "FOLDER", str(Path.cwd()): "HERE", str(Path.home()): "HOME", host: "HOST",
             host.split(".")[0]: "HOST", user: "USER"}  # fmt: skip
    ordinary = ("", "/", "root", "localhost")
    return {name: names[name] for name in sorted(names, key=len, reverse=True) if name not in ordinary}


def _anonymous(value: Any, names: Mapping[str, str]) -> Any:
    """A JSON value in whose texts none of the names is left."""
    if isinstance(value, str):
        for name, word in names.items():
            value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word, value)
        return value
    if isinstance(value, Mapping):
        return {str(key): _anonymous(each, names) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_anonymous(each, names) for each in value]
    return value
