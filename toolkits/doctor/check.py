"""A check, what it finds, and the report of all: a check that fails or takes too long stops no other one."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from patch.device import MachineFacts, start_thread

Status = Literal["ok", "warning", "broken"]
"""Fine, or with nothing to say against; works, but slowly or not everywhere; cannot work."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    value: str
    """What was found, in words."""
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
    """What the checks are about."""

    machine: MachineFacts
    num_processes: int
    """Processes that measurements between processes start."""
    folder: Path
    """Where checkpoints would be written."""

    @property
    def has_gpus(self) -> bool:
        """Whether torch sees a GPU."""
        return self.machine.cuda_devices > 0


class Check(NamedTuple):
    """A part of the report."""

    title: str
    run: Callable[[Settings], Iterable[Finding]]
    limit_s: float = 20.0
    """What it has found by then is all that is reported."""


def run_check(check: Check, settings: Settings) -> list[Finding]:
    """The findings of one check; its failure, or its silence, is one of them."""
    found: list[Finding] = []

    def work() -> None:
        try:
            for finding in check.run(settings):
                found.append(finding)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a machine, the others go on
            what = f"this check failed: {type(error).__name__}: {error}"
            found.append(Finding(check.title, "warning", what, "attach the JSON report to an issue"))

    thread = start_thread(check.title, work)
    thread.join(check.limit_s)
    done = list(found)
    if thread.is_alive():
        what = f"not done after {check.limit_s:.0f} s"
        done.append(Finding(check.title, "warning", what, "something there hangs or is very slow"))
    return done


class Ended(NamedTuple):
    """How a program ended."""

    code: int | None
    """Its exit code; None: it was killed, because its time was up."""
    output: str
    error: str

    @property
    def reason(self) -> str:
        """Why it failed, in one line."""
        if self.code is None:
            return "took too long"
        lines = [line for line in self.error.splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit code {self.code}"


def run_program(
    command: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    started: Callable[[int], None] = lambda session: None,
    **others: Any,
) -> Ended:
    """Run a program in a session of its own; when it ends or its time is up, what it started is killed.

    Args:
        command: the program and its arguments.
        limit_s: the time that it has.
        environment: its variables; None: this process's.
        started: gets its session.
        others: of `subprocess.Popen`; what goes to a file is not part of the answer.
    """
    env = None if environment is None else dict(environment)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(command, text=True, env=env, **streams | others) as process:
        started(process.pid)
        code = None
        try:
            output, error = process.communicate(timeout=limit_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if code is None:
            output, error = process.communicate()
    return Ended(code, output, error)


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
    """What is not ok once more, the worst first, and the verdict."""
    lines = []
    for status in ("broken", "warning"):
        for finding in (each for findings in report.values() for each in findings if each.status == status):
            lines.append(f"{status:<8} {finding.name}: {finding.value}")
            if finding.advice:
                lines.append(f"         cure: {finding.advice}")
    return [*lines, f"verdict: {verdict_of(report)}"]


def json_of(report: Report, machine: Mapping[str, Any], folder: Path) -> str:
    """The report to attach to an issue, without names of people and machines.

    Args:
        report: all findings.
        machine: what `toolkits.plan --machine` reads.
        folder: a path that is not shown, besides the home folder.
    """
    checks = {title: [asdict(finding) for finding in findings] for title, findings in report.items()}
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
