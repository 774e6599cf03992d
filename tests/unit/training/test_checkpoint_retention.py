"""Which checkpoints a run leaves and marks as the best, and what its last one is good for."""

import dataclasses
import logging
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from distributed_runner import new_job, run_distributed
from full_disk import disk_full_after
from small_runs import small_run
from torch.distributed.checkpoint import FileSystemReader
from training_runs import build_seeded_run

from patch.checkpoint import save_checkpoint
from patch.config.fields import with_values
from patch.config.schema import RunConfig
from patch.errors import CheckpointError
from patch.storage.names import COMMON_KEY, METRICS_FILE, all_iterations, iteration_name
from patch.training.hooks import checkpoint_retention
from patch.training.hooks.checkpoint_retention import LOWEST_LOSS, CheckpointRetention, Measure, Retention
from patch.training.hooks.metrics import MetricsLog
from patch.training.run_state import find_progress, load_weights, resume
from patch.training.setup import Run
from patch.training.trainer import Trainer
from patch.training.worker import build_hooks

SCORE = Measure("tasks/cmmlu/acc", is_higher_better=True)


def kept(output: Path, start: int, **changes: Any) -> CheckpointRetention:
    """The hook of a run in this folder."""
    root = output / "checkpoint"
    places = {"root": root, "retention": Retention()} | changes
    return CheckpointRetention(output / METRICS_FILE, start_iteration=start, **places)


def marks(output: Path, part: "Part") -> list[str]:
    """The mark at the start and after each step; at `stops_at` a step is evaluated after its save."""
    start, losses, saves, _, stops_at, tokens, measure = part
    log, hook = MetricsLog(output, start), kept(output, start, measure=measure)
    best, seen = output / "checkpoint" / "best_checkpointed_iteration.txt", list[str]()
    seen.append(best.read_text().strip() if best.exists() else "")
    for iteration in range(start + 1, max([start, *losses, *saves]) + 1):
        for what in ("save", "evaluate") if iteration == stops_at else ("evaluate", "save"):
            if what == "evaluate" and iteration in losses:
                record = {"iteration": iteration, measure.key: losses[iteration], "valid_tokens": tokens}
                log.on_evaluate(record)
                hook.on_evaluate(record)
            if what == "save" and iteration in saves:
                save_checkpoint(output / "checkpoint", iteration, {"model": {}}, {"iteration": iteration})
                hook.on_save(iteration)
        seen.append(best.read_text().strip() if best.exists() else "")
    log.close()
    return seen


def weights_of(run: Run) -> list[torch.Tensor]:
    run.optimizer.finish_param_sync()
    return [parameter.detach().clone() for stage in run.stages for parameter in stage.parameters()]


def train_and_return(rank: int, world_size: int, config: RunConfig) -> tuple[str, int | None, list[bool]]:
    """Train; then: why no longer run can resume, what a run without further steps resumes, equal weights."""
    root = Path(config.checkpoint.output_path) / "checkpoint"
    run = build_seeded_run(config)
    assert Trainer(run, build_hooks(run)).train() == 0
    trained = weights_of(run)
    new_job()
    run = build_seeded_run(config)
    progress = find_progress(root)
    longer = with_values(config, train_iters=config.training.train_iters + 1)
    with pytest.raises(CheckpointError) as refused:
        resume(dataclasses.replace(run, config=longer), root, progress)
    resume(run, root, progress)
    equal = [all(map(torch.equal, weights_of(run), trained))]
    new_job()
    run = build_seeded_run(config)
    load_weights(run, config.checkpoint.output_path)
    run.optimizer.reload_model_params()
    equal.append(all(map(torch.equal, weights_of(run), trained)))
    return str(refused.value), progress.iteration, equal


@pytest.mark.long
def test_run_keeps_what_it_was_told_to_and_its_last_weights(tmp_path: Path) -> None:
    config = small_run(
        train_iters=5, save_interval=1, eval_interval=1, save_retain_last=1, save_retain_every=3,
        save_weights_only_at_end=True, precision="bf16", output_path=str(tmp_path),
    )  # fmt: skip
    ((said, resumed, equal),) = run_distributed(train_and_return, 1, config)
    root = tmp_path / "checkpoint"
    best = int((root / "best_checkpointed_iteration.txt").read_text())
    left = {path.name for path in root.iterdir() if path.is_dir() and not path.is_symlink()}
    assert left == {iteration_name(iteration) for iteration in {3, 4, 5, best}}, "4 can be resumed"
    assert os.readlink(root / "last") == iteration_name(5)
    assert os.readlink(root / "best") == iteration_name(best)
    weights, full = (
        {key.split(".")[0] for key in FileSystemReader(folder).read_metadata().state_dict_metadata}
        - {COMMON_KEY}
        for folder in (root / iteration_name(5), root / iteration_name(4))
    )
    assert weights == {"decoder", "embedding", "output_layer"} and full - weights == {"optimizer", "random"}
    assert "iter_0000005 is the end of a run with --save-weights-only-at-end" in said
    assert resumed == 5 and equal == [True, True]


@pytest.mark.timeout(100)
def test_deletion_that_hangs_holds_up_neither_a_save_nor_the_end(
    one_process, tmp_path: Path, monkeypatch, caplog
) -> None:
    """As on a file server that is gone."""
    for iteration in (1, 2):
        save_checkpoint(tmp_path, iteration, {"model": {}}, {"iteration": iteration})
    monkeypatch.setattr(checkpoint_retention, "CLOSE_S", 0.2)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: time.sleep(600))
    (tmp_path / ".removed_iter_0000009").mkdir()
    with caplog.at_level(logging.WARNING):
        hook = kept(tmp_path, 0, root=tmp_path, retention=Retention(last=1))
        hook.on_save(2)
        hook.close()
    assert "still being deleted after 0 s" in caplog.text
    assert not (tmp_path / iteration_name(1)).exists() and (tmp_path / iteration_name(2)).exists()


def test_run_that_went_back_counts_its_own_checkpoints(one_process, tmp_path: Path) -> None:
    """3 has a wrong byte, which a look at lengths does not show: 2 stays until 5 is there besides 4."""
    left = []
    for iteration in range(1, 6):
        save_checkpoint(tmp_path, iteration, {"model": {}}, {"iteration": iteration})
        if iteration == 3:
            hook = kept(tmp_path, 2, root=tmp_path, retention=Retention(last=2))
        if iteration > 3:
            hook.on_save(iteration)
            hook.close()
            left.append(sorted(all_iterations(tmp_path)))
    assert left == [[2, 4], [4, 5]]


def test_folder_without_links_is_said_once(tmp_path: Path, monkeypatch, caplog) -> None:
    """As exFAT and some object stores answer."""

    def symlink(*args: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", symlink)
    (tmp_path / iteration_name(1)).mkdir()
    (tmp_path / ".removed_iter_0000009").mkdir()
    with caplog.at_level(logging.WARNING):
        hook = kept(tmp_path, 1, root=tmp_path)
        hook.on_save(1)
        hook.close()
    (record,) = caplog.records
    assert "gets no links last and best (Operation not permitted)" in record.getMessage()
    assert [path.name for path in tmp_path.iterdir()] == [iteration_name(1)]


class Part(NamedTuple):
    """A part of a run, from a start to its next one, and the marks that it makes; see `marks`."""

    start: int
    losses: dict[int, float]
    saves: list[int]
    expected: list[str]
    stops_at: int = 0
    tokens: int = 9
    measure: Measure = LOWEST_LOSS


TWO_SAVES = Part(0, {2: 1.5, 4: 2.0}, [2, 4], ["", "", "2", "2", "2"])


@pytest.mark.parametrize(
    "parts",
    [
        [Part(0, {1: 0.5, 2: 3.0, 4: 2.0, 5: 2.5, 6: 2.0}, [2, 4, 5, 6], ["", "", "2", "2", "4", "4", "4"])],
        [Part(0, {2: math.nan, 3: 1.0, 5: 9.0}, [2, 4, 5], ["", "", "", "", "", "5"])],
        [Part(0, {3: 1.0}, [3], ["", "", "", "3"], stops_at=3)],
        [TWO_SAVES, Part(4, {6: 1.7, 8: 1.4}, [6, 8], ["2", "2", "2", "2", "8"])],
        [
            TWO_SAVES,
            Part(4, {6: 1.4}, [6], ["2", "2", "6"]),
            Part(4, {6: 0.1}, [], ["2", "2", "2"]),  # and not saved again yet
            Part(0, {}, [], [""]),
        ],
        [
            Part(0, {1: 2.0, 2: 1.0}, [1, 2], ["", "1", "2"]),
            Part(2, {3: 6.0, 4: 5.0}, [3, 4], ["2", "3", "4"], tokens=7),
            Part(4, {5: 5.5}, [5], ["4", "4"], tokens=7),
        ],
        [
            Part(0, {1: 0.2, 2: 0.4, 3: 0.3}, [1, 2, 3], ["", "1", "2", "2"], measure=SCORE),
            Part(3, {4: 0.3, 5: 0.5}, [4, 5], ["2", "2", "5"], tokens=7, measure=SCORE),
        ],
    ],
    ids=["lowest", "not evaluated or not finite", "saved first", "resumed", "gone back", "new set", "score"],
)
def test_mark_is_the_checkpoint_with_the_lowest_loss_that_can_be_compared(
    one_process: None, tmp_path: Path, parts: list[Part]
) -> None:
    for part in parts:
        assert marks(tmp_path, part) == part.expected


def test_mark_that_cannot_be_written_is_a_checkpoint_error(one_process: None, tmp_path: Path) -> None:
    marks(tmp_path, Part(0, {}, [1], []))
    hook = kept(tmp_path, 1)
    written = "best_checkpointed_iteration.txt was not written: .*File too large"
    with disk_full_after(1), pytest.raises(CheckpointError, match=written):
        hook.on_evaluate({"iteration": 1, "valid_loss": 1.0})
