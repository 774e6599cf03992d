"""The hang guard: ranks that are really stopped are named, with their phase; slow phases are let be."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from distributed_runner import leave, run_distributed
from small_runs import small_run
from training_runs import build_seeded_run

from patch.distributed.worker_process import read_reply
from patch.logger import configure_logging
from patch.storage.names import CHECKSUMS_FILE
from patch.training.guards import hang_verdict
from patch.training.guards.hang_guard import guarding
from patch.training.guards.hang_verdict import Beat, Judge, Limits
from patch.training.guards.phases import Phase, PhaseClock
from patch.training.hooks import TrainerHook
from patch.training.setup import Run
from patch.training.trainer import Trainer

LIMIT_S = 3.0
SLOW_S = 0.4 * LIMIT_S
"""What a slow rank takes longer: less than the limit, more than a step of the others under load."""


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def before_step(run: Run, step: int, action: Callable[[], object]) -> None:
    """Have a step, counted from 1, call the action in its forward; step 0 is the first evaluation."""
    done: list[object] = []

    def call(*_: object) -> None:
        is_training = run.stages[0].training
        if run.phases.num_steps == step - 1 if is_training else not step and not done:
            done.append(action())

    run.stages[0].register_forward_pre_hook(call)


def freeze_all(phases: PhaseClock) -> None:
    """All ranks stand still for more than the limit, as on a machine that is suspended; here in forward."""
    looked, gap_s = time.monotonic(), 0.0  # it may begin as soon as rank 0 knows all processes
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        names = " ".join(map(str, pids))
        subprocess.Popen(["sh", "-c", f"kill -STOP {names}; sleep {1.2 * LIMIT_S}; kill -CONT {names}"])
    while gap_s < LIMIT_S:
        phases.go_on(Phase.FORWARD)
        time.sleep(0.05)
        now = time.monotonic()
        looked, gap_s = now, now - looked
    time.sleep(0.3 * LIMIT_S)  # the guard looks before the next progress


def never_flush() -> None:
    """From now on checkpoints are not flushed, as if their file server were gone."""
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        if "/checkpoint/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            time.sleep(600)
        flush(descriptor)

    os.fsync = fsync  # type: ignore[assignment]


def set_up(run: Run, place: str) -> list[TrainerHook]:
    """Have this rank hang in step 3, or in the save after step 2; in "writing" in the one after step 4."""
    if place == "forward":
        before_step(run, 3, lambda: time.sleep(0.3 * LIMIT_S))  # let beats tell that two steps are done
    if place in ("forward", "rank 0"):
        before_step(run, 3, stop_self)
    if place == "behind":
        before_step(run, 3, lambda: time.sleep(600))
    hook = TrainerHook()
    if place in ("save", "writing"):
        hook.on_save = lambda iteration: {"save": stop_self, "writing": never_flush}[place]()
    return [hook]


def make_store(rank: int, world_size: int) -> dist.TCPStore:
    """A store that rank 0 keeps, as in a launcher's job; at a port that the kernel knows to be free."""
    timeout = timedelta(seconds=60)
    own = (
        dist.TCPStore("127.0.0.1", 0, world_size, True, timeout, wait_for_workers=False) if not rank else None
    )
    port = [own.port if own else 0]
    dist.broadcast_object_list(port)
    leave()
    return own or dist.TCPStore("127.0.0.1", port[0], world_size, False, timeout)


def train_guarded(rank: int, world_size: int, folder: str, messages: str, hanging: int, place: str) -> None:
    """Train in a job that meets as those of a launcher do; what the guard writes to stderr goes to a file.

    In "forward" the evaluation is long, and rank 2 is slow. In "save" all stand still in step 2.
    """
    store = make_store(rank, world_size)
    Path(folder, str(rank)).mkdir()
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{rank}/reply"
    with open(messages, "ab") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = sys.__stderr__
    configure_logging()
    hang_verdict.SLOW_AFTER = 2
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    config = small_run(
        dp=world_size, num_layers=1, train_iters=6, micro_batch_size=1, global_batch_size=world_size,
        data_prefetch=0, output_path=folder, hang_timeout=LIMIT_S, eval_interval=2, save_interval=2,
        async_save=place == "writing",
    )  # fmt: skip
    phases = PhaseClock()
    with guarding(config, phases, torch.device("cpu")):
        run = build_seeded_run(config)
        run.phases = phases
        hooks = set_up(run, place) if rank == hanging else []
        if place == "forward":
            before_step(run, 0, lambda: time.sleep(1.5 * LIMIT_S))
        else:
            run.data.valid_readers = {}
        if place == "forward" and rank == 2:
            before_step(run, 2, lambda: time.sleep(SLOW_S))
        if place == "save":
            before_step(run, 2, lambda: freeze_all(phases))
        Trainer(run, hooks).train()


class Outcome(NamedTuple):
    """What became of a job that the guard ended with exit code 5."""

    messages: str
    folder: Path


# Place: (number of ranks, the rank that hangs).
JOBS = {
    "forward": (3, 1), "save": (2, 1), "rank 0": (2, 0), "behind": (2, 1), "writing": (1, 0),
}  # fmt: skip


def run_guarded(folder: Path, place: str, world_size: int, hanging: int) -> Outcome:
    folder.mkdir()
    messages = folder / "messages"
    arguments = (str(folder), str(messages), hanging, place)
    with pytest.raises(AssertionError, match="died with 5"):
        run_distributed(train_guarded, world_size, *arguments, timeout_s=200)
    return Outcome(messages.read_text(), folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of all jobs; at once, because they mostly wait."""
    folder = tmp_path_factory.mktemp("jobs")
    with ThreadPoolExecutor(len(JOBS)) as pool:
        jobs = {place: pool.submit(run_guarded, folder / place, place, *job) for place, job in JOBS.items()}
        return {place: job.result() for place, job in jobs.items()}


@pytest.mark.parametrize(("place", "step"), [("forward", 3), ("save", 2)])
def test_stopped_rank_is_named_with_its_phase_and_all_stacks(
    outcomes: dict[str, Outcome], place: str, step: int
) -> None:
    """A long evaluation before step 3, and in step 2 a machine that stood still, are let be."""
    text, folder = outcomes[place]
    others = [rank for rank in range(JOBS[place][0]) if rank != 1]
    (silence,) = re.findall(r"no sign of life for (\d+) s", text)
    assert LIMIT_S <= int(silence) <= 2 * LIMIT_S  # noted when it was found, however loaded the machine is
    assert text.count("ERROR") == text.count("ERROR rank 1 (process ") == 1, text
    assert f"T (stopped), in {place} of step {step}; {len(others)} rank(s) wait in " in text, text
    stacks = {file.stem: file.read_text() for file in (folder / "log" / "stacks").iterdir()}
    own = [stacks[f"rank_{rank}"] for rank in others]
    assert all("in train_step" in each or "in _save" in each for each in own)
    assert f"T (stopped), in {place} of step {step}" in stacks["rank_1"]
    assert "stop_self" in stacks["rank_1"] or "it needs py-spy, which is not installed" in stacks["rank_1"]
    replies = [read_reply(str(folder / str(rank) / "reply")) for rank in others]
    first = next(reply for reply in replies if reply is not None)  # the other rank may be killed before
    assert first.exit_code == 5 and first.may_restart and "rank 1 (process" in first.message


def test_stopped_rank_0_that_keeps_the_store_is_named_by_the_others(outcomes: dict[str, Outcome]) -> None:
    text = outcomes["rank 0"].messages
    assert "ERROR rank 0 (process " in text and "T (stopped), in forward of step 3" in text, text
    assert "rank 1 waits in reduction of step 3" in text


def test_rank_that_lives_but_is_behind_is_named(outcomes: dict[str, Outcome]) -> None:
    text = outcomes["behind"].messages
    assert "rank 1 (process " in text and "has made no progress for " in text
    assert "in forward of step 3; 1 rank(s) wait in " in text, text


def test_background_writer_that_gets_nothing_done_is_named_in_a_run_of_one_process(
    outcomes: dict[str, Outcome],
) -> None:
    text, folder = outcomes["writing"]
    pattern = r"ERROR rank 0 .* has written nothing of the checkpoint of step 4 for \d+ s, after 0\.\d+ MiB"
    assert len(re.findall(pattern, text)) == text.count("ERROR") == 1, text
    assert "in fsync" in (folder / "log" / "stacks" / "rank_0.txt").read_text()
    assert (folder / "checkpoint" / "iter_0000002" / CHECKSUMS_FILE).is_file()


def test_slow_rank_is_reported_with_its_own_time(outcomes: dict[str, Outcome]) -> None:
    """Which leaves out its waiting for the others."""
    pattern = r"rank (\d) .* is slow: its own part of a step takes (\S+) ms, the median rank's (\S+) ms"
    found = {int(rank): times for rank, *times in re.findall(pattern, outcomes["forward"].messages)}
    slow_ms, usual_ms = map(float, found[2])
    assert slow_ms >= 1e3 * SLOW_S and slow_ms > 1.5 * usual_ms


def beats(phases: list[tuple[Phase, int, float]], number: int = 1, own_ms: float = 10.0) -> list[Beat]:
    """One beat of each rank: its phase, the phases entered, and its age."""
    return [Beat(number, *phase, 60, own_ms, "elsewhere", 7, 3) for phase in phases]


def judge_of(num_ranks: int, **changes: Any) -> Judge:
    clock = PhaseClock()
    clock.num_before = 100
    return Judge(Limits(small_run(**changes).parallel, clock), clock, num_ranks)


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([(Phase.UPDATE, 9, 40.0), (Phase.FORWARD, 8, 31.0)], [1]),
        ([(Phase.UPDATE, 9, 40.0), (Phase.FORWARD, 8, 29.0)], []),  # the one who is behind has time left
        ([(Phase.UPDATE, 9, 40.0), (Phase.READING, 8, 40.0)], []),  # data may take longer
        ([(Phase.SAVE, 9, 900.0), (Phase.SAVE, 9, 900.0)], []),
        ([(Phase.SAVE, 9, 1700.0), (Phase.SAVE, 9, 1.0)], [0]),  # sooner than a collective fails
        ([(Phase.REDUCTION, 9, 31.0), (Phase.REDUCTION, 9, 31.0)], [0, 1]),
        ([(Phase.DONE, 5, 99.0), (Phase.DONE, 5, 99.0)], []),
        ([(Phase.SAVE, 9, 1700.0)], [0]),  # nobody waits, but nothing gets done either
        ([(Phase.SETUP, 0, 9000.0), (Phase.READING, 1, 9000.0)], []),  # it prepares data
        ([(Phase.END, 9, 9000.0), (Phase.DONE, 5, 99.0)], []),
    ],
)
def test_who_is_behind_and_for_how_long(phases: list, expected: list[int]) -> None:
    fault = judge_of(len(phases), hang_timeout=30).find(beats(phases))
    assert ([] if fault is None else fault.ranks) == expected
    if expected == [1]:
        assert "rank 1 (process 7 on elsewhere) has made no progress for 31 s in forward of step 161" in (
            fault.message
        )


def test_automatic_limit_is_twenty_steps_and_at_least_five_minutes() -> None:
    clock = PhaseClock()
    limits = Limits(small_run().parallel, clock)
    clock.end_step(1000.0, 0.0)  # the first step, in which kernels are tuned
    clock.end_step(2.0, 0.0)
    assert limits.step_s == 300.0
    clock.end_step(40.0, 0.0)
    clock.end_step(2.0, 0.0)
    assert limits.step_s == 800.0
    clock.end_step(400.0, 0.0)  # a machine that stood still
    assert limits.step_s == 0.9 * 30 * 60  # sooner than a collective fails


def test_slow_rank_is_reported_once() -> None:
    judge = judge_of(3)
    found = [each for own in (100.0, 140.0, 160.0) for each in beats([(Phase.UPDATE, 9, 0.0)], own_ms=own)]
    assert judge.slow(found) == []
    short = [beat._replace(own_ms=own) for beat, own in zip(found, (10.0, 10.0, 29.0), strict=True)]
    assert judge.slow(short) == []
    found[1] = found[1]._replace(own_ms=100.0)
    assert judge.slow(found) == [(2, 100.0)]
    assert judge.slow(found) == []
    early = [beat._replace(num_steps=10) for beat in found]
    assert judge_of(3).slow(early) == []


@pytest.mark.parametrize(
    ("silent", "other", "limit_s"),
    [
        ((Phase.FORWARD, 9, 0.0), (Phase.FORWARD, 9, 0.0), 30),
        ((Phase.SETUP, 0, 0.0), (Phase.SETUP, 0, 0.0), 0.9 * 30 * 60),
        ((Phase.SETUP, 0, 0.0), (Phase.FORWARD, 2, 0.0), 30),  # it was stopped before it could tell
        ((Phase.END, 9, 0.0), (Phase.END, 9, 0.0), 0.9 * 30 * 60),
    ],
)
def test_silence_may_be_longer_in_set_up_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, silent: tuple, other: tuple, limit_s: float
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    judge = judge_of(2, hang_timeout=30)
    said = beats([silent, other])
    while judge.find([said[0], said[1]._replace(number=int(now))]) is None:
        now += 5
    assert limit_s < now - 1000 <= limit_s + 10


def test_writing_may_wait_for_a_flush_of_all_that_was_written() -> None:
    limits = Limits(small_run(hang_timeout=30).parallel, PhaseClock())
    assert limits.of_writing(0) == 30 and limits.of_writing(10**9) == 130
    patient = Limits(small_run(hang_timeout=30).parallel, PhaseClock(), 90.0)
    assert patient.of_writing(0) >= 30 + 2 * 90, "the driver's own attempts come on top"
