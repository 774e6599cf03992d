"""The data of a run that is resumed: in an epoch, in larger batches, changed, elsewhere; and waits for it.

That losses depend neither on micro-batches nor on replicas: test_covered_layouts.py. The order of samples:
tests/unit/data/test_order.py and test_prefetch.py.
"""

import json
import shutil
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
from training_runs import CPU, Records

from patch import compat
from patch.config.schema import RunConfig
from patch.data import Batch
from patch.distributed.groups import initialize
from patch.errors import ConfigError
from patch.preflight.resume_guard import resume_notes
from patch.storage.names import TRACKER, all_iterations, iteration_name
from patch.training.guards.phases import PhaseClock
from patch.training.hooks.hook import Record
from patch.training.setup import build_run
from patch.training.trainer import Trainer
from patch.training.worker import run

pytestmark = pytest.mark.long


class Noting:
    """A reader that writes down the samples that it gives."""

    def __init__(self, reader: Any) -> None:
        self._reader, self.given = reader, list[list[int]]()

    def step(self, iteration: int) -> list[Batch]:
        batches = self._reader.step(iteration)
        self.given += [row.tolist() for batch in batches for row in batch.tokens]
        return batches


def config_of(folder: Path, output: str, **changes: Any) -> RunConfig:
    return small_run(
        vocab_size=400, output_path=str(folder / output), cache_dir=str(folder / "cache"),
        **{
            "tokenizer_name_or_path": str(folder / "tokenizer"), "columns": "instruction=asked,output=said",
            "train_data_path": str(folder / "first.json"), "save_interval": 1, "lr_warmup_iters": 0,
        } | changes,
    )  # fmt: skip


def train(config: RunConfig) -> tuple[list[Record], list]:
    """The records of the steps, and their samples."""
    compat.apply(cuda=False)
    this_run, hook = build_run(config, CPU, initialize(config, CPU), PhaseClock()), Records()
    this_run.data.train_reader = reader = Noting(this_run.data.train_reader)
    assert Trainer(this_run, [hook]).train() == 0
    new_job()
    return hook.records, reader.given


def go_back(config: RunConfig, step: int) -> None:
    """Remove the checkpoints of later steps."""
    root = Path(config.checkpoint.output_path) / "checkpoint"
    for iteration in all_iterations(root):
        if iteration > step:
            shutil.rmtree(root / iteration_name(iteration))
    (root / TRACKER).write_text(f"{step}\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and sets of 11 and 5 rows."""
    folder = tmp_path_factory.mktemp("rows")
    build_tiny_tokenizer(folder / "tokenizer")
    for name, size in (("first", 11), ("second", 5)):
        rows = [{"asked": f"question {i} of {name}", "said": "answer " * (i % 4 + 1)} for i in range(size)]
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return folder


def resume_in_an_epoch(rank: int, world_size: int, folder: Path) -> list[tuple[list[Record], list]]:
    """16 rows twice, in batches of 8: straight through, and again from the checkpoint of step 1."""
    spec = f"{folder / 'first.json'} {folder / 'second.json'}"
    config = config_of(
        folder, "resumed", train_data_path=spec, train_iters=0, train_epochs=2.0, global_batch_size=8,
        lr_warmup_iters=2,
    )  # fmt: skip
    whole = train(config)
    go_back(config, 1)
    return [whole, train(config)]


def test_run_of_epochs_resumed_in_one_goes_on_with_the_same_samples_and_bits(folder: Path) -> None:
    """Epochs decide the steps of the loop and of the schedule."""
    (((whole, order), (resumed, resumed_order)),) = run_distributed(resume_in_an_epoch, 1, folder)
    assert len(whole) == 4 and whole[-1]["lr"] == pytest.approx(1e-4), "the cosine ends with the run"
    losses, resumed_losses = ([record["loss"] for record in records] for records in (whole, resumed))
    assert resumed_losses == losses[1:] and resumed_order == order[8:]


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
        samples.append(given)
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


def run_whole(rank: int, world_size: int, config: RunConfig) -> list[str]:
    """As launcher and worker do: the notes of the resume."""
    notes = resume_notes(config)
    run(config)
    return notes


def refusal(rank: int, world_size: int, config: RunConfig) -> str:
    assert resume_notes(config), "the launcher sees no data that has changed, only another length"
    with pytest.raises(ConfigError) as caught:
        run(config)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture(scope="module")
def begun(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    begun = Path(shutil.copytree(folder, tmp_path_factory.mktemp("begun") / "run"))
    run_distributed(run_whole, 1, config_of(begun, "out", train_iters=1))
    return begun


@pytest.fixture
def copied(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "run"))


def test_tokens_that_changed_are_refused_by_the_worker(copied: Path) -> None:
    """The template writes another begin-of-text token: neither its text nor tokenizer.json has changed."""
    file = copied / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": "<|step_id|>"}))
    (message,) = run_distributed(refusal, 1, config_of(copied, "out", train_iters=2))
    assert f"{copied / 'first.json'}: its tokens are not those with which the run in" in message
    assert "what has changed: the tokenizer; expected the same samples" in message
    assert "this folder as position 22" in message


def test_equal_content_elsewhere_and_in_other_words_is_resumed(copied: Path) -> None:
    for name in ("tokenizer", "first.json", "cache"):
        (copied / name).rename(copied / f"moved {name}")
    changes = {
        "tokenizer_name_or_path": str(copied / "moved tokenizer"),
        "train_data_path": str(copied / "moved first.json"),
        "chat_template": "llama3",  # the default has chosen it
        "columns": "output=said, instruction=asked",
    }
    (notes,) = run_distributed(run_whole, 1, config_of(copied, "out", train_iters=2, **changes))
    assert {note.split(" ")[0] for note in notes} >= {"--chat-template:", "--columns:", "--train-data-path"}
    lines = (copied / "out" / "log" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2]
