"""A hook that forwards metrics.jsonl to services (--report-to), with one process per service.

Training never waits for a service, except for a bounded time at the end. The next start of the same command
sends the rest.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from patch.logger import get_logger
from patch.storage.names import REPORTED_FOLDER
from patch.storage.text_files import read_small
from patch.training import forwarder
from patch.training.forwarder import DONE, FAILED, FINISH_S
from patch.training.hooks.hook import Record, TrainerHook

_logger = get_logger(__name__)

_RESTART_S = 60.0
"""Minimum seconds between two starts of a forwarder that fails."""
_GRACE_S = 1.0
_CURE = "training is not affected, and the same command sends the rest"


class _Forwarder:
    """The process of one service; it works in the run's folder `output`."""

    def __init__(self, service: str, output: Path) -> None:
        self._service, self._output = service, output.absolute()
        self._messages = self._output / REPORTED_FOLDER / f"{service}.txt"
        self._said: set[str] = set()
        self._start()

    def _start(self) -> None:
        """Start the process in its own session, so that Ctrl-C leaves the process time to finish."""
        self._started = time.monotonic()
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path if folder)
        command = [sys.executable, "-P", "-m", forwarder.__name__, self._service, str(self._output)]
        with self._messages.open("wb") as messages:
            self._process = subprocess.Popen(
                command, cwd=self._output, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
                stdin=subprocess.PIPE, stdout=messages, stderr=subprocess.DEVNULL, bufsize=0,
            )  # fmt: skip

    def look(self) -> None:
        has_failed = self._process.poll() is not None
        self._tell(is_over=has_failed)
        if has_failed and time.monotonic() > self._started + _RESTART_S:
            self._start()

    def end(self) -> None:
        """Tell the process that the run has ended; if it has failed, a new process sends the rest."""
        if self._process.poll() is not None:
            self._start()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")

    def finish(self, deadline: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self._tell(is_over=True)
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the library's own processes
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)

    def _tell(self, *, is_over: bool) -> None:
        """Log each new line of the process; warn if it has ended before everything was sent."""
        said, level = read_small(self._messages).decode(errors="replace"), logging.INFO
        lines = said.splitlines()
        if is_over and DONE not in lines:
            code, level = self._process.returncode, logging.WARNING
            if code != FAILED:
                lines = ["it did not finish in time" if code is None else f"it ended with exit code {code}"]
            lines = [f"{lines[-1]}; {_CURE}"]
        for line in lines:
            if line not in self._said:
                _logger.log(level, "%s: %s", self._service, line)
            self._said.add(line)


class Reporter(TrainerHook):
    """Forwards metrics.jsonl to services. Create it after `MetricsLog`, on rank 0.

    If `start_iteration` is 0, each service opens a new run.
    """

    def __init__(self, output: Path, services: Sequence[str], start_iteration: int) -> None:
        folder = output / REPORTED_FOLDER
        if not start_iteration:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._forwarders = [_Forwarder(service, output) for service in services]

    def on_log(self, record: Record) -> None:
        """Log the forwarders' output and restart failed forwarders."""
        self._each(_Forwarder.look)

    def close(self) -> None:
        """Wait a bounded time until everything is sent."""
        deadline = time.monotonic() + FINISH_S + _GRACE_S
        self._each(_Forwarder.end)
        self._each(lambda each: each.finish(deadline))

    def _each(self, do: Callable[[_Forwarder], None]) -> None:
        for each in self._forwarders:
            try:
                do(each)
            except OSError as error:  # no memory for a process, or a full disk; training goes on
                said = "the forwarders in %s could not be checked: %s; training goes on"
                _logger.warning(said, REPORTED_FOLDER, error)
