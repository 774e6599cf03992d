"""Ends a run in which a rank makes no progress, and reports the rank, its phase and the stacks of all ranks.

Each rank has two threads beside the training thread. The first sends a beat through the job's store every few
seconds: the rank's phase, and the time since its last progress. Rank 0 and the last rank read all beats.

A rank is at fault if it sends no beats: its process is stopped, a thread keeps the GIL, or its machine is
lost. A rank is also at fault if it is behind the other ranks and has been in its phase for too long. The
fault goes into the store; every rank then writes its stacks and ends.

The second thread never waits for the store. It notices a store that does not answer. It also notices that its
whole process was suspended, in which case no rank is at fault.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import orjson
import torch.distributed as dist

from patch.compat.torch_internals import connect_to_job_store
from patch.config.positions import where
from patch.config.schema import ParallelConfig, RunConfig
from patch.device import start_thread
from patch.launch.worker_process import WorkerExit, announce_end, claim_error_report
from patch.logger import get_logger
from patch.storage.names import STACKS_FOLDER
from patch.training.guards.phases import Phase, PhaseClock

_logger = get_logger(__name__)

LEAST_S = 300.0
"""The smallest automatic limit, in seconds."""
STEPS = 20
"""The automatic limit, in durations of the slowest step."""


class Heartbeat(NamedTuple):
    """A rank's report of its own state."""

    sent: float
    """Time of sending, by the rank's own clock."""
    phase: str
    num_entered: int
    """See `Note`."""
    age_s: float
    """Time since its last progress."""
    text: str
    """Rank, process, host, phase and step, for messages."""


class HangDetector:
    """Computes the time limits and finds the ranks at fault; `phases` of this rank gives the step time."""

    def __init__(self, parallel: ParallelConfig, phases: PhaseClock) -> None:
        self._given_s, self._phases = parallel.hang_timeout, phases
        # Less than the timeout of collectives, which would end the run with a less helpful message.
        self._collective_s = 0.9 * 60 * parallel.distributed_timeout_minutes
        self._heard: dict[tuple[int, float], float] = {}
        """Time when the newest beat of each rank was first seen, by (rank, `sent`)."""

    def step_s(self) -> float:
        """Return the limit within a step."""
        return self._given_s or min(self._collective_s, max(LEAST_S, STEPS * self._phases.step_s))

    def interval_s(self) -> float:
        """Return the time between two beats."""
        return min(self.step_s() / 10, 10.0)

    def limits_s(self, phase: str) -> tuple[float, float]:
        """Return a rank's limits in this phase: without progress, and without beats.

        Evaluation, a save and the first step are long. In set-up and at the end, a rank may prepare data,
        write or delete for hours while other ranks wait, and a library may keep the rank from sending beats.
        """
        step_s, long_s = self.step_s(), max(self.step_s(), self._collective_s)
        if phase in (Phase.SETUP, Phase.END):
            return float("inf"), long_s
        if not self._phases.num_steps or phase in (Phase.EVALUATION, Phase.SAVE):
            return long_s, step_s
        # Data may take longer: a file server that is replaced needs minutes.
        return step_s * (3 if phase == Phase.READING else 1), step_s

    def find(self, beats: Sequence[Heartbeat], moved: float) -> str:
        """Return a description of the ranks at fault, or "" if there is none.

        `moved` is the time when this process was last suspended, and so received no beats.
        """
        now = time.monotonic()
        self._heard = {beat: self._heard.get(beat, now) for beat in enumerate(each.sent for each in beats)}
        there = {rank: beat for rank, beat in enumerate(beats) if beat.phase != Phase.DONE}
        behind = min((beat.num_entered for beat in there.values()), default=0)
        silent, late = [], []
        for rank, beat in there.items():
            silence_s = now - max(self._heard[rank, beat.sent], moved)
            limit_s, silence_limit_s = self.limits_s(beat.phase)
            if silence_s > silence_limit_s:
                silent.append(f"{beat.text} has shown no sign of life for {silence_s:.0f} s")
            elif beat.num_entered == behind and beat.age_s > limit_s:
                late.append(f"{beat.text} has made no progress for {beat.age_s:.0f} s")
        return "; ".join((silent or late)[:8])  # a message has room for a few ranks


class _HangGuard:
    def __init__(self, config: RunConfig, phases: PhaseClock) -> None:
        self._rank, self._ranks = dist.get_rank(), [str(rank) for rank in range(dist.get_world_size())]
        self._folder = Path(config.checkpoint.output_path) / STACKS_FOLDER
        self._phases, self._detector = phases, HangDetector(config.parallel, phases)
        self._store = dist.PrefixStore("hang_guard", connect_to_job_store())
        self._name = f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()})"
        self._writing, self._fault = phases.writing(), ""
        self._answered = self._looked = self._moved = time.monotonic()
        """Times of the store's last answer, of the last check in `watch`, and of progress that phases do not
        show: a checkpoint grew while training waits for it, or this process was suspended."""
        self.is_over = threading.Event()
        self._send_beat()

    def talk(self) -> None:
        """Thread that sends beats and, on the first and last rank, reads them."""
        with suppress(RuntimeError):  # the store is gone, and with it the job
            while not self.is_over.wait(self._detector.interval_s()):
                self._send_beat()
                if self._rank in (0, len(self._ranks) - 1):
                    beats = [Heartbeat(*orjson.loads(text)) for text in self._store.multi_get(self._ranks)]
                    if fault := self._detector.find(beats, self._moved):
                        self._store.compare_set("fault", "", fault)  # the other reader may have been faster
                if self._store.check(["fault"]):
                    self._fault = self._store.get("fault").decode()
                self._answered = time.monotonic()
            self._send_beat()

    def watch(self) -> None:
        """Thread that never waits for the store, and ends this process on a fault."""
        while not self.is_over.wait(self._detector.interval_s()):
            own = self._beat()
            self._looked = time.monotonic()
            _, limit_s = self._detector.limits_s(own.phase)
            # faulthandler's thread needs no GIL: if a thread keeps the GIL, the stacks go to stderr.
            faulthandler.dump_traceback_later(limit_s)
            silent_s = self._looked - self._answered
            if min(silent_s, own.age_s) > limit_s + self._detector.interval_s():
                keeper = "rank 0, or the launcher of machine 0, which keeps the job's store,"
                self._fault = f"{keeper} has not answered for {silent_s:.0f} s; {own.text} waits"
            if self._fault:
                self._end(self._fault)

    def _send_beat(self) -> None:
        self._store.set(str(self._rank), orjson.dumps([*self._beat()]).decode())

    def _beat(self) -> Heartbeat:
        now, note, writing = time.monotonic(), self._phases.note, self._phases.writing()
        if now - self._looked > 2 * self._detector.interval_s() + 1:  # `watch` never waits: suspended
            self._answered = self._moved = now
        if note.phase == Phase.SAVE and writing != self._writing:
            self._moved = now
        self._writing = writing
        step = self._phases.num_before + self._phases.num_steps + 1
        text = f"{self._name}, in {note.phase} of step {step},"
        return Heartbeat(now, note.phase, note.num_entered, now - max(note.since, self._moved), text)

    def _end(self, fault: str) -> None:
        message = (
            f"{fault}. All ranks end; their Python stacks are in {self._folder}. {where('hang_timeout')} is "
            f"how long a rank may make no progress in a step, here {self._detector.step_s():.0f} s"
        )
        if claim_error_report():
            _logger.error("%s", message)
        # In a thread, because the file system itself may hang.
        start_thread("hang guard: stacks", lambda: self._write_stacks(message)).join(10.0)
        # The launcher kills the other workers soon after the first has ended: let all see the fault first.
        time.sleep(2 * self._detector.interval_s())
        announce_end(WorkerExit(5, message, may_restart=True))
        os._exit(5)

    def _write_stacks(self, message: str) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"rank_{self._rank}.txt").open("a", buffering=1) as stream:
                stream.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
                faulthandler.dump_traceback(stream)


@contextmanager
def guarding(config: RunConfig, phases: PhaseClock) -> Iterator[None]:
    """Context in which hangs are detected; all ranks enter it together."""
    guard = _HangGuard(config, phases)
    talking = start_thread("hang guard: beats", guard.talk)
    watching = start_thread("hang guard: store", guard.watch)
    try:
        yield
    finally:
        phases.enter(Phase.DONE)
        guard.is_over.set()
        talking.join(1.0)  # this thread may wait for a store that does not answer
        watching.join()
        faulthandler.cancel_dump_traceback_later()
