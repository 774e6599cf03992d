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
import torch.distributed as dist
from distributed_runner import leave, run_distributed
from small_runs import small_run
from training_runs import build_seeded_run

from patch.launch.worker_process import read_worker_exit
from patch.logger import configure_logging
from patch.training.guards.hang_guard import HangDetector, Heartbeat, guarding
from patch.training.guards.phases import Phase, PhaseClock
from patch.training.hooks.hook import TrainerHook
from patch.training.setup import Run
from patch.training.trainer import Trainer

LIMIT_S = 3.0


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


def set_up(run: Run, place: str) -> list[TrainerHook]:
    """Have this rank hang in step 3, or in the save after step 2."""
    if place == "forward":
        before_step(run, 3, lambda: time.sleep(0.3 * LIMIT_S))  # let beats tell that two steps are done
    if place in ("forward", "rank 0"):
        before_step(run, 3, stop_self)
    if place == "behind":
        before_step(run, 3, lambda: time.sleep(600))
    hook = TrainerHook()
    if place == "save":
        hook.on_save = lambda iteration: (time.sleep(0.3 * LIMIT_S), stop_self())
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

    In "forward" the evaluation is long. In "save" all stand still in step 2.
    """
    store = make_store(rank, world_size)
    Path(folder, str(rank)).mkdir()
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{rank}/reply"
    with open(messages, "ab") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = sys.__stderr__
    configure_logging()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    config = small_run(
        dp=world_size, num_layers=1, train_iters=6, micro_batch_size=1, global_batch_size=world_size,
        data_prefetch=0, output_path=folder, hang_timeout=LIMIT_S, eval_interval=2, save_interval=2,
        async_save=False,
    )  # fmt: skip
    phases = PhaseClock()
    with guarding(config, phases):
        run = build_seeded_run(config)
        run.phases = phases
        hooks = set_up(run, place) if rank == hanging else []
        if place == "forward":
            before_step(run, 0, lambda: time.sleep(1.5 * LIMIT_S))
        else:
            run.data.valid_readers = {}
        if place == "save":
            before_step(run, 2, lambda: freeze_all(phases))
        Trainer(run, hooks).train()


class Outcome(NamedTuple):
    """What became of a job that the guard ended with exit code 5."""

    messages: str
    folder: Path


# Place: (number of ranks, the rank that hangs).
JOBS = {"forward": (3, 1), "save": (2, 1), "rank 0": (2, 0), "behind": (2, 1)}


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
@pytest.mark.long
def test_stopped_rank_is_named_with_its_phase_and_all_stacks(
    outcomes: dict[str, Outcome], place: str, step: int
) -> None:
    """A long evaluation before step 3, and in step 2 a machine that stood still, are let be."""
    text, folder = outcomes[place]
    others = [rank for rank in range(JOBS[place][0]) if rank != 1]
    assert text.count("ERROR") == text.count("ERROR rank 1 (process ") == 1, text
    named = rf"rank 1 \(process \d+ on .+\), in {place} of step {step}, has shown no sign of life for (\d+) s"
    (silence,) = re.findall(named, text)
    assert LIMIT_S <= int(silence) <= 2 * LIMIT_S  # noted when it was found, however loaded the machine is
    stacks = {file.stem: file.read_text() for file in (folder / "log" / "stacks").iterdir()}
    assert stacks.keys() == {f"rank_{rank}" for rank in others}
    assert all("in train_step" in each or "in _save" in each for each in stacks.values())
    replies = [read_worker_exit(str(folder / str(rank) / "reply")) for rank in others]
    first = next(reply for reply in replies if reply.message)  # the other rank may be killed before
    assert first.exit_code == 5 and first.may_restart and "rank 1 (process" in first.message


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("rank 0", "ERROR rank 0, or .* has not answered .* rank 1 .*, in reduction of step 3, waits"),
        ("behind", r"rank 1 \(.*\), in forward of step 3, has made no progress for \d+ s\. All"),
    ],
)
@pytest.mark.long
def test_rank_that_keeps_the_store_or_lives_but_is_behind_is_named(
    outcomes: dict[str, Outcome], place: str, named: str
) -> None:
    text = outcomes[place].messages
    assert re.search(named, text), text


def beats(phases: list[tuple[Phase, int, float]], sent: float = 1.0) -> list[Heartbeat]:
    """One beat of each rank: its phase, the phases entered, and its age."""
    return [Heartbeat(sent, *phase, f"rank {rank}") for rank, phase in enumerate(phases)]


def judge_of(**changes: Any) -> HangDetector:
    clock = PhaseClock()
    clock.num_steps = 60
    return HangDetector(small_run(**changes).parallel, clock)


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([(Phase.UPDATE, 9, 40.0), (Phase.FORWARD, 8, 31.0)], "rank 1 has made no progress for 31 s"),
        ([(Phase.UPDATE, 9, 40.0), (Phase.FORWARD, 8, 29.0)], ""),  # the one that is behind has time left
        ([(Phase.UPDATE, 9, 40.0), (Phase.READING, 8, 40.0)], ""),  # data may take longer
        ([(Phase.SAVE, 9, 900.0), (Phase.SAVE, 9, 900.0)], ""),
        # Sooner than a collective fails.
        ([(Phase.SAVE, 9, 1700.0), (Phase.SAVE, 9, 1.0)], "rank 0 has made no progress for 1700 s"),
        (
            [(Phase.REDUCTION, 9, 31.0)] * 2,
            "; ".join(f"rank {n} has made no progress for 31 s" for n in (0, 1)),
        ),
        ([(Phase.DONE, 5, 99.0), (Phase.DONE, 5, 99.0)], ""),
        # No rank waits, but nothing gets done either.
        ([(Phase.SAVE, 9, 1700.0)], "rank 0 has made no progress for 1700 s"),
        ([(Phase.SETUP, 0, 9000.0), (Phase.READING, 1, 9000.0)], ""),  # it prepares data
        ([(Phase.END, 9, 9000.0), (Phase.DONE, 5, 99.0)], ""),
    ],
)
def test_the_rank_that_is_behind_for_too_long_is_named(phases: list, expected: str) -> None:
    assert judge_of(hang_timeout=30).find(beats(phases), 0.0) == expected


def test_automatic_limit_is_twenty_steps_and_at_least_five_minutes() -> None:
    clock = PhaseClock()
    judge = HangDetector(small_run().parallel, clock)
    clock.end_step(1000.0)  # the first step, in which kernels are tuned
    clock.end_step(2.0)
    assert judge.step_s() == 300.0
    clock.end_step(40.0)
    clock.end_step(2.0)
    assert judge.step_s() == 800.0
    clock.end_step(400.0)  # a machine that stood still
    assert judge.step_s() == 0.9 * 30 * 60  # sooner than a collective fails


@pytest.mark.parametrize(
    ("silent", "limit_s"), [(Phase.FORWARD, 30), (Phase.SETUP, 0.9 * 30 * 60), (Phase.END, 0.9 * 30 * 60)]
)
def test_silence_may_be_longer_in_set_up_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, silent: Phase, limit_s: float
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    judge = judge_of(hang_timeout=30)
    said = beats([(silent, 9, 0.0), (silent, 9, 0.0)])
    while not (found := judge.find([said[0], said[1]._replace(sent=now)], 0.0)):
        now += 5
    assert limit_s < now - 1000 <= limit_s + 10 and found.startswith("rank 0 has shown no sign of life")
    assert not judge.find([said[0], said[1]._replace(sent=now)], now), "this process stood still meanwhile"
