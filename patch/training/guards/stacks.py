"""Writes the Python stacks of this process, or of one on the same machine that cannot do so itself."""

from __future__ import annotations

import faulthandler
import shutil
import subprocess
import time
from pathlib import Path

_PY_SPY_S = 8.0
"""How long py-spy may take."""


def write_own_stacks(file: Path, reason: str) -> None:
    """Append the stacks of all threads of this process to a file.

    Args:
        file: in a folder that exists.
        reason: the first line.
    """
    with file.open("a") as stream:
        stream.write(_header(reason))
        stream.flush()
        faulthandler.dump_traceback(stream)


def write_stacks_of(pid: int, file: Path, reason: str, place: str) -> None:
    """Append the state and the stacks of another process, which py-spy reads where it is installed.

    Args:
        pid: of a process on this machine.
        file: in a folder that exists.
        reason: the first line.
        place: where it is, in words.
    """
    text = f"process {pid}: {process_state(pid)}, {place}\n{_spied(pid)}\n"
    with file.open("a") as stream:
        stream.write(_header(reason) + text)


def process_state(pid: int) -> str:
    """The kernel's word for what a process does, such as "T (stopped)"; "gone" if there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")


def _spied(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return "no stack: it needs py-spy, which is not installed (pip install py-spy)"
    try:
        done = subprocess.run(
            # A process that is stopped need not be paused, and cannot be.
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stack: {error}"
    return done.stdout or f"no stack: {done.stderr.strip()}"


def _header(reason: str) -> str:
    return f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n"
