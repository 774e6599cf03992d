"""Start another program within a time limit; paths of the project's own programs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from patch.config.positions import VARIABLES

ROOT = Path(__file__).resolve().parents[1]
"""Folder with patch, toolkits and examples: the repository, or the installed package."""
LAUNCHER = ROOT / "examples" / "llama3_1" / "run_mcore_llama.sh"


TRAIN = ROOT / "toolkits" / "train" / "__main__.py"
"""The path holds in the repository and in an installed package."""
_OF_RUNS = {*VARIABLES, "NPROC_PER_NODE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


def own_environment(**own: str) -> dict[str, str]:
    """Return this process's environment without variables of the user's runs, and with the given ones."""
    users = {name for name in os.environ if name in _OF_RUNS or name.startswith(("MP_", "SLURM_"))}
    return {**{name: value for name, value in os.environ.items() if name not in users}, **own}


class Ended(NamedTuple):
    """Result of a program that has ended."""

    code: int | None
    """Exit code, or None if the program was killed at its time limit."""
    output: str
    error: str

    @property
    def reason(self) -> str:
        """Cause of the failure, in one line."""
        if self.code is None:
            return "took too long"
        lines = [line for line in self.error.splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit code {self.code}"


def run_training(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a training command in the foreground; return its exit code. Ctrl-C stops it with a checkpoint."""
    with subprocess.Popen(command, env=dict(environment)) as launcher:
        try:
            return launcher.wait()
        except KeyboardInterrupt:  # the launcher got the same signal and saves a checkpoint
            code = launcher.wait()
            print("stopped: the training command above resumes; the quickstart would begin anew", flush=True)
            return code


def run_program(
    command: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    started: Callable[[int], None] = lambda session: None,
    **others: Any,
) -> Ended:
    """Run a program in its own session; at its end or its time limit, kill all processes of the session.

    Args:
        environment: the program's environment, or None for the environment of this process.
        started: called with the session's id.
        others: arguments of `subprocess.Popen`. Streams that go to a file are missing from the result.
    """
    env = None if environment is None else dict(environment)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(command, text=True, env=env, **streams | others) as process:
        started(process.pid)
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                output, error = process.communicate(timeout=limit_s)
                code = process.returncode
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if code is None:
            output, error = process.communicate()
    return Ended(code, output, error)
