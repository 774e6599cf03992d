"""The file that names the checkpoint with the lowest validation loss, beside real checkpoint folders."""

import logging
import math
from pathlib import Path

import pytest
from full_disk import disk_full_after

from patch.errors import CheckpointError
from patch.training.best_checkpoint import BestCheckpoint
from patch.training.metrics import MetricsLog


def checkpoint(output: Path, iteration: int) -> None:
    folder = output / "checkpoint" / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    for name in (".metadata", "common.pt", "metadata.json"):
        (folder / name).touch()


def marked(output: Path) -> str | None:
    file = output / "checkpoint" / "best_checkpointed_iteration.txt"
    return file.read_text() if file.exists() else None


def run(
    output: Path, start: int, losses: dict[int, float], saves: list[int], stops_at: int = 0, tokens: int = 9
) -> list:
    """The file after each evaluation and save; at `stops_at` the checkpoint is saved first."""
    log = MetricsLog(output, start)
    best = BestCheckpoint(output, start)
    seen = [marked(output)]
    for iteration in range(start + 1, max([*losses, *saves]) + 1):
        evaluates, is_saved = iteration in losses, iteration in saves
        for what in ("save", "evaluate") if iteration == stops_at else ("evaluate", "save"):
            if what == "evaluate" and evaluates:
                record = {"iteration": iteration, "valid_loss": losses[iteration], "valid_tokens": tokens}
                log.on_evaluate(record)
                best.on_evaluate(record)
            if what == "save" and is_saved:
                checkpoint(output, iteration)
                best.on_save(iteration)
        seen.append(marked(output))
    log.close()
    return seen


def test_checkpoint_with_the_lowest_loss_is_named_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        seen = run(tmp_path, 0, {1: 0.5, 2: 3.0, 4: 2.0, 5: 2.5, 6: 2.0}, [2, 4, 5, 6])
    assert seen == [None, None, "2\n", "2\n", "4\n", "4\n", "4\n"]
    assert "the checkpoint of step 4 is the best so far: validation loss 2.0000" in caplog.text


def test_checkpoint_without_an_evaluation_and_one_that_is_not_finite_do_not_count(tmp_path: Path) -> None:
    assert run(tmp_path, 0, {2: math.nan, 3: 1.0, 5: 9.0}, [2, 4, 5])[1:] == [None, None, None, None, "5\n"]


def test_checkpoint_that_was_saved_before_its_evaluation_counts(tmp_path: Path) -> None:
    assert run(tmp_path, 0, {3: 1.0}, [3], stops_at=3)[-1] == "3\n"


def test_mark_survives_a_resume_and_only_a_lower_loss_moves_it(tmp_path: Path) -> None:
    run(tmp_path, 0, {2: 1.5, 4: 2.0}, [2, 4])
    assert run(tmp_path, 4, {6: 1.7, 8: 1.4}, [6, 8]) == ["2\n", "2\n", "2\n", "2\n", "8\n"]


def test_resume_from_an_older_checkpoint_forgets_the_later_ones(tmp_path: Path) -> None:
    """The newest checkpoint is damaged: the steps after the older one are trained again."""
    run(tmp_path, 0, {2: 1.5, 4: 1.0}, [2, 4])
    assert marked(tmp_path) == "4\n"
    (tmp_path / "checkpoint" / "iter_0000004" / ".metadata").unlink()
    log = MetricsLog(tmp_path, 2)
    BestCheckpoint(tmp_path, 2)
    log.close()
    assert marked(tmp_path) == "2\n"
    log = MetricsLog(tmp_path, 0)
    BestCheckpoint(tmp_path, 0)
    log.close()
    assert marked(tmp_path) is None


def test_mark_that_cannot_be_written_is_a_checkpoint_error(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    best = BestCheckpoint(tmp_path, 0)
    best.on_evaluate({"iteration": 1, "valid_loss": 1.0})
    written = "best_checkpointed_iteration.txt was not written: .*File too large"
    with disk_full_after(1), pytest.raises(CheckpointError, match=written):
        best.on_save(1)


def test_losses_of_another_validation_set_are_not_compared(tmp_path: Path) -> None:
    assert run(tmp_path, 0, {1: 2.0, 2: 1.0}, [1, 2])[-1] == "2\n"
    assert run(tmp_path, 2, {3: 6.0, 4: 5.0}, [3, 4], tokens=7) == ["2\n", "3\n", "4\n"]
    assert run(tmp_path, 4, {5: 5.5}, [5], tokens=7) == ["4\n", "4\n"]
