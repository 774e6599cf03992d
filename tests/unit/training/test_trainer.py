"""What hangs on the loop: hooks of every rank are called at the same steps, and may hold collectives."""

import os
import signal
import threading
from pathlib import Path

import torch.distributed as dist
from distributed_runner import run_distributed
from small_runs import small_run
from training_runs import build_seeded_run

from patch.config.schema import RunConfig
from patch.training.hooks import Record, TrainerHook
from patch.training.trainer import Trainer


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
        self._notes.append(f"log {record['iteration']}")

    def on_evaluate(self, record: Record) -> None:
        assert sorted(record) == ["iteration", "valid_loss", "valid_ppl", "valid_tokens"]
        self._notes.append(f"evaluate {record['iteration']}")

    def on_save(self, iteration: int) -> None:
        self._notes.append(f"save {iteration}")

    def close(self) -> None:
        self._notes.append("close")


class LossesOfAllRanks(TrainerHook):
    """Needs a collective, so every rank has one."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_evaluate(self, record: Record) -> None:
        losses = [0.0] * dist.get_world_size()
        dist.all_gather_object(losses, record["valid_loss"])
        self.seen.append(losses)


def train(rank: int, world_size: int, config: RunConfig) -> tuple[list[str], list[list[float]], list[str]]:
    """What the hooks of this rank saw; rank 0 has one more, and the last one is called after it."""
    notes: list[str] = []
    collective = LossesOfAllRanks()
    hooks = [collective, Notes(notes)] if rank == 0 else [collective]
    assert Trainer(build_seeded_run(config), hooks).train() == 0
    saved = Path(config.checkpoint.output_path) / "checkpoint"
    return notes, collective.seen, sorted(path.name for path in saved.iterdir())


def test_hooks_are_called_in_order_after_what_they_are_named_for(tmp_path: Path) -> None:
    config = small_run(
        dp=2, train_iters=4, log_interval=2, eval_interval=2, save_interval=3, output_path=str(tmp_path),
        async_save=False,
    )  # fmt: skip
    (notes, losses, saved), (no_notes, same_losses, _) = run_distributed(train, 2, config)
    assert notes == [
        *["step 1", "step 2", "log 2", "evaluate 2", "step 3", "evaluate 3", "save 3"],
        *["step 4", "log 4", "evaluate 4", "save 4", "close"],
    ]
    assert no_notes == []
    assert losses == same_losses and len(losses) == 3
    assert all(first == second > 0 for first, second in losses)
    assert saved == ["iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt"]


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
