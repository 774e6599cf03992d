"""Starts, watches and restarts the workers of one machine by torch's elastic agent.

Our changes, in methods that torch leaves to subclasses:

- Signals. torch's agent stops the workers' whole process groups, including children that write a checkpoint.
  A second signal interrupts the wait. Here only the workers get the first signal, and their time is
  unlimited. Further signals of a scheduler (SLURM sends SIGUSR1, then SIGTERM) change nothing. Only Ctrl-C
  FORCE_KILL_AFTER_S or more after the first signal kills the workers.
- Restarts and the exit code follow from the workers' error files (`WorkerExit`). torch always restarts.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest

from patch.errors import TrainingError
from patch.launch.rendezvous import RendezvousHandler
from patch.launch.worker_process import END_S, LOST_RANK_CODE, WorkerExit, read_worker_exit, stop_signals
from patch.logger import get_logger

_logger = get_logger(__name__)

FORCE_KILL_AFTER_S = 3.0
"""Ctrl-C at least this many seconds after the first signal kills all workers without a checkpoint."""
SETTLE_S = 5.0
"""Seconds after a failure in which other ranks may report their own causes; then they are killed."""
KILL_GRACE_S = 10.0
"""Seconds after END_S when a finished worker that cannot end itself is killed."""
# The usual causes of signals that the launcher has not sent.
_KILLERS: dict[int, str] = {
    signal.SIGKILL: "that the machine ran out of memory",
    signal.SIGABRT: (
        "an error of a library, which its last lines on stderr name (NCCL's watchdog: a collective waited "
        "longer than --distributed-timeout-minutes)"
    ),
}
_ENDS: dict[type[elastic.RendezvousError], str] = {
    elastic.RendezvousTimeoutError: (
        "too few machines joined in time, expected --nnodes of them, or at least --min-nodes; start the "
        "missing launchers, or raise --distributed-timeout-minutes"
    ),
    elastic.RendezvousClosedError: "another machine ended the run; see that machine's log for the cause",
    elastic.RendezvousError: (
        "lost the connection to machine 0's launcher, which keeps the store; check machine 0 and start the "
        "same command again"
    ),
}
"""Messages of torch's errors; the first class that fits counts."""


@contextmanager
def orphan_reaper() -> Iterator[Callable[[Iterable[int]], None]]:
    """Return a context with a process that kills sessions when this process ends, even by kill -9.

    A worker dies with its launcher (`worker_process.begin`). Its children (data readers, a compiler) do not,
    because children do not inherit the kernel's parent-death signal.

    The context's function sets the sessions, by the ids of their first processes; it replaces an earlier
    call.
    """
    # The process ignores signals, because a scheduler sends signals to every process of a job.
    program = "trap '' 1 2 3 10 12 15; while read -r i; do l=$i; done; for i in $l; do kill -9 -$i; done"
    command = ["/bin/sh", "-c", f"exec 2>/dev/null; {program}"]
    process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, start_new_session=True)

    def watch(sessions: Iterable[int]) -> None:
        with suppress(OSError):  # the run goes on without the reaper
            process.stdin.write(" ".join(map(str, sessions)).encode() + b"\n")  # type: ignore[union-attr]

    try:
        yield watch
    finally:
        process.kill()
        process.communicate()


class WorkerFiles(DefaultLogsSpecs):
    """torch's files of the workers, in a new folder for each start."""

    folder: str
    """Local folder of the error files; the user's log folder may be slow, or have another clock."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the files; see the base class, which would delete the files of an earlier start."""
        self._run_log_dir = None
        files, start = super().reify(envs), tempfile.mkdtemp(dir=self.folder)
        for local in envs:
            file = files.error_files[local] = os.path.join(start, f"error{local}.json")
            envs[local]["TORCHELASTIC_ERROR_FILE"] = file
        return files


def _describe_exit(code: int) -> str:
    """Describe a worker's exit code; a negative code is the signal that killed the worker."""
    if code >= 0:
        return "another rank ended" if code == LOST_RANK_CODE else f"exit code {code}"
    usual = f"; the usual reason is {_KILLERS[-code]}" if -code in _KILLERS else ""
    return f"killed by {signal.Signals(-code).name}{usual}"


class Agent(LocalElasticAgent):
    """torch's agent with our signals, restarts and exit codes; see torch for its arguments."""

    def __init__(self, spec: WorkerSpec, files: WorkerFiles) -> None:
        super().__init__(spec, files, log_line_prefix_template="${rank}: ")
        self._signals: list[int] = []
        """All received signals."""
        self._forwarded: float | None = None
        """Time when the first signal was forwarded to the workers."""
        self._has_workers = False
        """Whether workers run. If not, this machine waits for other machines, and a signal ends the wait."""
        self._cause = 0
        """The exit code of the failure that caused the other failures, or 0."""

    def run(self, role: str = "default") -> RunResult:
        """Run the workers until all end; return None if this machine was not needed. See the base class."""
        before = {number: signal.signal(number, self._note_signal) for number in stop_signals()}
        try:
            with orphan_reaper() as self._watch:
                return super().run(role)
        finally:
            for number, previous in before.items():
                signal.signal(number, previous)

    def _note_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        if not self._has_workers:
            raise SignalException("this machine waits", signal.Signals(number))

    def exit_code(self, *, is_failed: bool) -> int:
        """Return the launcher's exit code after `run`; see `launch`."""
        if not is_failed:
            return max(worker_exit.exit_code for worker_exit in self.worker_exits().values())
        if self._signals and not self._cause:
            return 128 + self._signals[0]
        return self._cause if self._cause > 0 and self._cause != LOST_RANK_CODE else 5

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._has_workers = False
        for number in self._signals:
            self._note_signal(number, None)  # raises
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._has_workers = True
        processes = super()._start_workers(worker_group)
        self._watch(processes.values())
        return processes

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._obey_signals()
        worker_exits = self.worker_exits()
        if any(worker_exit.message for worker_exit in worker_exits.values()):
            self._find_root_failure(self._kill_the_others())
            return RunResult(WorkerState.FAILED)
        if len(worker_exits) < len(worker_group.workers):
            return RunResult(WorkerState.HEALTHY)
        self._has_workers = False
        return RunResult(WorkerState.SUCCEEDED, {each.global_rank: None for each in worker_group.workers})

    def worker_exits(self) -> dict[int, WorkerExit]:
        """Return each ended worker's `WorkerExit` by local rank; kill a worker that cannot end itself."""
        worker_exits = {}
        for local, process in self._processes().items():
            code, file = process.poll(), self._pcontext.error_files[local]  # type: ignore[union-attr]
            if code is not None:
                worker_exits[local] = read_worker_exit(file, code)
            elif os.path.exists(file) and time.time() - os.stat(file).st_mtime > END_S + KILL_GRACE_S:
                self._kill(local)
        return worker_exits

    def _find_root_failure(self, failures: dict[int, WorkerExit]) -> None:
        """Find and log the failure that caused the other failures, and decide whether to restart."""
        # A forwarded signal also kills a worker that has no handlers yet; that is no failure.
        forwarded = {code for number in self._signals for code in (-number, 128 + number)}

        def failure_rank(local: int) -> tuple[bool, bool, bool]:
            """Sort key: first the code of a PatchError, then others, then a lost rank, last our signal."""
            code = failures[local].exit_code
            return code in forwarded, code not in range(2, 6), code == LOST_RANK_CODE

        cause, restarts = min(failures, key=failure_rank), self._worker_group.spec.max_restarts
        self._cause = 0 if failure_rank(cause)[0] else failures[cause].exit_code
        if self._cause:
            _logger.error("local rank %d ended: %s", cause, _describe_exit(self._cause))
        if self._signals or not all(worker_exit.may_restart for worker_exit in failures.values()):
            self._remaining_restarts = 0
        if number := self._remaining_restarts and restarts - self._remaining_restarts + 1:
            _logger.info("restart %d of %d, from the newest whole checkpoint", number, restarts)

    def _obey_signals(self) -> None:
        if self._signals and self._forwarded is None:
            message = "%s: waiting for the workers to save a checkpoint; Ctrl-C after %.0f s kills them"
            _logger.info(message, signal.Signals(self._signals[0]).name, FORCE_KILL_AFTER_S)
            for process in self._processes().values():
                process.send_signal(self._signals[0])
            self._forwarded = time.monotonic()
        if self._forwarded is not None and time.monotonic() > self._forwarded + FORCE_KILL_AFTER_S:
            signal.signal(signal.SIGINT, self._give_up)

    def _give_up(self, number: int, frame: object) -> None:
        """Kill the workers and end the job on all machines, after a second Ctrl-C."""
        self._has_workers = False
        for local in self._processes():
            self._kill(local)
        raise SignalException("Ctrl-C again", signal.SIGINT)

    def _kill_the_others(self) -> dict[int, WorkerExit]:
        """After a failure, give the other workers SETTLE_S seconds to end, then kill them.
        Return the failures before that, by local rank.
        """
        # torch's agent would send SIGTERM, which the workers take for a request to save a checkpoint.
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and len(self.worker_exits()) < len(self._processes()):
            time.sleep(0.1)
        failures = {local: ended for local, ended in self.worker_exits().items() if ended.message}
        for local, process in self._processes().items():
            self._kill(local)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_GRACE_S)
        return failures

    def _kill(self, local: int) -> None:
        """Kill a worker's session: the worker and its children, even if the worker has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._processes()[local].pid, signal.SIGKILL)

    def _processes(self) -> dict[int, Any]:
        """Return the worker processes (subprocess.Popen) by local rank; ended processes ignore signals."""
        handlers = self._pcontext.subprocess_handlers  # type: ignore[union-attr]
        return {local: handler.proc for local, handler in handlers.items()}


def run_workers(
    command: Sequence[str], num_local: int, max_restarts: int, meeting: RendezvousHandler, files: WorkerFiles
) -> tuple[int, list[WorkerExit]]:
    """Run one worker per local rank until all have ended, with restarts.

    The rendezvous `meeting` is left at the end. Return the exit code, and the `WorkerExit` of each worker.

    Raises:
        TrainingError: other machines did not join in time, or have ended the job.
    """
    messages = logging.getLogger("torch.distributed.elastic")  # our messages replace them
    messages.addHandler(logging.NullHandler())
    messages.propagate = False
    arguments = tuple(argument.replace("$", "$$") for argument in command[1:])  # torch replaces ${local_rank}
    agent = Agent(WorkerSpec("worker", num_local, meeting, None, command[0], arguments, max_restarts), files)
    try:
        result: RunResult | None = agent.run()
    except SignalException as stopped:
        meeting.leave(closes=True)
        return 128 + stopped.sigval, []
    except elastic.RendezvousError as error:
        raise TrainingError(next(_ENDS[kind] for kind in _ENDS if isinstance(error, kind))) from error
    meeting.leave(closes=result is not None)
    if result is None:
        return 0, []
    return agent.exit_code(is_failed=result.is_failed()), [*agent.worker_exits().values()]
