"""Short runs on a GPU through the shell: every sharding level and 16-bit type, resume, export and import.

`make gpu-check` runs them; without CUDA they skip themselves. On two GPUs or more NCCL runs with two ranks.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from end_to_end.conftest import Office
from end_to_end.shell import assert_same_weights, call, command, cut_back, losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 3
LEVELS = ("none", "optimizer", "gradients")
# One model in bf16 under three optimizers' layouts of the same arithmetic.
LEVEL_TOLERANCE = 0.02


def train(office: Office, output: Path, *flags: str, ranks: int = 1, **changes: object) -> str:
    """Three deterministic steps with a checkpoint after each, and an export; the run's messages."""
    steps = {"TRAIN_TOKENS_OR_ITERS": STEPS, "WARMUP_TOKENS_OR_ITERS": 1, "SAVE_INTERVAL": 1}
    paths = {**office.positions(output), "VALID_DATASET_PATH": "none"}
    arguments = [*command(**{**paths, **steps, **changes}), "--deterministic-mode", "--export-hf", *flags]
    result = call(
        arguments,
        NPROC_PER_NODE=ranks,
        CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))),
        TOKENIZER_PATH=office.model,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


def train_and_resume(office: Office, output: Path, *flags: str, ranks: int = 1, **changes: object) -> None:
    """A run, and the same one resumed after its first step: the same losses and weights to the bit."""
    train(office, output, *flags, ranks=ranks, **changes)
    first = losses(output)
    assert len(first) == STEPS and first[-1] < first[0]
    (output / "hf").rename(output / "hf_first")
    cut_back(output, 1)
    assert "resumed after step 1" in train(office, output, *flags, ranks=ranks, **changes)
    assert losses(output) == first
    assert_same_weights(output / "hf", output / "hf_first")


@pytest.fixture(scope="module")
def by_level(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """One bf16 run of each sharding level."""
    folder = tmp_path_factory.mktemp("levels")
    for level in LEVELS:
        train(office, folder / level, "--data-parallel-sharding", level, PR="bf16")
    yield {level: folder / level for level in LEVELS}


def test_sharding_levels_learn_alike(by_level: dict[str, Path]) -> None:
    expected = losses(by_level["none"])
    for output in by_level.values():
        assert losses(output) == pytest.approx(expected, abs=LEVEL_TOLERANCE)


def test_export_of_one_run_is_where_the_next_begins(office: Office, by_level: dict[str, Path]) -> None:
    output = by_level["none"]
    train(office, output / "on", PR="bf16", PRETRAIN_CHECKPOINT_PATH=output / "hf")
    train(office, output / "own", PR="bf16", PRETRAIN_CHECKPOINT_PATH=output)
    assert losses(output / "on") == losses(output / "own")
    assert losses(output / "on")[0] < losses(output)[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resume_repeats_the_run_to_the_bit(office: Office, tmp_path: Path, precision: str) -> None:
    scale = ["--initial-loss-scale", "1024"] if precision == "fp16" else []
    train_and_resume(office, tmp_path / "out", "--data-parallel-sharding", "gradients", *scale, PR=precision)


@pytest.mark.parametrize("level", LEVELS[:2])
def test_fp16_trains_at_the_other_levels(office: Office, tmp_path: Path, level: str) -> None:
    train(office, tmp_path / "out", "--data-parallel-sharding", level, PR="fp16")
    assert len(losses(tmp_path / "out")) == STEPS


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "layout", [{"TP": 2}, {"PP": 2}, {"DO": "true"}], ids=["tensor", "pipeline", "sharded-replicas"]
)
def test_two_ranks_over_nccl_resume_to_the_bit(
    office: Office, tmp_path: Path, layout: dict[str, object]
) -> None:
    train_and_resume(office, tmp_path / "out", ranks=2, PR="bf16", **layout)
