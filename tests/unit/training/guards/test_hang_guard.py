"""The hang guard: ranks that are really stopped are named, with their phase; slow phases are let be."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from distributed_runner import leave, run_distributed
from small_runs import small_run
from training_runs import build_seeded_run

from patch.data import Batch
from patch.distributed.worker_process import read_reply
from patch.logger import configure_logging
from patch.training.guards.hang_guard import guarding
from patch.training.guards.hang_verdict import Beat, Judge, Limits
from patch.training.guards.phases import Phase, PhaseClock
from patch.training.hooks import TrainerHook
from patch.training.setup import Run
from patch.training.trainer import Trainer

LIMIT_S = 4.0


class Reader:
    """A reader that calls something before each step."""

    def __init__(self, reader: Any, before: Callable[[int], None]) -> None:
        self._reader, self._before = reader, before

    def __len__(self) -> int:
        return len(self._reader)

    def step(self, iteration: int) -> list[Batch]:
        self._before(iteration)
        return self._reader.step(iteration)


class StopInSave(TrainerHook):
    def on_save(self, iteration: int) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_self(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def at(number: int, action: Callable[[], None]) -> Callable[..., None]:
    """Calls the action at one call, counted from 1."""
    calls = iter(range(1, 10**6))
    return lambda *_: action() if next(calls) == number else None


def hang(run: Run, place: str) -> list[TrainerHook]:
    """Have this rank hang in step 3, or in the save after step 4."""
    if place == "forward":
        run.stages[0].register_forward_pre_hook(at(3, stop_self))
    if place == "data reading":
        run.train_reader = Reader(run.train_reader, lambda iteration: stop_self() if iteration == 2 else None)
    if place == "sleep":
        run.train_reader = Reader(
            run.train_reader, lambda iteration: time.sleep(60) if iteration == 2 else None
        )
    return [StopInSave()] if place == "save" else []


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


def train_guarded(
    rank: int, world_size: int, folder: str, messages: str, hanging: int, place: str
) -> tuple[int, float]:
    """Train in a job that meets as those of a launcher do; what the guard writes to stderr goes to a file."""
    store = make_store(rank, world_size)
    Path(folder, str(rank)).mkdir()
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{rank}/reply"
    with open(messages, "ab") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = sys.__stderr__
    configure_logging()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    config = small_run(
        dp=world_size, num_layers=1, train_iters=4, micro_batch_size=1, global_batch_size=world_size,
        data_prefetch=0, output_path=folder, hang_timeout=LIMIT_S,
    )  # fmt: skip
    run = build_seeded_run(config)
    hooks = hang(run, place) if rank == hanging else []
    if place == "slow":
        reader = run.train_reader
        slow = Reader(reader, at(1, lambda: time.sleep(1.5 * LIMIT_S)))
        run.valid_readers = {"slow": slow}  # type: ignore[dict-item]
    else:
        run.valid_readers = {}
    if place == "slow" and rank == 1:
        run.stages[0].register_forward_pre_hook(lambda *_: time.sleep(0.1))
    with guarding(run):
        code = Trainer(run, hooks).train()
    return code, run.phases.own_ms


class Outcome(NamedTuple):
    """What became of a job."""

    results: list[tuple[int, float]] | None
    """The exit code of each rank and its own time of a step; None: the guard ended all with exit code 5."""
    messages: str
    seconds: float
    folder: Path


# Name: (number of ranks, the rank that hangs, where).
JOBS = {
    "forward": (3, 1, "forward"),
    "data reading": (3, 1, "data reading"),
    "save": (3, 1, "save"),
    "rank 0": (2, 0, "forward"),
    "behind": (2, 1, "sleep"),
    "slow": (2, -1, "slow"),
}


def run_guarded(folder: Path, world_size: int, hanging: int, place: str) -> Outcome:
    folder.mkdir()
    messages = folder / "messages"
    begin = time.monotonic()
    results = None
    try:
        results = run_distributed(
            train_guarded, world_size, str(folder), str(messages), hanging, place, timeout_s=200
        )
    except AssertionError as error:
        assert "died with 5" in str(error), error
    return Outcome(results, messages.read_text(), time.monotonic() - begin, folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of all jobs; several at once, because they mostly wait."""
    folder = tmp_path_factory.mktemp("jobs")
    with ThreadPoolExecutor(3) as pool:
        jobs = {name: pool.submit(run_guarded, folder / name, *job) for name, job in JOBS.items()}
        return {name: job.result() for name, job in jobs.items()}


# The data of a step is read at the end of the step before.
@pytest.mark.parametrize(("place", "step"), [("forward", 3), ("data reading", 2), ("save", 4)])
def test_stopped_rank_is_named_with_its_phase_and_all_stacks(
    outcomes: dict[str, Outcome], place: str, step: int
) -> None:
    results, text, _, folder = outcomes[place]
    assert results is None
    (silence,) = re.findall(r"no sign of life for (\d+) s", text)
    assert LIMIT_S <= int(silence) <= 2 * LIMIT_S  # noted when it was found, however loaded the machine is
    assert text.count("ERROR rank 1 (process ") == text.count("has shown no sign of life for ") == 1
    assert f"T (stopped), in {place} of step {step}; 2 rank(s) wait in " in text, text
    stacks = {rank: (folder / "log" / "stacks" / f"rank_{rank}.txt").read_text() for rank in range(3)}
    assert all("in train_step" in stacks[rank] or "in _save" in stacks[rank] for rank in (0, 2))
    assert "T (stopped)" in stacks[1]
    replies = [read_reply(str(folder / str(rank) / "reply")) for rank in (0, 2)]
    first = next(reply for reply in replies if reply is not None)  # the other rank may be killed before
    assert first.exit_code == 5 and first.may_restart and "rank 1 (process" in first.message


def test_stopped_rank_0_that_keeps_the_store_is_named_by_the_others(outcomes: dict[str, Outcome]) -> None:
    results, text, _, _ = outcomes["rank 0"]
    assert results is None
    assert "ERROR rank 0 (process " in text and "T (stopped), in forward of step 3" in text, text
    assert "rank 1 waits in reduction of step 3" in text


def test_rank_that_lives_but_is_behind_is_named(outcomes: dict[str, Outcome]) -> None:
    results, text, _, _ = outcomes["behind"]
    assert results is None
    assert "rank 1 (process " in text and "has made no progress for " in text
    assert "in data reading of step 2; 1 rank(s) wait in " in text, text


def test_evaluation_that_takes_longer_than_a_step_may_is_let_be(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["slow"].results is not None and "ERROR" not in outcomes["slow"].messages
    assert [code for code, _ in outcomes["slow"].results] == [0, 0]
    assert outcomes["slow"].seconds > LIMIT_S


def test_own_time_of_a_rank_leaves_out_its_waiting_for_the_others(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["slow"].results is not None
    (_, quick_ms), (_, slow_ms) = outcomes["slow"].results
    assert slow_ms >= 100 and slow_ms > 1.5 * quick_ms


def beats(phases: list[tuple[Phase, int, float]], number: int = 1, own_ms: float = 10.0) -> list[Beat]:
    """One beat of each rank: its phase, the phases entered, and its age."""
    return [Beat(number, *phase, 60, own_ms, "elsewhere", 7, 3) for phase in phases]


def judge_of(num_ranks: int, **changes: Any) -> Judge:
    clock = PhaseClock()
    return Judge(Limits(small_run(**changes).parallel, clock, num_ranks), num_ranks, start_iteration=100)


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
    ],
)
def test_who_is_behind_and_for_how_long(phases: list, expected: list[int]) -> None:
    fault = judge_of(2, hang_timeout=30).find(beats(phases))
    assert ([] if fault is None else fault.ranks) == expected
    if expected == [1]:
        assert "rank 1 (process 7 on elsewhere) has made no progress for 31 s in forward of step 161" in (
            fault.message
        )


def test_automatic_limit_is_twenty_steps_and_at_least_five_minutes() -> None:
    clock = PhaseClock()
    limits = Limits(small_run().parallel, clock, 2)
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
    found = [each for own in (10.0, 14.0, 16.0) for each in beats([(Phase.UPDATE, 9, 0.0)], own_ms=own)]
    assert judge.slow(found) == []
    found[1] = found[1]._replace(own_ms=10.0)
    assert judge.slow(found) == [(2, 10.0)]
    assert judge.slow(found) == []
    early = [beat._replace(num_steps=10) for beat in found]
    assert judge_of(3).slow(early) == []
