"""Ends what the workers have started when their launcher is killed.

A worker dies with its launcher (`worker_process.begin`), its children (readers of data, templates, a
compiler) do not: the kernel's signal at a parent's death is not inherited, and asks for the thread that
started the child. This file is also a program, which a launcher starts: it waits for the launcher's end at
a pipe and then kills the workers' sessions.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType


class Guardian:
    """The process that watches this one; use it as a context."""

    def __init__(self) -> None:
        # Blocked signals stay blocked in it: a scheduler sends its signals to every process of a job.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                text=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def watch(self, sessions: Iterable[int]) -> None:
        """End these sessions when this process ends, instead of those of an earlier call.

        Args:
            sessions: process ids of their first processes.
        """
        assert self._process.stdin is not None, "it was asked for"
        with suppress(OSError):  # without a guardian the run goes on
            self._process.stdin.write(" ".join(map(str, sessions)) + "\n")
            self._process.stdin.flush()

    def __enter__(self) -> Guardian:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Wait for the end of stdin, then kill the sessions of its last line."""
    lines = sys.stdin.read().splitlines() or [""]
    for session in lines[-1].split():
        with suppress(ProcessLookupError):
            os.killpg(int(session), signal.SIGKILL)


if __name__ == "__main__":
    main()
