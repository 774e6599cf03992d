"""Runs other programs within a time limit; where the project's own programs are."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
"""The folder with patch, toolkits and examples: of the repository, or of the installed package."""
LAUNCHER = ROOT / "examples" / "llama3_1" / "run_mcore_llama.sh"


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
