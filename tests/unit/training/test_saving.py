"""A run that saves in the background leaves the same bytes as one that waits, and says what it waited."""

import json
import math
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from distributed_runner import new_job, run_distributed
from safetensors.torch import load_file
from small_runs import HALF, small_run
from training_runs import build_seeded_run, digest_of, digests, messages_from, stored_tensors

from patch.checkpoint import host_copies, latest_iteration
from patch.compat.checkpoint_format import COMMON_IS_OBJECT
from patch.config.schema import RunConfig
from patch.data import Batch
from patch.training.hooks.hook import TrainerHook
from patch.training.saving import _have_room
from patch.training.setup import Run
from patch.training.step import train_step
from patch.training.trainer import Trainer
from patch.training.worker import build_hooks

STEPS, BF16 = 6, {"precision": "bf16"}
COPY_S = 0.1
"""Longer than a step: a step that does not wait for the copy changes the copied tensors."""


def slow_down_copies() -> None:
    reserve = host_copies.HostCopies._reserve

    def slow(copies: host_copies.HostCopies, number: int, num_bytes: int, *, is_pinned: bool) -> None:
        time.sleep(COPY_S)
        reserve(copies, number, num_bytes, is_pinned=is_pinned)

    host_copies.HostCopies._reserve = slow  # type: ignore[method-assign]


def keep_adapters(output: Path, iteration: int) -> None:
    """Copy the folder of PEFT when a checkpoint is complete."""
    shutil.copytree(output / "adapter", output / f"adapter-{iteration}")


def train(rank: int, world_size: int, configs: dict[str, RunConfig]) -> list[str]:
    """What the runs say about saving."""
    slow_down_copies()
    messages = messages_from("INFO", "patch.training.saving")
    for config in configs.values():
        run = build_seeded_run(config)
        hooks = build_hooks(run)
        if config.adapter.lora_rank and rank == 0:
            hooks.append(hook := TrainerHook())
            hook.on_save = partial(keep_adapters, Path(config.checkpoint.output_path))  # type: ignore
        assert Trainer(run, hooks).train() == 0
        new_job()
    free = psutil.virtual_memory().available
    assert _have_room(1) and not _have_room(free // 2)  # of two ranks on one host
    return messages


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    root = tmp_path_factory.mktemp("saving")
    changes = {
        "dp": 2, "data_parallel_sharding": "gradients", "precision": "bf16", "train_iters": STEPS,
        "save_interval": 2,
    }  # fmt: skip
    runs: dict[str, dict[str, Any]] = {
        "background": {}, "waiting": {"async_save": False}, "adapters": {"lora_rank": 3}
    }  # fmt: skip
    configs = {
        name: small_run(**{**changes, "async_save": True, "output_path": str(root / name), **own})
        for name, own in runs.items()
    }
    return root, run_distributed(train, 2, configs)


@pytest.mark.long
def test_background_changes_no_byte_and_metrics_tell_what_was_waited_for(runs) -> None:
    root, ways = runs[0], ("background", "waiting")
    for iteration in (2, 4, 6):
        folders = [root / name / "checkpoint" / f"iter_{iteration:07d}" for name in ways]
        names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
        assert names[0] == names[1] and len(names[0]) == 8 - COMMON_IS_OBJECT
        compared = 0
        for name in set(names[0]) - {"checksums.json", *[".metadata"] * COMMON_IS_OBJECT}:
            first, second = ((folder / name).read_bytes() for folder in folders)
            if b"save_interval: " not in first:  # of the configuration
                assert first == second, name
                compared += 1
        assert compared >= 4
    for name in ways:
        lines = (root / name / "log" / "metrics.jsonl").read_text().splitlines()
        records = [record for record in map(json.loads, lines) if "loss" in record]
        stalls = {record["iteration"]: record["save_stall_ms"] for record in records}
        assert stalls[1] == stalls[2] == 0 < min(stalls[3], stalls[5])
        written = [record["save_write_s"] for record in records]
        assert written[0] == 0 and sum(written) > 0


@pytest.mark.long
def test_folder_of_peft_has_the_adapters_of_its_checkpoint(runs) -> None:
    for iteration in (2, 4, 6):
        folder = runs[0] / "adapters"
        saved = stored_tensors(folder / "checkpoint" / f"iter_{iteration:07d}")
        layers = [layer for key, all in saved.items() if not key.startswith("optimizer.") for layer in all]
        kept = load_file(folder / f"adapter-{iteration}" / "adapter_model.safetensors").values()
        assert sorted(digest_of([one]) for one in kept) == sorted(digest_of([one]) for one in layers)


@pytest.mark.long
def test_choice_and_lack_of_memory_are_said(runs) -> None:
    for first, second, room, lack in runs[1]:
        for said in (first, second):
            assert "written in the background, from copies of" in said
        assert room.startswith("checkpoints are written in the background")
        assert "training waits while checkpoints are written: copies of the states on" in lack


def changes_around(rank: int, world_size: int, configs: list[RunConfig]) -> list[tuple[set, tuple, tuple]]:
    """Of each run's second step: weights and states when it announced a change, before and after."""
    found = []
    for config in configs:
        run = build_seeded_run(config)
        train_step(run, 0)
        before, announced = digests(run), set()
        train_step(run, 1, partial(_add, announced, run))
        found.append((announced, before, digests(run)))
        new_job()
    return found


def _add(announced: set, run: Run) -> None:
    announced.add(digests(run) if not announced else next(iter(announced)))


def test_nothing_changes_before_it_is_announced() -> None:
    """So a copy that is waited for then has the bits of one step."""
    offloaded = HALF | {"clip_grad": 0.0}
    configs = [small_run(**own) for own in (BF16, {"clip_grad": 0.0}, BF16 | offloaded)]
    ((*runs,),) = run_distributed(changes_around, 1, configs)
    for announced, before, after in runs:
        assert announced == {before} and before[0] != after[0] and before[1] != after[1]


def lose_data(run: Run, bad_step: int) -> None:
    """The data of a step cannot be read."""
    read = run.data.train_reader.step

    def step(iteration: int) -> list[Batch]:
        if iteration + 1 == bad_step:
            raise OSError("the disk is gone")
        return read(iteration)

    run.data.train_reader.step = step  # type: ignore[method-assign]


class FailingHook(TrainerHook):
    def on_step(self, iteration: int, seconds: float) -> None:
        if iteration == 3:
            raise RuntimeError("of this rank alone")


def spoil(run: Run, rank: int, spoiled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the losses of step 3 of one rank."""
    count = iter(range(100))
    of_step = run.config.num_micro_batches
    own_rank = run.groups.dp.rank()
    run.stages[0].register_forward_hook(
        lambda *_: spoiled(_[2]) if next(count) // of_step == 2 and own_rank == rank else None
    )


FAULTS: dict[str, Callable[[Run, int], None]] = {
    "gradients": lambda run, rank: spoil(run, 1, lambda loss: loss * math.nan),
    "loss": lambda run, rank: spoil(run, 0, lambda loss: loss + torch.full((), math.inf)),
    "data": lambda run, rank: lose_data(run, 4) if rank else None,
    "first data": lambda run, rank: lose_data(run, 1) if rank else None,
    "one rank": lambda run, rank: None,
}
"""Each but the first data ends step 3, while the checkpoint of step 2 is not complete."""


def end_with_errors(rank: int, world_size: int, folder: str, faults: list[str]) -> dict[str, tuple]:
    """The error of each run, and its newest checkpoint."""
    slow_down_copies()
    found = {}
    for name in faults:
        config = small_run(
            dp=2, train_iters=STEPS, save_interval=2, output_path=f"{folder}/{name}", num_layers=1,
            async_save=True,
        )  # fmt: skip
        run = build_seeded_run(config)
        run.data.valid_readers = {}
        FAULTS[name](run, rank)
        with pytest.raises(Exception) as raised:
            Trainer(run, [FailingHook()] if name == "one rank" else []).train()
        new_job()
        newest = latest_iteration(Path(config.checkpoint.output_path) / "checkpoint")
        found[name] = str(raised.value), newest
    return found


def test_error_of_all_ranks_loses_no_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    """An error of one rank does, because completing a checkpoint takes all of them."""
    first, second = run_distributed(end_with_errors, 2, str(tmp_path), list(FAULTS))
    saved = [{name: iteration for name, (_, iteration) in found.items()} for found in (first, second)]
    assert saved[0] == saved[1] == {
        "gradients": 2, "loss": 2, "data": 2, "first data": None, "one rank": None
    }  # fmt: skip
    assert "step 3: gradient norm nan" in first["gradients"][0] and "step 3: loss " in first["loss"][0]
    assert "another rank cannot read the data of step 4" in first["data"][0]
    assert "another rank cannot read the data of step 1" in first["first data"][0]
    assert second["data"][0] == second["first data"][0] == "the disk is gone"
