"""Starts the workers of one machine by torch's elastic agent, watches them, and starts them again.

What is ours, in methods that torch leaves to subclasses of its agent:

- Signals. torch's agent stops its workers' whole process groups, children that write a checkpoint included,
  and a second signal interrupts the wait. Here the workers alone get the first signal and have all the time
  that they need. Schedulers send more signals while they wait (SLURM SIGUSR1, then SIGTERM), which change
  nothing; only a person's Ctrl-C INSISTENCE_S or more after the first signal kills the workers.
- Which failures are worth a restart, and the exit code: from the workers' error files (`Reply`). torch starts
  again after every failure.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from patch.distributed.rendezvous import Meeting
from patch.distributed.worker_process import (
    END_S,
    LOST_RANK_CODE,
    NCCL_MARK,
    Reply,
    read_reply,
    stop_signals,
)
from patch.errors import TrainingError
from patch.logger import get_logger

_logger = get_logger(__name__)

INSISTENCE_S = 3.0
"""Ctrl-C at least this long after the first signal ends all without a checkpoint."""
SETTLE_S = 5.0
"""After a failure the other ranks have so long to report a cause of their own; then they are killed."""
KILL_GRACE_S = 10.0
"""Seconds beyond END_S that a worker that is done may live, which then could not end itself."""
# The usual reasons of signals that the launcher has not sent.
_KILLERS: dict[int, str] = {
    signal.SIGKILL: "that the machine ran out of memory",
    signal.SIGABRT: "an error of a library, which its last lines on stderr name",
}
_WATCHDOG = "a collective that waited longer than --distributed-timeout-minutes (NCCL's watchdog)"


class Guardian:
    """A process that kills sessions when this process has ended, even by kill -9; use it as a context.

    A worker dies with its launcher (`worker_process.begin`). Its children (readers of data, a compiler) do
    not: the kernel's signal at a parent's death is not inherited.
    """

    # It ignores signals: a scheduler sends its signals to every process of a job.
    _PROGRAM = "trap '' 1 2 3 10 12 15; while read -r i; do l=$i; done; for i in $l; do kill -9 -$i; done"

    def __enter__(self) -> Guardian:
        command = ["/bin/sh", "-c", f"exec 2>/dev/null; {self._PROGRAM}"]
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def watch(self, sessions: Iterable[int]) -> None:
        """Kill these sessions, by their first processes, instead of those of an earlier call."""
        with suppress(OSError):  # without a guardian the run goes on
            self._process.stdin.write(" ".join(map(str, sessions)).encode() + b"\n")  # type: ignore[union-attr]

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


class WorkerFiles(DefaultLogsSpecs):
    """torch's files of the workers, in a folder of its own for each start of them."""

    folder: str
    """Folder of the error files, on this machine: what a user names may be slow, or have another clock."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See the base class, which would delete those of the last start if this one is no restart."""
        self._run_log_dir = None
        files, start = super().reify(envs), tempfile.mkdtemp(dir=self.folder)
        for local in envs:
            file = files.error_files[local] = os.path.join(start, f"error{local}.json")
            envs[local]["TORCHELASTIC_ERROR_FILE"] = file
        return files


def _words(code: int, *, has_nccl: bool) -> str:
    """The reason of a worker's end, by its exit code; negative: the signal that killed it."""
    if code >= 0:
        return "another rank ended" if code == LOST_RANK_CODE else f"exit code {code}"
    reason = _WATCHDOG if has_nccl and -code == signal.SIGABRT else _KILLERS.get(-code)
    usual = f"; the usual reason is {reason}" if reason else ""
    return f"killed by {signal.Signals(-code).name}{usual}"


class Agent(LocalElasticAgent):
    """torch's agent with our signals, restarts and exit codes; see torch for its arguments."""

    def __init__(self, spec: WorkerSpec, files: WorkerFiles) -> None:
        super().__init__(spec, files, log_line_prefix_template="${rank}: ")
        self._guardian = Guardian()
        self._signals: list[int] = []
        """Each signal that came."""
        self._forwarded: float | None = None
        """When the first signal was forwarded to the workers."""
        self._killed: set[int] = set()
        """Local ranks of this start that were killed from here."""
        self._has_workers = False
        """Otherwise this machine waits for others, and a signal ends the wait."""
        self._cause = 0
        """The exit code of the failure that caused the others; 0: none."""

    def run(self, role: str = "default") -> RunResult:
        """Run the workers until all have ended; None if this machine was not needed. See the base class."""
        before = {number: signal.signal(number, self._note_signal) for number in stop_signals()}
        try:
            with self._guardian:
                return super().run(role)
        finally:
            for number, previous in before.items():
                signal.signal(number, previous)

    def _note_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        if not self._has_workers:
            raise SignalException("this machine waits", signal.Signals(number))

    def exit_code(self, *, is_failed: bool) -> int:
        """The launcher's exit code after `run`; see `launch`."""
        if not is_failed:
            return max(reply.exit_code for reply in self.replies().values())
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
        self._killed.clear()
        processes = super()._start_workers(worker_group)
        self._guardian.watch(processes.values())
        return processes

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._obey_signals()
        replies = self.replies()
        if any(reply.message for reply in replies.values()):
            self._kill_the_others()
            self._judge({local: reply for local, reply in self.replies().items() if reply.message})
            return RunResult(WorkerState.FAILED)
        if len(replies) < len(worker_group.workers):
            return RunResult(WorkerState.HEALTHY)
        self._has_workers = False
        return RunResult(WorkerState.SUCCEEDED, {each.global_rank: None for each in worker_group.workers})

    def replies(self) -> dict[int, Reply]:
        """The announcements of workers that have ended, by local rank."""
        replies = {}
        for local, process in self._processes().items():
            code, file = process.poll(), self._pcontext.error_files[local]  # type: ignore[union-attr]
            if code is not None:
                replies[local] = read_reply(file, code)
            elif os.path.exists(file) and time.time() - os.stat(file).st_mtime > END_S + KILL_GRACE_S:
                self._kill(local)  # it announced its end long ago and could not even end itself
        return replies

    def _judge(self, failures: dict[int, Reply]) -> None:
        """Find the failure that caused the others, name it, and decide whether to start again."""
        # A forwarded signal also ends a worker that has no handlers yet: that is no failure.
        forwarded = {code for number in self._signals for code in (-number, 128 + number)}

        def demerits(local: int) -> tuple[bool, bool, bool]:
            """The code of a PatchError says most, of a lost rank little, of our own kill nothing."""
            code = failures[local].exit_code
            is_ours = code in forwarded or (code < 0 and local in self._killed)
            return is_ours, code not in range(2, 6), code == LOST_RANK_CODE

        cause, restarts = min(failures, key=demerits), self._worker_group.spec.max_restarts
        self._cause = 0 if demerits(cause)[0] else failures[cause].exit_code
        if self._cause:
            has_nccl = os.path.exists(self._pcontext.error_files[cause] + NCCL_MARK)  # type: ignore[union-attr]
            _logger.error("local rank %d ended: %s", cause, _words(self._cause, has_nccl=has_nccl))
        if self._signals or not all(reply.may_restart for reply in failures.values()):
            self._remaining_restarts = 0
        if number := self._remaining_restarts and restarts - self._remaining_restarts + 1:
            _logger.info("restart %d of %d, from the newest whole checkpoint", number, restarts)

    def _obey_signals(self) -> None:
        if self._signals and self._forwarded is None:
            message = "%s: waiting for the workers to save a checkpoint; Ctrl-C after %.0f s kills them"
            _logger.info(message, signal.Signals(self._signals[0]).name, INSISTENCE_S)
            for process in self._processes().values():
                process.send_signal(self._signals[0])
            self._forwarded = time.monotonic()
        if self._forwarded is not None and time.monotonic() > self._forwarded + INSISTENCE_S:
            signal.signal(signal.SIGINT, self._give_up)

    def _give_up(self, number: int, frame: object) -> None:
        """Kill the workers and end the job on all machines: Ctrl-C came again."""
        self._has_workers = False
        for local in self._processes():
            self._kill(local)
        raise SignalException("Ctrl-C again", signal.SIGINT)

    def _kill_the_others(self) -> None:
        """After a failure let the other workers end, then kill them: they only wait for the one that failed.

        torch's agent sends them SIGTERM, which they take for a wish to save a checkpoint, and waits for 30 s.
        """
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and len(self.replies()) < len(self._processes()):
            time.sleep(0.1)
        for local, process in self._processes().items():
            self._kill(local)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_GRACE_S)

    def _kill(self, local: int) -> None:
        """Kill a worker and what it has started, also if it has ended: each has a session of its own."""
        process = self._processes()[local]
        if process.poll() is None:
            self._killed.add(local)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _processes(self) -> dict[int, Any]:
        """The worker processes (subprocess.Popen) by local rank; a signal to one that has ended is lost."""
        handlers = self._pcontext.subprocess_handlers  # type: ignore[union-attr]
        return {local: handler.proc for local, handler in handlers.items()}


def run_workers(
    command: Sequence[str], num_local: int, max_restarts: int, meeting: Meeting, files: WorkerFiles
) -> tuple[int, list[Reply]]:
    """Run one worker per local rank until all have ended, with restarts.

    Args:
        command: the workers' command line.
        num_local: the number of workers on this machine.
        max_restarts: how often to start again after a failure that may pass.
        meeting: where this machine meets the others; left at the end.
        files: where the workers write.
    Returns:
        the exit code, and how the workers ended.

    Raises:
        TrainingError: the other machines did not come, or have ended the job.
    """
    messages = logging.getLogger("torch.distributed.elastic")  # ours say the same, once
    messages.addHandler(logging.NullHandler())
    messages.propagate = False
    arguments = tuple(argument.replace("$", "$$") for argument in command[1:])  # torch replaces ${local_rank}
    agent = Agent(WorkerSpec("worker", num_local, meeting, None, command[0], arguments, max_restarts), files)
    try:
        result: RunResult | None = agent.run()
    except SignalException as stopped:
        meeting.leave(closes=True)
        return 128 + stopped.sigval, []
    except RendezvousTimeoutError as error:
        raise TrainingError("too few machines came in time", field="distributed_timeout_minutes") from error
    except RendezvousClosedError as error:
        raise TrainingError("another machine has ended the run, its own messages say why") from error
    except RendezvousError as error:
        raise TrainingError("the connection to the launcher of machine 0 is lost, with it the run") from error
    meeting.leave(closes=result is not None)
    if result is None:
        return 0, []
    return agent.exit_code(is_failed=result.is_failed()), [*agent.replies().values()]
