"""Ends a run in which a rank makes no progress, and says which rank, in which phase, with all stacks.

Two threads of each rank, beside the training thread. One sends a beat through the job's store every few
seconds: what the rank does and for how long. The first and the last rank read the beats of all. A rank is at
fault that sends no beats any more (its process is stopped, it keeps the GIL, its machine is lost), or that is
behind the others and has been in its phase for too long; the others only wait for it. What is found goes into
the store, and every rank writes its stacks and ends. The other thread notices that the store itself does not
answer, for which the first one may wait for ever; that the threads which write a checkpoint in the background
get nothing done; and that the whole process stood still for a while, which is nobody's fault.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from patch.checkpoint.save import Writing
from patch.compat.torch_internals import connect_to_job_store
from patch.config.positions import where
from patch.config.schema import RunConfig
from patch.device import start_thread
from patch.distributed.collectives import barrier
from patch.distributed.worker_process import Reply, announce_end, claim_error_report
from patch.logger import get_logger
from patch.numbers import size_text
from patch.storage.names import STACKS_FOLDER
from patch.storage.remote import PATIENCE_S
from patch.training.guards.hang_verdict import (
    Beat,
    Fault,
    Judge,
    Limits,
    process_state,
    write_own_stacks,
    write_stacks_of,
)
from patch.training.guards.phases import Phase, PhaseClock, shared_memory

_logger = get_logger(__name__)

EXIT_CODE = 5
_WRITING_S = 10.0
"""Seconds that the stacks may take: the file system may be what hangs."""
_FIRST = -1
"""Stands for the rank of a machine that reports first, as the writer of stacks."""
_VERDICT = "verdict"
"""The key in the store."""


class HangGuard:
    """The guard of one rank.

    Args:
        config: the run.
        phases: the notes of this rank's training thread.
        store: a connection to the job's store that nobody else uses.
    """

    def __init__(self, config: RunConfig, phases: PhaseClock, store: dist.Store) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._folder = Path(config.checkpoint.output_path) / STACKS_FOLDER
        self._phases = phases
        patience_s = PATIENCE_S if config.checkpoint.save else 0.0
        self._limits = Limits(config.parallel, phases, patience_s)
        self._judge = Judge(self._limits, phases, self._world_size)
        self._store = dist.PrefixStore("hang_guard", store)
        self._phases.shared, self._descriptor = shared_memory()
        self._num_beats = 0
        self._answered = self._looked = self._moved = time.monotonic()
        """Times when the store last answered, `_watch` last looked, and this process last stood still."""
        self._writing: Writing | None = None
        self._wrote = self._moved
        """This rank's progress with a checkpoint when `_talk` last looked, and when that was new."""
        self._is_over = threading.Event()
        self._ending = threading.Lock()
        self._send_beat()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the ranks are watched; every rank must have built its guard."""
        (first,) = self._read_beats([0])
        talking = start_thread("hang guard: beats", self._talk)
        watching = start_thread("hang guard: store", partial(self._watch, first))
        try:
            yield
        finally:
            self._is_over.set()
            self._phases.enter(Phase.DONE)
            talking.join(1.0)  # it may wait for a store that does not answer
            if not talking.is_alive():
                with suppress(RuntimeError):
                    self._send_beat()
            watching.join()
            faulthandler.cancel_dump_traceback_later()
            self._phases.shared = None
            os.close(self._descriptor)

    def _talk(self) -> None:
        """The thread that sends beats and, on two ranks, reads them."""
        with suppress(RuntimeError):  # the store has ended, and with it the job
            while not self._is_over.wait(self._limits.interval_s):
                self._send_beat()
                if self._rank in (0, self._world_size - 1):
                    self._look_at(self._read_beats(range(self._world_size)))
                self._look_at_writing()
                if self._store.check([_VERDICT]):
                    self._end(json.loads(self._store.get(_VERDICT)))
                self._answered = time.monotonic()

    def _watch(self, first: Beat) -> None:
        """The thread that never waits for anybody.

        Args:
            first: rank 0's first beat, which tells where it is.
        """
        while not self._is_over.wait(self._limits.interval_s) and not self._ending.locked():
            own = self._beat()
            self._looked = time.monotonic()
            limit_s = self._limits.of_silence(own.phase)
            # The timer's thread needs no GIL: if another thread keeps it, the stacks go to stderr.
            faulthandler.dump_traceback_later(limit_s, file=sys.stderr)
            silent_s = self._looked - self._answered
            if min(silent_s, own.age_s) > limit_s + self._limits.interval_s:
                self._end(self._verdict_without_store(first, own, silent_s))

    def _beat(self) -> Beat:
        now, is_saving = time.monotonic(), self._phases.note.phase == Phase.SAVE
        if now - self._looked > 2 * self._limits.interval_s + 1:  # `_watch` never waits, so all stood still
            self._answered = self._moved = now
        since = max(self._moved, self._wrote) if is_saving and self._writing is not None else self._moved
        return Beat.of(self._num_beats, self._phases, since, self._descriptor)

    def _send_beat(self) -> None:
        self._num_beats += 1
        self._store.set(str(self._rank), json.dumps(self._beat()))

    def _read_beats(self, ranks: Any) -> list[Beat]:
        return [Beat(*json.loads(text)) for text in self._store.multi_get([str(rank) for rank in ranks])]

    def _announce(self, verdict: dict[str, Any]) -> None:
        """Put a verdict where all ranks find it; another one may have been faster."""
        self._store.compare_set(_VERDICT, "", json.dumps(verdict))

    def _look_at_writing(self) -> None:
        """See whether this rank's threads that write a checkpoint get anything done."""
        writing = self._phases.writing()
        if writing != self._writing:
            self._writing, self._wrote = writing, time.monotonic()
        silent_s = time.monotonic() - max(self._wrote, self._moved)
        if writing is not None and silent_s > self._limits.of_writing(writing.num_flushing):
            message = (
                f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()}) has written nothing of "
                f"the checkpoint of step {writing.iteration} for {silent_s:.0f} s, after "
                f"{size_text(writing.num_bytes)}"
            )
            self._announce({"message": self._complete(message), "stacks": []})

    def _look_at(self, beats: list[Beat]) -> None:
        fault = self._judge.find(beats)
        if fault is not None:
            self._announce(self._verdict(fault, beats))
        elif self._rank == 0:
            for rank, usual_ms in self._judge.slow(beats):
                _logger.warning(
                    "rank %d (process %d on %s) is slow: its own part of a step takes %.1f ms, the median "
                    "rank's %.1f ms; the others wait for it",
                    rank, beats[rank].pid, beats[rank].host, beats[rank].own_ms, usual_ms,
                )  # fmt: skip

    def _verdict(self, fault: Fault, beats: list[Beat]) -> dict[str, Any]:
        """Facts for all ranks: the message, and of which ranks which other one writes the stacks."""
        writers = {beat.host: rank for rank, beat in enumerate(beats) if rank not in fault.ranks}
        silent = fault.ranks if fault.is_silent else []
        hosts = [(rank, beats[rank].host) for rank in silent]
        stacks = [(writers[host], rank, beats[rank]) for rank, host in hosts if host in writers]
        return {"message": self._complete(fault.message), "stacks": stacks}

    def _verdict_without_store(self, first: Beat, own: Beat, silent_s: float) -> dict[str, Any]:
        """The store does not answer. Our launcher keeps it, or torchrun's agent; under srun rank 0 does."""
        is_here = first.host == socket.gethostname()
        if is_here and process_state(first.pid).startswith("T"):
            fault = f"rank 0 {self._judge.of_silent(first, silent_s)}"
        else:
            fault = f"the job's store on machine 0 ({first.host}) has not answered for {silent_s:.0f} s"
        waiting = f"rank {self._rank} waits in {self._judge.place(own.phase, own.num_steps)}"
        stacks = [(_FIRST, 0, first)] if is_here else []
        return {"message": self._complete(f"{fault}; {waiting}"), "stacks": stacks}

    def _complete(self, message: str) -> str:
        return (
            f"{message}. All ranks end here; the Python stacks of the ranks are in {self._folder}. "
            f"{where('hang_timeout')} is how long a rank may make no progress in a step, here "
            f"{self._limits.step_s:.0f} s"
        )

    def _end(self, verdict: dict[str, Any]) -> None:
        """Write stacks and end this process."""
        if not self._ending.acquire(blocking=False):
            return
        is_first = claim_error_report()
        if is_first:
            _logger.error("%s", verdict["message"])
        writing = start_thread("hang guard: stacks", partial(self._write_stacks, verdict, is_first))
        writing.join(_WRITING_S)
        # The launcher kills the others soon after the first one has ended: let all see the verdict before.
        time.sleep(2 * self._limits.interval_s)
        announce_end(Reply(EXIT_CODE, verdict["message"], may_restart=True))
        os._exit(EXIT_CODE)

    def _write_stacks(self, verdict: dict[str, Any], is_first: bool) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_own_stacks(self._folder / f"rank_{self._rank}.txt", verdict["message"])
            for writer, rank, beat in verdict["stacks"]:
                if writer == self._rank or (writer == _FIRST and is_first):
                    last = Beat(*beat)
                    place = self._judge.place_now(last) or "in an unknown place"
                    file = self._folder / f"rank_{rank}.txt"
                    write_stacks_of(last.pid, file, verdict["message"], place)


@contextmanager
def guarding(config: RunConfig, phases: PhaseClock, device: torch.device) -> Iterator[None]:
    """A context in which a run's ranks are watched; all ranks enter it together.

    Args:
        config: the run.
        phases: the notes of this rank's training thread.
        device: of this rank.
    """
    guard = HangGuard(config, phases, connect_to_job_store())
    barrier(device)
    with guard.watching():
        yield
