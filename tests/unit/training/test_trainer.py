"""What hangs on the loop: hooks of every rank are called at the same steps, and may hold collectives."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from small_runs import small_run
from training_runs import build_seeded_run

from patch.config.schema import RunConfig
from patch.training.guards.phases import Phase
from patch.training.hooks.hook import Record, TrainerHook
from patch.training.setup import Run
from patch.training.trainer import Trainer
from patch.training.worker import build_hooks

TASK_S = 1.5
"""Of a hook's evaluation. A step takes milliseconds."""


class Notes(TrainerHook):
    """Writes down what it is called for."""

    def __init__(self, notes: list[str], stop_at: int = 0) -> None:
        self._notes, self._stop_at = notes, stop_at

    def on_step(self, iteration: int, seconds: float) -> None:
        assert seconds > 0
        if iteration == self._stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        self._notes.append(f"step {iteration}")

    def on_log(self, record: Record) -> None:
        assert record["loss"] > 0 and record["step_time_ms"] > 0
        assert record["data_wait_ms"] > 0 or record["iteration"] > 2, "the first step waits for its data"
        self._notes.append(f"log {record['iteration']}")

    def on_evaluate(self, record: Record) -> None:
        of_sets = ["valid_loss", "valid_ppl", "valid_tokens"] if record["iteration"] % 2 == 0 else []
        assert sorted({*record} - {"accuracy"}) == ["iteration", *of_sets]
        self._notes.append(f"evaluate {record['iteration']}")

    def on_save(self, iteration: int) -> None:
        self._notes.append(f"save {iteration}")

    def close(self) -> None:
        self._notes.append("close")


class Tasks(TrainerHook):
    """Evaluates on one rank alone."""

    interval = 3

    def __init__(self, run: Run) -> None:
        self._run = run

    def evaluate(self, iteration: int) -> Record:
        is_training = any(stage.training for stage in self._run.stages) or torch.is_grad_enabled()
        assert self._run.phases.note.phase == Phase.EVALUATION and not is_training
        time.sleep(TASK_S)
        return {"accuracy": iteration / 10}


class LossesOfAllRanks(TrainerHook):
    """Needs a collective, so every rank has one."""

    def __init__(self) -> None:
        self.seen: list[list[float | None]] = []

    def on_step(self, iteration: int, seconds: float) -> None:
        assert seconds < TASK_S

    def on_evaluate(self, record: Record) -> None:
        losses: list[float | None] = [0.0] * dist.get_world_size()
        dist.all_gather_object(losses, record.get("valid_loss"))
        self.seen.append(losses)


def train(rank: int, world_size: int, config: RunConfig) -> tuple[list[str], list[list[float]], list[str]]:
    """What the hooks of this rank saw; rank 0 has one more, and the last one is called after it."""
    notes: list[str] = []
    collective, run = LossesOfAllRanks(), build_seeded_run(config)
    own = [Notes(notes), Tasks(run)] if rank == 0 else []
    assert Trainer(run, [collective, *build_hooks(run), *own]).train() == 0
    saved = Path(config.checkpoint.output_path) / "checkpoint"
    return notes, collective.seen, sorted(path.name for path in saved.iterdir())


def test_hooks_are_called_in_order_after_what_they_are_named_for(tmp_path: Path) -> None:
    config = small_run(
        dp=2, train_iters=4, log_interval=2, eval_interval=2, save_interval=2, output_path=str(tmp_path),
        async_save=False,
    )  # fmt: skip
    (notes, losses, saved), (no_notes, same_losses, _) = run_distributed(train, 2, config)
    assert notes == [
        *["step 1", "step 2", "log 2", "evaluate 2", "save 2", "step 3", "evaluate 3"],
        *["step 4", "log 4", "evaluate 4", "save 4", "close"],
    ]
    assert no_notes == []
    assert losses == same_losses and losses.pop(1) == [None, None]
    assert [first == second > 0 for first, second in losses] == [True, True]
    assert {"iter_0000002", "iter_0000004", "best_checkpointed_iteration.txt"} <= {*saved}
    lines = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").open()]
    assert [line.get("accuracy") for line in lines] == [None, None, 0.3, None, 0.4]
    assert "loss" not in lines[2] and "valid_loss" in lines[4]


def stop_by_signal(rank: int, world_size: int, output: str) -> tuple[int, list[str], list[str]]:
    """The exit code, what hooks saw, and the threads that are left."""
    notes: list[str] = []
    run = build_seeded_run(small_run(train_iters=9, eval_interval=2, log_interval=9, output_path=output))
    exit_code = Trainer(run, [Notes(notes, stop_at=2)]).train()
    return exit_code, notes, [thread.name for thread in threading.enumerate()]


def test_signal_saves_before_it_evaluates_and_ends_the_thread_that_reads(tmp_path: Path) -> None:
    ((exit_code, notes, threads),) = run_distributed(stop_by_signal, 1, str(tmp_path))
    assert exit_code == 128 + signal.SIGTERM
    assert notes == ["step 1", "step 2", "save 2", "evaluate 2", "close"]
    assert "read ahead" not in threads
