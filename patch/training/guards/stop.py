"""Requests to end a run before its last step, with a checkpoint: a signal, the time limit, the stop file.

Every rank listens for signals, which may reach only one machine. Rank 0 alone watches the clock and the stop
file. In every step, all ranks agree on the largest requested exit code, so they stop together.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event

import psutil
import torch.distributed as dist

from patch.config.schema import RunConfig
from patch.device import start_thread
from patch.launch.worker_process import TIME_LIMIT_CODE, is_launched, stop_signals
from patch.logger import get_logger

_logger = get_logger(__name__)

STOP_FILE_CODE = 128 + signal.SIGINT
"""Exit code after the stop file; the same as after Ctrl-C."""
POLL_S = 5.0
"""Seconds between checks for the stop file; a thread checks, so a step never waits for the file system."""


class StopRequests:
    """The stop requests that have reached this rank."""

    def __init__(self, config: RunConfig) -> None:
        self._signal = 0
        self._is_first = dist.get_rank() == 0
        self._minutes = config.training.exit_duration_in_mins
        # The launcher's start if there is one, because restarts of workers must not extend the limit.
        self._begin = psutil.Process(os.getppid() if is_launched() else None).create_time()
        self._file = Path(config.stop_file)
        self._is_file_there = False

    def exit_code(self, *, is_last: bool) -> int:
        """Return the exit code that this rank requests, or 0; the last step ignores the time limit."""
        if self._signal:
            return 128 + self._signal
        if self._is_file_there:
            return STOP_FILE_CODE
        return TIME_LIMIT_CODE if self._is_time_over() and not is_last else 0

    def reason(self, exit_code: int) -> str:
        """Return the reason, for a message, why all ranks stop with the agreed `exit_code`."""
        if exit_code == TIME_LIMIT_CODE:
            return f"the time limit of {self._minutes:g} minutes (--exit-duration-in-mins)"
        if self._is_file_there and exit_code == STOP_FILE_CODE:
            return f"the stop file {self._file}, which must be removed first"
        return signal.Signals(exit_code - 128).name

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which signals are only recorded, and rank 0 watches the stop file."""

        def note(number: int, frame: object) -> None:
            self._signal = self._signal or number  # the first: SLURM sends SIGTERM later, at its limit

        previous = {number: signal.signal(number, note) for number in stop_signals()}
        is_over = Event()
        if self._is_first:  # a daemon thread, because a hung file system must not keep the run from ending
            start_thread("stop file", partial(self._watch, is_over))
        try:
            yield
        finally:
            is_over.set()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _watch(self, is_over: Event) -> None:
        while not self._is_file_there and not is_over.wait(POLL_S):
            self._is_file_there = self._file.exists()
        if self._is_file_there:
            _logger.info("%s is there: the run stops after this step", self._file)

    def _is_time_over(self) -> bool:
        if self._minutes is None or not self._is_first:
            return False
        return time.time() - self._begin > self._minutes * 60
