"""A run whose ranks share each sequence is the run of one process, on disk too, and goes on without CP.

The tests of this file build on one run.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from end_to_end.conftest import Office
from end_to_end.shell import assert_same_weights, call_workers, command, cut_back, losses

from toolkits.convert import main as convert

STEPS, SAVED = 4, 2
BOUND = 5e-6
DECIDED = ("iteration", "consumed_samples", "consumed_tokens", "skipped", "lr", "valid_tokens")
"""Metrics that are the same in every layout."""


class Runs(NamedTuple):
    """The command but for CP, and the output folders of one process and of two that share sequences."""

    positions: dict[str, object]
    alone: Path
    shared: Path


def train(positions: dict[str, object], cp_size: int, output: Path) -> str:
    """Packed SFT with evaluation; standard error."""
    arguments = command(**positions, CP=cp_size, OUTPUT_BASEPATH=output)
    done = call_workers(cp_size, [*arguments, "--export-hf"], MP_SFT_PACKING="true", NPROC_PER_NODE=cp_size)
    assert done.returncode == 0, done.stderr
    return done.stderr


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("context")
    positions: dict[str, object] = {
        **office.positions(folder), "PAD_LEN": 64, "DO": "true", "SAVE_INTERVAL": SAVED,
        "TRAIN_TOKENS_OR_ITERS": STEPS, "WARMUP_TOKENS_OR_ITERS": 1,
    }  # fmt: skip
    del positions["OUTPUT_BASEPATH"]
    found = Runs(positions, folder / "alone", folder / "shared")
    train(positions, 1, found.alone)
    train(positions, 2, found.shared)
    return found


def test_losses_tokens_and_evaluation_are_those_of_one_process(runs: Runs) -> None:
    pairs = list(zip(records(runs.alone), records(runs.shared), strict=True))
    assert len(pairs) == STEPS + 2, "steps, and an evaluation before each checkpoint"
    for alone, shared in pairs:
        assert alone.keys() == shared.keys()
        for key in alone.keys() & set(DECIDED):
            assert shared[key] == alone[key], key
        for key in alone.keys() & {"loss", "grad_norm", "valid_loss"}:
            assert shared[key] == pytest.approx(alone[key], abs=BOUND), key
    config = yaml.safe_load((runs.shared / "config.yaml").read_text())
    assert config["parallel"]["cp_comm_type"] == "a2a", "chosen, because sequences are packed"


def test_its_checkpoint_converts_to_what_it_exported(runs: Runs, tmp_path: Path) -> None:
    load = runs.shared / "checkpoint" / f"iter_{STEPS:07d}"
    assert convert(["mcore2hf", f"--load={load}", f"--save={tmp_path / 'hf'}"]) == 0
    assert_same_weights(tmp_path / "hf", runs.shared / "hf")


def test_one_process_goes_on_with_its_checkpoint(runs: Runs) -> None:
    unbroken = losses(runs.shared)
    cut_back(runs.shared, SAVED)
    os.rename(runs.shared / "hf", runs.shared / "hf_first")
    assert f"resumed after step {SAVED}" in train(runs.positions, 1, runs.shared)
    resumed = losses(runs.shared)
    assert resumed[:SAVED] == unbroken[:SAVED]
    assert resumed == pytest.approx(unbroken, abs=BOUND)
