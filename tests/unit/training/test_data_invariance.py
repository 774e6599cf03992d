"""A run's losses and the order of its samples do not depend on how its data is read.

One run through `build_run` and `Trainer`, on a blend of two sets of rows that goes through several epochs of
both: micro-batches of 1, 2 and 4, one process and two, with and without background reading, straight through
and resumed in the middle of an epoch.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import new_job, run_distributed
from llama3_tokenizer import build_tiny_tokenizer
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from small_runs import small_run
from training_runs import CPU, Records, SeededReader, build_seeded_run

from patch import compat
from patch.config.schema import RunConfig
from patch.data import Batch
from patch.distributed.groups import initialize
from patch.storage.names import TRACKER, all_iterations, iteration_name
from patch.training.hooks import Record
from patch.training.setup import Run, build_run
from patch.training.trainer import Trainer

pytestmark = pytest.mark.long

BOUND = 2e-6
"""On losses near 5, in fp32: sums over micro-batches and ranks are made in another order. Seen: 4.4e-7."""
STEPS = 6
Case = tuple[str, int, int]
"""A name, samples of a micro-batch, steps that are read ahead."""
ALONE: list[Case] = [("1", 1, 2), ("2, no thread", 2, 0), ("2, far ahead", 2, 50)]
TOGETHER: list[Case] = [("dp 1", 1, 2), ("dp 1, no thread", 1, 0), ("dp 4", 4, 2)]


def losses_of(records: list[Record]) -> list[float]:
    return [record["loss"] for record in records]


class Noting:
    """A reader that writes down the samples that it gives."""

    def __init__(self, reader: Any) -> None:
        self._reader, self.given = reader, []

    def step(self, iteration: int) -> list[Batch]:
        batches = self._reader.step(iteration)
        self.given.append([[row.tolist() for row in batch.tokens] for batch in batches])
        return batches


def config_of(folder: Path, output: str, **changes: Any) -> RunConfig:
    return small_run(
        vocab_size=400, tokenizer_name_or_path=str(folder / "tokenizer"), output_path=str(folder / output),
        **{
            "train_data_path": f"0.6 {folder / 'first.json'} 0.4 {folder / 'second.json'}",
            "global_batch_size": 8, "train_iters": STEPS, "lr_warmup_iters": 2,
        } | changes,
    )  # fmt: skip


def build(config: RunConfig) -> Run:
    compat.apply(cuda=False)
    return build_run(config, CPU, initialize(config, CPU))


def train(config: RunConfig) -> tuple[list[Record], list]:
    """The records of the steps, and the samples of each of this rank's micro-batches."""
    run = build(config)
    hook = Records()
    run.train_reader = reader = Noting(run.train_reader)
    assert Trainer(run, [hook]).train() == 0
    new_job()
    return hook.records, reader.given


def go_back(config: RunConfig, step: int) -> None:
    """Remove the checkpoints of later steps."""
    root = Path(config.checkpoint.output_path) / "checkpoint"
    for iteration in all_iterations(root):
        if iteration > step:
            shutil.rmtree(root / iteration_name(iteration))
    (root / TRACKER).write_text(f"{step}\n")


def train_all(rank: int, world_size: int, folder: Path, cases: list[Case]) -> dict[str, tuple[list, list]]:
    found = {}
    for name, size, num_ahead in cases:
        config = config_of(
            folder, f"out of {name}", dp=world_size, micro_batch_size=size, data_prefetch=num_ahead
        )
        records, order = train(config)
        found[name] = losses_of(records), order
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and sets of 11 and 5 rows: 48 samples are 2.6 and 3.8 epochs of them."""
    folder = tmp_path_factory.mktemp("rows")
    build_tiny_tokenizer(folder / "tokenizer")
    for name, size in (("first", 11), ("second", 5)):
        rows = [
            {"instruction": f"question {i} of {name}", "output": "answer " * (i % 4 + 1)} for i in range(size)
        ]
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, tuple[list[float], list]]:
    """Losses, and the samples of each step in the order of the global batch."""
    (alone,) = run_distributed(train_all, 1, folder, ALONE)
    ranks = run_distributed(train_all, 2, folder, TOGETHER)
    found = {name: (losses, [sum(step, []) for step in given]) for name, (losses, given) in alone.items()}
    for name, _, _ in TOGETHER:
        both = [rank[name] for rank in ranks]
        assert both[0][0] == both[1][0], "all ranks report one loss"
        # Micro-batch m of rank r is number m * 2 + r.
        steps = zip(*(given for _, given in both), strict=True)
        order = [
            [row for pair in zip(*step, strict=True) for batch in pair for row in batch] for step in steps
        ]
        found[name] = (both[0][0], order)
    return found


@pytest.mark.parametrize("name", [name for name, _, _ in ALONE + TOGETHER])
def test_order_of_samples_is_the_same_to_the_bit_and_the_loss_within_the_bound(
    trained: dict[str, tuple[list[float], list]], name: str
) -> None:
    (losses, order), (expected, expected_order) = trained[name], trained["1"]
    assert order == expected_order
    assert len(losses) == STEPS and losses == pytest.approx(expected, abs=BOUND)
    assert expected[0] - expected[-1] > 0.5, "it learns"


@pytest.mark.parametrize(
    ("name", "other"), [("2, far ahead", "2, no thread"), ("dp 1", "dp 1, no thread")]
)
def test_background_reading_changes_no_bit_of_a_loss(
    trained: dict[str, tuple[list[float], list]], name: str, other: str
) -> None:
    assert trained[name][0] == trained[other][0]


def resume_in_an_epoch(rank: int, world_size: int, folder: Path) -> list[tuple[list[Record], list]]:
    """16 rows twice, in batches of 8: straight through, and again from the checkpoint of step 1."""
    spec = f"{folder / 'first.json'} {folder / 'second.json'}"
    changes = {"train_data_path": spec, "train_iters": 0, "train_epochs": 2.0, "save_interval": 1}
    config = config_of(folder, "resumed", **changes)
    whole = train(config)
    go_back(config, 1)
    return [whole, train(config)]


def test_run_of_epochs_resumed_in_one_goes_on_with_the_same_samples_and_bits(folder: Path) -> None:
    """Epochs decide the steps of the loop and of the schedule."""
    (((whole, order), (resumed, resumed_order)),) = run_distributed(resume_in_an_epoch, 1, folder)
    assert len(whole) == 4 and whole[-1]["lr"] == pytest.approx(1e-4), "the cosine ends with the run"
    assert losses_of(resumed) == losses_of(whole)[1:] and resumed_order == order[1:]


def change_the_batch(rank: int, world_size: int, folder: Path) -> tuple[list, list[list[Record]]]:
    """Pre-training on 40 samples: in batches of 4, and from step 4 on in batches of 8; samples, records."""
    builder = IndexedDatasetBuilder(f"{folder / 'text'}.bin", dtype=np.int32)
    for length in range(20, 60):
        builder.add_document(torch.arange(length) % 250, [length])
    builder.finalize(f"{folder / 'text'}.idx")
    parts = [
        {"global_batch_size": 4, "train_iters": 10, "lr_warmup_iters": 2},
        {"global_batch_size": 8, "train_iters": 5, "lr_warmup_iters": 1, "resume_with_changed_data": True},
    ]
    samples, records = [], []
    for part in parts:
        config = config_of(
            folder, "pretrained", sft=False, dataset_type="idxmap", train_data_path=str(folder / "text"),
            save_interval=4, **part,
        )  # fmt: skip
        found, given = train(config)
        samples.append([row for step in given for batch in step for row in batch])
        records.append(found)
        go_back(config, 4)
    return samples, records


def test_pretraining_in_larger_batches_goes_on_in_the_same_samples_and_learning_rates(folder: Path) -> None:
    """The rates are those of upstream's scheduler, to which Megatron-LM tells the samples of each step."""
    (((unbroken, resumed), records),) = run_distributed(change_the_batch, 1, folder)
    assert len(unbroken) == 40 and resumed == unbroken[16:]
    weight = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    upstream = OptimizerParamScheduler(
        weight, init_lr=0.0, max_lr=2e-3, min_lr=1e-4, lr_warmup_steps=8, lr_decay_steps=40,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=40, wd_incr_style="constant",
    )  # fmt: skip
    for record in records[0][:4] + records[1]:
        upstream.step(record["consumed_samples"] - upstream.num_steps)
        assert record["lr"] == pytest.approx(weight.param_groups[0]["lr"], rel=1e-12)
    assert [record["iteration"] for record in records[1]] == [5, 6, 7]


class Slow(SeededReader):
    """Reads for 80 ms a step."""

    def step(self, iteration: int) -> list[Batch]:
        time.sleep(0.08)
        return super().step(iteration)


def wait_for_data(rank: int, world_size: int, output: str) -> list[list[float]]:
    """data_wait_ms of steps without and with background reading, where each has 120 ms of other work."""
    found = []
    for num_ahead in (0, 2):
        run = build_seeded_run(small_run(train_iters=8, data_prefetch=num_ahead, output_path=output))
        run.train_reader, hook = Slow(run.config, 0), Records()
        hook.on_step = lambda iteration, seconds: time.sleep(0.12)  # type: ignore[method-assign]
        Trainer(run, [hook]).train()
        found.append([record["data_wait_ms"] for record in hook.records])
        new_job()
    return found


def test_metric_says_how_long_a_step_waited_for_its_data(tmp_path: Path) -> None:
    ((in_step, in_background),) = run_distributed(wait_for_data, 1, str(tmp_path))
    assert in_step[0] >= 160, "the first step waits for its own data and for that of the second"
    assert all(waited >= 80 for waited in in_step[1:-1]) and in_step[-1] == 0
    assert sorted(in_background[1:])[3] < 40, "the median"
