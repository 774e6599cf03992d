"""The judge of a run without progress: which ranks are at fault, by what all say of themselves."""

from __future__ import annotations

import faulthandler
import math
import os
import shutil
import socket
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from patch.config.schema import ParallelConfig
from patch.training.guards.phases import Phase, PhaseClock, read_shared

_PY_SPY_S = 8.0
"""Seconds that py-spy may take."""


def write_own_stacks(file: Path, reason: str) -> None:
    """Append the stacks of all threads of this process to a file.

    Args:
        file: in a folder that exists.
        reason: the first line.
    """
    with file.open("a") as stream:
        stream.write(_header(reason))
        stream.flush()
        faulthandler.dump_traceback(stream)


def write_stacks_of(pid: int, file: Path, reason: str, place: str) -> None:
    """Append the state and the stacks of another process, which py-spy reads where it is installed.

    Args:
        pid: of a process on this machine.
        file: in a folder that exists.
        reason: the first line.
        place: where it is, in words.
    """
    text = f"process {pid}: {process_state(pid)}, {place}\n{_spied(pid)}\n"
    with file.open("a") as stream:
        stream.write(_header(reason) + text)


def process_state(pid: int) -> str:
    """The kernel's word for what a process does, such as "T (stopped)"; "gone" if there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")


def _spied(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return "no stack: it needs py-spy, which is not installed (pip install py-spy)"
    try:
        done = subprocess.run(
            # A process that is stopped need not be paused, and cannot be.
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stack: {error}"
    return done.stdout or f"no stack: {done.stderr.strip()}"


def _header(reason: str) -> str:
    return f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n"


LEAST_S = 300.0
"""The smallest automatic limit."""
STEPS = 20
"""The automatic limit in steps, each as long as the slowest one."""
READING_LIMITS = 3
"""Reading data may take so many limits: a file server that is replaced needs minutes."""
SLOWEST_DISK = 10e6
"""Bytes per second that a flush gets done at least, of which nothing is seen before it ends."""
PATIENCE_RATIO = 3
"""A store that fails takes longer than its patience: its driver tries each request several times too."""
SLOW_RATIO = 1.5
"""A rank is slow if its own part of a step takes so many times as long as the median rank's."""
SLOW_BY_MS = 20.0
"""And by so much longer: in steps that short other work on a core makes a rank slow, and nobody minds."""
SLOW_AFTER = 50
"""Steps before ranks are compared."""
_BEATS = 10
"""Beats within the limit."""
_SLOWEST_BEAT_S = 10.0
_MOST_NAMED = 8
"""Ranks at fault that a message describes."""


class Beat(NamedTuple):
    """A rank's report of itself."""

    number: int
    """Counted from 1: it grows as long as the rank is alive."""
    phase: str
    num_entered: int
    """See `Note`."""
    age_s: float
    """Time since its last progress."""
    num_steps: int
    """Steps done since the start."""
    own_ms: float
    """See `PhaseClock`."""
    host: str
    pid: int
    descriptor: int
    """File descriptor of the memory that it shares with other processes of its machine."""

    @classmethod
    def of(cls, number: int, phases: PhaseClock, since: float, descriptor: int) -> Beat:
        """This rank's beat.

        Args:
            number: of the beat.
            phases: the notes of its training thread.
            since: a time of its last progress that these notes do not know of, by time.monotonic().
            descriptor: of the shared memory with these notes.
        """
        note = phases.note
        return cls(
            number,
            note.phase,
            note.num_entered,
            time.monotonic() - max(since, note.since),
            phases.num_steps,
            phases.own_ms,
            socket.gethostname(),
            os.getpid(),
            descriptor,
        )


class Limits:
    """Time limits of a rank without progress.

    Args:
        parallel: has --hang-timeout and --distributed-timeout-minutes.
        phases: the notes of this rank; steps take equally long on all ranks.
        patience_s: how long a store of checkpoints that fails is asked again, with nothing written.
    """

    def __init__(self, parallel: ParallelConfig, phases: PhaseClock, patience_s: float = 0.0) -> None:
        self._given_s, self._phases, self._patience_s = parallel.hang_timeout, phases, patience_s
        # Less than a collective, whose own time limit would end the run with a message that says less.
        self._collective_s = 0.9 * 60 * parallel.distributed_timeout_minutes

    @property
    def step_s(self) -> float:
        """Within a step."""
        return self._given_s or min(self._collective_s, max(LEAST_S, STEPS * self._phases.step_s))

    @property
    def interval_s(self) -> float:
        """Between two beats."""
        return min(self.step_s / _BEATS, _SLOWEST_BEAT_S)

    @property
    def long_s(self) -> float:
        """For what may take nearly as long as a collective."""
        return max(self.step_s, self._collective_s)

    def of(self, beat: Beat) -> float:
        """In the phase of a rank that lives: evaluation, a save and the first step are long.

        In set-up and at the end a rank may prepare data, write or delete for hours while the others wait.
        """
        if beat.phase in (Phase.SETUP, Phase.END):
            return math.inf
        if not beat.num_steps or beat.phase in (Phase.EVALUATION, Phase.SAVE):
            return self.long_s
        return self.step_s * (READING_LIMITS if beat.phase == Phase.READING else 1)

    def of_silence(self, phase: str, *, is_set_up: bool = False) -> float:
        """Without beats, which in set-up and at the end any library may keep a rank from.

        Args:
            phase: of the last beat.
            is_set_up: some rank is known to train, so all have ended their set-up, which none leaves alone.
        """
        return self.long_s if phase == Phase.END or (phase == Phase.SETUP and not is_set_up) else self.step_s

    def of_writing(self, num_bytes: int) -> float:
        """Without progress in writing a checkpoint.

        Args:
            num_bytes: of the files that are being flushed, none of which need be on the disk before.
        """
        return self.step_s + PATIENCE_RATIO * self._patience_s + num_bytes / SLOWEST_DISK


class Fault(NamedTuple):
    """The ranks that the others wait for."""

    ranks: list[int]
    is_silent: bool
    """They send no beats; otherwise they live, but make no progress."""
    message: str


class Judge:
    """Looks at the beats of all ranks, again and again.

    Args:
        limits: see `Limits`.
        phases: the notes of this rank.
        world_size: number of ranks.
    """

    def __init__(self, limits: Limits, phases: PhaseClock, world_size: int) -> None:
        self._limits, self._phases = limits, phases
        self._looked = time.monotonic()
        self._heard = [(0, self._looked)] * world_size
        """The number of each rank's newest beat, and when that was first seen."""
        self._slow: set[int] = set()
        """Ranks that `slow` has returned."""

    def find(self, beats: Sequence[Beat]) -> Fault | None:
        """The fault that the beats show, or None."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        if now - before > self._limits.step_s / 2:  # this process itself was stopped: it cannot judge others
            self._heard = [(0, now)] * len(beats)
            return None
        self._heard = [
            heard if heard[0] == beat.number else (beat.number, now)
            for heard, beat in zip(self._heard, beats, strict=True)
        ]
        there = {rank: beat for rank, beat in enumerate(beats) if beat.phase != Phase.DONE}
        is_set_up = any(beat.num_entered for beat in beats)
        silent = [
            rank
            for rank, beat in there.items()
            if now - self._heard[rank][1] > self._limits.of_silence(beat.phase, is_set_up=is_set_up)
        ]
        behind = min((beat.num_entered for beat in there.values()), default=0)
        late = [
            rank
            for rank, beat in there.items()
            if beat.num_entered == behind and beat.age_s > self._limits.of(beat)
        ]
        ranks = silent or late
        return Fault(ranks, bool(silent), self._describe(ranks, beats, bool(silent))) if ranks else None

    def slow(self, beats: Sequence[Beat]) -> list[tuple[int, float]]:
        """Ranks that others wait for in every step, each once, and the milliseconds of the median rank."""
        if min(beat.num_steps for beat in beats) < SLOW_AFTER:
            return []
        usual = statistics.median_low(beat.own_ms for beat in beats)
        bound = max(SLOW_RATIO * usual, usual + SLOW_BY_MS)
        found = [rank for rank, beat in enumerate(beats) if beat.own_ms > bound]
        new = [(rank, usual) for rank in found if rank not in self._slow]
        self._slow.update(found)
        return new

    def _describe(self, ranks: list[int], beats: Sequence[Beat], is_silent: bool) -> str:
        parts = []
        for rank in ranks[:_MOST_NAMED]:
            silence_s = time.monotonic() - self._heard[rank][1]
            beat = beats[rank]
            parts.append(
                f"rank {rank} {self.of_silent(beat, silence_s)}"
                if is_silent
                else f"rank {rank} (process {beat.pid} on {beat.host}) has made no progress for "
                f"{beat.age_s:.0f} s in {self.place(beat.phase, beat.num_steps)}"
            )
        if len(ranks) > _MOST_NAMED:
            parts.append(f"{len(ranks) - _MOST_NAMED} more ranks likewise")
        waiting = Counter(beat.phase for rank, beat in enumerate(beats) if rank not in ranks)
        return "; ".join([*parts, *(f"{count} rank(s) wait in {phase}" for phase, count in waiting.items())])

    def of_silent(self, beat: Beat, silence_s: float) -> str:
        """A rank that sends no beats, in words.

        Args:
            beat: its last one.
            silence_s: the time since then.
        """
        fault = f"(process {beat.pid} on {beat.host}) has shown no sign of life for {silence_s:.0f} s"
        place = self.place_now(beat)
        if place is None:
            return f"{fault}; it was last heard of in {self.place(beat.phase, beat.num_steps)}"
        return f"{fault}, {process_state(beat.pid)}, {place}"

    def place_now(self, beat: Beat) -> str | None:
        """The place of a rank now, in words, from its shared memory; None if its machine is another one.

        Args:
            beat: its last one.
        """
        shared = read_shared(beat.pid, beat.descriptor) if beat.host == socket.gethostname() else None
        return None if shared is None else f"in {self.place(*shared)}"

    def place(self, phase: str, num_steps: int) -> str:
        """A phase and its step, in words.

        Args:
            phase: the phase.
            num_steps: steps done before, since the start.
        """
        if phase in (Phase.SETUP, Phase.END):
            return phase
        return f"{phase} of step {self._phases.num_before + num_steps + 1}"
