"""Requests to end a run before its last step, with a checkpoint: a signal, the time limit, the stop file.

Every rank listens for signals, which may reach one machine only. Rank 0 alone watches the clock and the stop
file. Once a step all ranks take the largest exit code that any of them asks for, so they stop together.
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
from patch.distributed.worker_process import TIME_LIMIT_CODE, is_launched, stop_signals
from patch.logger import get_logger

_logger = get_logger(__name__)

STOP_FILE_CODE = 128 + signal.SIGINT
"""Exit code after the stop file, which is a Ctrl-C that others may press too."""
POLL_S = 5.0
"""Seconds between two looks for the stop file, by a thread: a step never waits for the file system."""


class StopRequests:
    """The requests to stop that have reached this rank.

    Args:
        config: the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._signal = 0
        self._is_first = dist.get_rank() == 0
        self._minutes = config.training.exit_duration_in_mins
        # That of the launcher, which restarts of the workers do not prolong; else of this process.
        self._begin = psutil.Process(os.getppid() if is_launched() else None).create_time()
        self._file = Path(config.stop_file)
        self._is_file_there = False

    def exit_code(self, *, is_last: bool) -> int:
        """The exit code that this rank asks for; 0: it asks for no stop.

        Args:
            is_last: whether the step was the run's last one, after which no time limit counts.
        """
        if self._signal:
            return 128 + self._signal
        if self._is_file_there:
            return STOP_FILE_CODE
        return TIME_LIMIT_CODE if self._is_time_over() and not is_last else 0

    def reason(self, exit_code: int) -> str:
        """The reason why all ranks stop, in words.

        Args:
            exit_code: the one that they agreed on.
        """
        if exit_code == TIME_LIMIT_CODE:
            return f"the time limit of {self._minutes:g} minutes (--exit-duration-in-mins)"
        if self._is_file_there and exit_code == STOP_FILE_CODE:
            return f"the stop file {self._file}, which must be removed first"
        return signal.Signals(exit_code - 128).name

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block signals are only recorded, and rank 0 looks for the stop file."""

        def note(number: int, frame: object) -> None:
            self._signal = self._signal or number  # SLURM's SIGTERM at its limit follows the signal before it

        previous = {number: signal.signal(number, note) for number in stop_signals()}
        is_over = Event()
        if self._is_first:  # a daemon: a file system that hangs must not keep the run from ending
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
