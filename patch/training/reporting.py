"""A hook that has metrics.jsonl forwarded to services (--report-to), each by a process of its own.

Training waits for none of them, except for a bounded time at the end. What a service did not take then is
sent when the same command is started again.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from patch.config.data_schema import CheckpointConfig
from patch.logger import get_logger
from patch.storage.names import REPORTED_FOLDER
from patch.training import forwarder
from patch.training.forwarder import DONE, FINISH_S
from patch.training.hooks import Record, TrainerHook

_logger = get_logger(__name__)

_RESTART_S = 60.0
"""A forwarder that has failed is started again so many seconds after its start."""
_GRACE_S = 1.0
_CURE = "training is not affected, and the same command sends the rest"


class _Forwarder:
    """The process of one service.

    Args:
        service: its name.
        output: the run's folder, in which the process works.
        project: None: what the library's own variables say.
    """

    def __init__(self, service: str, output: Path, project: str | None) -> None:
        self._service, self._output = service, output
        program = [sys.executable, "-P", "-m", forwarder.__name__]
        self._command = [*program, service, str(output.absolute()), project or ""]
        self._said: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def look(self) -> None:
        """Log what the process said; start another one where it has failed."""
        if self._is_running():
            for line in self._lines():
                self._say(line)
        else:
            self._warn()
            if time.monotonic() > self._started + _RESTART_S:
                self._start()

    def end(self) -> None:
        """Tell the process that the run has ended."""
        if not self._is_running():
            self._start()
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.write(b"\n")

    def finish(self, deadline: float) -> None:
        """Wait for the end of the process until `deadline`, by time.monotonic(); then kill it."""
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        *lines, last = self._lines() or [""]
        if last == DONE:
            for line in lines:
                self._say(line)
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the library's own processes
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self._warn(last)

    def _start(self) -> None:
        """Start the process in a session of its own: Ctrl-C leaves it time to finish."""
        self._started, self._process = time.monotonic(), None
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path if folder)
        try:
            self._process = subprocess.Popen(
                self._command, cwd=self._output, env={**os.environ, "PYTHONPATH": path}, bufsize=0,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return self._warn(str(error))
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)  # processes of the library may keep it open

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _lines(self) -> list[str]:
        """What the process wrote since the last call."""
        assert self._process is not None and self._process.stdout is not None
        return (self._process.stdout.read() or b"").decode(errors="replace").splitlines()

    def _warn(self, reason: str = "") -> None:
        """Say once why the process ended, or did not end."""
        if not reason and self._process is not None:
            ended = f"its forwarder ended with exit code {self._process.returncode}"
            *_, reason = ended, *self._lines()
        if reason:
            self._say(f"{reason}; {_CURE}", logging.WARNING)

    def _say(self, line: str, level: int = logging.INFO) -> None:
        if line not in self._said:
            _logger.log(level, "%s: %s", self._service, line)
        self._said.add(line)


class Reporter(TrainerHook):
    """Has metrics.jsonl forwarded to services. It is created after `MetricsLog`, on rank 0.

    Args:
        config: names the run's folder, the services, and their project.
        start_iteration: steps already done. A run that begins is a new one of the services, too.
    """

    def __init__(self, config: CheckpointConfig, start_iteration: int) -> None:
        output = Path(config.output_path)
        if not start_iteration:
            shutil.rmtree(output / REPORTED_FOLDER, ignore_errors=True)
        self._forwarders = [_Forwarder(name, output, config.report_project) for name in config.services]

    def on_log(self, record: Record) -> None:
        """Look whether the processes are there."""
        for each in self._forwarders:
            each.look()

    def close(self) -> None:
        """Wait until everything was sent, but not for ever."""
        deadline = time.monotonic() + FINISH_S + _GRACE_S
        for each in self._forwarders:
            each.end()
        for each in self._forwarders:
            each.finish(deadline)
