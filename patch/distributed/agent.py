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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from patch.distributed.guardian import Guardian
from patch.distributed.rendezvous import Meeting
from patch.distributed.worker_process import (
    CORES,
    END_S,
    LOST_RANK_CODE,
    NCCL_MARK,
    TIME_LIMIT_CODE,
    Reply,
    read_reply,
    stop_signals,
)
from patch.errors import TrainingError
from patch.logger import get_logger

_logger = get_logger(__name__)

POLL_S = 0.1
# Ctrl-C at least this long after the first signal kills the workers without a checkpoint.
INSISTENCE_S = 3.0
SETTLE_S = 5.0
"""After a failure the other ranks have so long to report a cause of their own; then they are killed."""
KILL_GRACE_S = 10.0
"""Seconds beyond END_S that a worker that is done may live, which then could not end itself."""
PATCH_ERROR_CODES = range(2, 6)
# The usual reasons of signals that nobody of us has sent.
_KILLERS: dict[int, str] = {
    signal.SIGKILL: "that the machine ran out of memory",
    signal.SIGABRT: "an error of a library, which its last lines on stderr name",
}
_WATCHDOG = "a collective that waited longer than --distributed-timeout-minutes (NCCL's watchdog)"


class WorkerFiles(LogsSpecs):
    """The files of each worker: all write to stderr, only local rank 0 to stdout; error files in `folder`.

    Args:
        folder: each start of the workers gets a folder of its own in it.
        cores: the cores of each local rank; None: those of the launcher.
        log_dir: what a worker writes to stderr also gets into a file of its own there; None: into none.
    """

    def __init__(
        self, folder: Path, cores: Sequence[set[int]] | None = None, log_dir: Path | None = None
    ) -> None:
        super().__init__(str(folder))
        self._folder, self._cores, self._log_dir = folder, cores, log_dir
        self.error_files: dict[int, str] = {}
        """Error file by local rank, of the last start."""

    @property
    def root_log_dir(self) -> str:
        """See the base class."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete each worker's environment, and say where it writes. See the base class."""
        start = Path(tempfile.mkdtemp(dir=self._folder))
        for local_rank, environment in envs.items():
            folder = start / str(local_rank)
            folder.mkdir()
            self.error_files[local_rank] = environment["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
            if self._cores:
                environment[CORES] = ",".join(map(str, sorted(self._cores[local_rank])))
        return LogsDest(
            stdouts={local_rank: os.devnull if local_rank else "" for local_rank in envs},
            stderrs={**dict.fromkeys(envs, ""), **(logs := self._logs(envs))},
            tee_stderrs=logs,
            error_files=dict(self.error_files),
        )

    def _logs(self, envs: dict[int, dict[str, str]]) -> dict[int, str]:
        """A new log file for each local rank, named after its rank and this moment."""
        if self._log_dir is None:
            return {}
        now = datetime.now().isoformat(timespec="milliseconds")
        return {
            local_rank: str(self._log_dir / f"rank{int(environment['RANK']):05d}.{now}.log")
            for local_rank, environment in envs.items()
        }


class _Ended(NamedTuple):
    """A worker that ended with another code than 0."""

    local_rank: int
    exit_code: int
    """Exit code of the process; negative: the signal that killed it."""
    reply: Reply | None
    has_nccl: bool
    """Whether it had groups of NCCL."""

    @property
    def code(self) -> int:
        """The announced exit code, else the process's."""
        return self.exit_code if self.reply is None else self.reply.exit_code

    @property
    def is_failure(self) -> bool:
        return self.reply is None or self.reply.is_failure

    @property
    def may_restart(self) -> bool:
        """Whether starting again could help; not if it was stopped, even if it had no room for its reply."""
        if self.reply is not None:
            return self.reply.may_restart
        return self.exit_code != TIME_LIMIT_CODE and self.exit_code <= 128

    def __str__(self) -> str:
        """The reason of its end, in words."""
        code = self.code if self.is_failure else self.exit_code
        if code == LOST_RANK_CODE:
            return "another rank ended"
        if code >= 0:
            return f"exit code {code}"
        reason = _WATCHDOG if self.has_nccl and -code == signal.SIGABRT else _KILLERS.get(-code)
        usual = f"; the usual reason is {reason}" if reason else ""
        return f"killed by {signal.Signals(-code).name}{usual}"


class Agent(LocalElasticAgent):
    """torch's agent with our signals, restarts and exit codes.

    Args:
        spec: the workers, see torch.
        files: where they write.
        guardian: ends what they have started if this process is killed.
        meeting: of this machine with the others.
    """

    def __init__(self, spec: WorkerSpec, files: WorkerFiles, guardian: Guardian, meeting: Meeting) -> None:
        super().__init__(spec, files, log_line_prefix_template="${rank}: ")
        self._files, self._guardian, self._meeting = files, guardian, meeting
        self._signals: list[tuple[int, float]] = []
        """Number and time of each signal that came."""
        self._forwarded = False
        self._given_up = False
        self._killed: set[int] = set()
        """Local ranks of this start that were killed from here."""
        self._waits_for_machines = False
        self._cause: _Ended | None = None
        """The failure that the exit code tells of."""

    def note_signal(self, number: int, frame: object) -> None:
        """A signal handler: records the signal, on which `_monitor_workers` acts.

        Raises:
            SignalException: no worker is there to act on, because this machine waits for others.
        """
        self._signals.append((number, time.monotonic()))
        if self._waits_for_machines:
            raise self._stop()

    def exit_code(self, result: RunResult | None) -> int:
        """The launcher's exit code after `run` has returned `result`; see `launch`."""
        if result is None:  # a spare machine that was not needed
            return 0
        if not result.is_failed():
            replies = (read_reply(file) for file in self._files.error_files.values())
            return max((reply.exit_code for reply in replies if reply), default=0)
        if self._signals and (self._given_up or self._cause is None):
            return 128 + self._signals[0][0]
        if self._cause is None or self._cause.code < 0 or self._cause.code == LOST_RANK_CODE:
            return 5
        return self._cause.code

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._signals:
            raise self._stop()
        with self._waiting_for_machines():
            super()._rendezvous(worker_group)

    def _exit_barrier(self) -> None:
        with self._waiting_for_machines():
            super()._exit_barrier()

    @contextmanager
    def _waiting_for_machines(self) -> Iterator[None]:
        self._waits_for_machines = True
        try:
            yield
        finally:
            self._waits_for_machines = False

    def _stop(self) -> SignalException:
        number = signal.Signals(self._signals[0][0])
        return SignalException(number.name, number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        processes = super()._start_workers(worker_group)
        self._guardian.watch(processes.values())
        return processes

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        limit = worker_group.spec.max_restarts
        if worker_group.state is WorkerState.HEALTHY:
            _logger.info("the machines of this run change; all start again from the newest whole checkpoint")
        else:
            _logger.info(
                "restart %d of %d, from the newest whole checkpoint", limit - self._remaining_restarts, limit
            )
        self._killed.clear()
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._obey_signals()
        self._kill_the_endless()
        ended = self._ended()
        if any(each.is_failure for each in ended):
            self._kill_the_others()
        elif ended and self._are_there():  # torch would end those that have not announced their end yet
            return RunResult(WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        if not result.is_failed():
            return result
        ended = self._ended()
        failures = [each for each in ended if each.is_failure]
        for each in ended:
            if not each.is_failure:
                _logger.warning(
                    "local rank %d had done its work but did not end by itself: %s",
                    each.local_rank, each,
                )  # fmt: skip
        if not failures:
            done = dict.fromkeys(worker.global_rank for worker in worker_group.workers)
            return RunResult(WorkerState.SUCCEEDED, return_values=done)
        self._judge(failures)
        return result

    def _judge(self, failures: list[_Ended]) -> None:
        """Find the failure that caused the others, name it, and decide whether to start again."""
        # A forwarded signal also ends a worker that has no handlers yet: that is no failure.
        ignored = {code for number, _ in self._signals for code in (-number, 128 + number)}
        told = [each for each in failures if each.reply or each.local_rank not in self._killed]
        own = [each for each in told if each.code not in ignored]
        causes = [each for each in own if each.code != LOST_RANK_CODE]
        known = [each for each in causes if each.code in PATCH_ERROR_CODES]
        self._cause = next(iter(known or causes or own), None)
        if self._cause is not None:
            _logger.error("local rank %d ended: %s", self._cause.local_rank, self._cause)
        if own and all(each.code in (LOST_RANK_CODE, -signal.SIGABRT) for each in own):
            for machine in self._meeting.lost_machines():
                _logger.error("%s is lost: its launcher gives no sign of life any more", machine)
        if self._signals or not all(each.may_restart for each in failures):
            self._remaining_restarts = 0

    def _obey_signals(self) -> None:
        if not self._signals:
            return
        number, first = self._signals[0]
        name = signal.Signals(number).name
        if not self._forwarded:
            self._forwarded = True
            _logger.info(
                "%s: waiting for the workers to save a checkpoint; Ctrl-C after %.0f s or more kills them",
                name,
                INSISTENCE_S,
            )
            self._send(number)
        elif not self._given_up and any(
            each == signal.SIGINT and when - first >= INSISTENCE_S for each, when in self._signals
        ):
            self._given_up = True
            _logger.error("Ctrl-C after %s: the workers end without a checkpoint of the last steps", name)
            self._killed.update(self._processes())
            for local_rank in self._processes():
                self._kill(local_rank)

    def _kill_the_endless(self) -> None:
        """Kill workers that announced their end long ago and could not even end themselves."""
        for local_rank, file in self._files.error_files.items():
            if self._processes()[local_rank].poll() is not None or not os.path.exists(file):
                continue
            if time.time() - os.stat(file).st_mtime > END_S + KILL_GRACE_S:
                self._kill(local_rank)

    def _kill_the_others(self) -> None:
        """After a failure let the other workers end, then kill them: they only wait for the one that failed.

        torch's agent sends them SIGTERM, which they take for a wish to save a checkpoint, and waits for 30 s.
        """
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and self._are_there():
            time.sleep(POLL_S)
        for local_rank, process in self._processes().items():
            if process.poll() is None:
                self._killed.add(local_rank)
            self._kill(local_rank)

    def _kill(self, local_rank: int) -> None:
        """Kill a worker and what it has started, also if it has ended: each has a session of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self._processes()[local_rank].pid, signal.SIGKILL)

    def _ended(self) -> list[_Ended]:
        """The workers that have ended with another code than 0."""
        codes = {local_rank: process.poll() for local_rank, process in self._processes().items()}
        files = self._files.error_files
        replies = {
            local: (read_reply(file), os.path.exists(file + NCCL_MARK)) for local, file in files.items()
        }
        return [_Ended(local, code, *replies[local]) for local, code in codes.items() if code]

    def _are_there(self) -> bool:
        """Whether any worker has not ended."""
        return any(process.poll() is None for process in self._processes().values())

    def _send(self, number: int) -> None:
        for process in self._processes().values():
            process.send_signal(number)

    def _processes(self) -> dict[int, Any]:
        """The worker processes (subprocess.Popen) by local rank; a signal to one that has ended is lost."""
        handlers = self._pcontext.subprocess_handlers  # type: ignore[union-attr]
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}


def run_workers(
    command: Sequence[str], num_local: int, max_restarts: int, meeting: Meeting, files: WorkerFiles
) -> int:
    """Run one worker per local rank until all have ended, with restarts; returns the exit code.

    Args:
        command: the workers' command line.
        num_local: the number of workers on this machine.
        max_restarts: how often to start again after a failure that may pass.
        meeting: where this machine meets the others; closed at the end.
        files: where the workers write.

    Raises:
        TrainingError: the other machines did not come, or have ended the job.
    """
    _silence_torch()
    spec = WorkerSpec(
        role="worker",
        local_world_size=num_local,
        entrypoint=command[0],
        args=tuple(argument.replace("$", "$$") for argument in command[1:]),  # torch replaces ${local_rank}
        rdzv_handler=meeting,
        max_restarts=max_restarts,
        monitor_interval=POLL_S,
    )
    try:
        with Guardian() as guardian:
            agent = Agent(spec, files, guardian, meeting)
            with _handling_signals(agent.note_signal):
                result = agent.run()
    except SignalException as stopped:
        if not meeting.is_spare:  # the others would wait for this machine
            meeting.shutdown()
        return 128 + stopped.sigval
    except RendezvousTimeoutError as error:
        raise TrainingError(
            "too few of the machines came in time", field="distributed_timeout_minutes"
        ) from error
    except RendezvousClosedError as error:
        raise TrainingError("another machine has ended the run, its own messages say why") from error
    except RendezvousError as error:
        raise TrainingError("the connection to the launcher of machine 0 is lost, with it the run") from error
    meeting.shutdown()
    return agent.exit_code(result)


def _silence_torch() -> None:
    """Keep the agent's own messages off the screen: ours say the same, once."""
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False


@contextmanager
def _handling_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """A context in which the signals to stop call `handler` instead of their usual handlers."""
    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
