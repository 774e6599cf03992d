"""BLOOM's run in small: 3D parallelism, ZeRO-1, bf16 with fp32 gradients, blended sets, many checkpoints.

It resumes after a process was killed. Its loss is that of transformers on the exported folder.
"""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from end_to_end.conftest import Office
from end_to_end.shell import (
    assert_same_weights,
    await_file,
    call_workers,
    command,
    environment,
    losses,
    start,
    worker_of,
)
from hf_families import family_model
from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from patch.storage.names import TRACKER
from toolkits.preprocess_pretrain import main as preprocess_pretrain

pytestmark = pytest.mark.long

PROCESSES, LENGTH, STEPS, SAVED = 8, 64, 6, 2
TOKENS_OF_STEP = 8 * LENGTH
BOUND = 5e-3
"""Bound for a loss near 5: ours is computed in bf16, transformers' in fp32."""


@pytest.fixture(scope="module")
def model(office: Office, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with six heads, which is not a power of 2, and the office's tokenizer."""
    folder = tmp_path_factory.mktemp("bloom")
    vocabulary = len(AutoTokenizer.from_pretrained(office.model))
    family_model("bloom", folder, vocab_size=vocabulary, n_layer=4, initializer_range=0.02)
    for file in office.model.glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def sets(office: Office, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two sets to train on, and one with a single document to evaluate."""
    folder = tmp_path_factory.mktemp("sets")
    texts = [office.train.read_text().splitlines()[part] for part in (slice(250), slice(250, 400))]
    texts.append([office.valid.read_text()])
    for number, lines in enumerate(texts):
        rows = folder / f"{number}.jsonl"
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
        prefix = ["--input", str(rows), "--output-prefix", str(folder / str(number))]
        assert preprocess_pretrain([*prefix, "--tokenizer-name-or-path", str(model)]) == 0
    return [folder / f"{number}_text_document" for number in range(3)]


def bloom_command(model: Path, sets: list[Path], output: Path) -> list[str]:
    return [
        *command(
            BATCH_SIZE=2, GLOBAL_BATCH_SIZE=8, SEQ_LEN=LENGTH, PAD_LEN=LENGTH, PR="bf16", TP=2, PP=2,
            SP="true", DO="true", SFT="false", AC="full", SAVE_INTERVAL=SAVED,
            DATASET_PATH=f"0.7 {sets[0]} 0.3 {sets[1]}", VALID_DATASET_PATH=sets[2],
            PRETRAIN_CHECKPOINT_PATH=model, TRAIN_TOKENS_OR_ITERS=STEPS * TOKENS_OF_STEP,
            WARMUP_TOKENS_OR_ITERS=TOKENS_OF_STEP, OUTPUT_BASEPATH=output,
        ),
        "--export-hf", "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
    ]  # fmt: skip


def loss_of_transformers(folder: Path, prefix: Path) -> float:
    """Return the loss over the windows of a set with a single document."""
    (tokens,) = (torch.tensor(document).long() for document in IndexedDataset(str(prefix)))
    windows = tokens.unfold(0, LENGTH + 1, LENGTH)
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(windows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


def test_run_that_is_killed_goes_on_to_the_same_bits_and_transformers_has_its_loss(
    model: Path, sets: list[Path], tmp_path: Path
) -> None:
    variables = {"MP_DATASET_TYPE": "idxmap", "NPROC_PER_NODE": PROCESSES}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ended = call_workers(PROCESSES, bloom_command(model, sets, whole), MP_DATASET_TYPE="idxmap")
    assert ended.returncode == 0, ended.stderr
    assert "2 x PP 2 x CP 1 x DP 2" in ended.stderr and "(data-parallel sharding: optimizer)" in ended.stderr
    unbroken = losses(whole)
    assert len(unbroken) == STEPS and unbroken[-1] < unbroken[0] - 0.2

    launcher = start(bloom_command(model, sets, broken), environment(**variables))
    await_file(broken / "checkpoint" / TRACKER, launcher)
    os.kill(worker_of(launcher.pid, "5"), signal.SIGKILL)
    _, messages = launcher.communicate(timeout=120)
    assert launcher.returncode != 0 and "local rank 5 ended: killed by SIGKILL" in messages, messages
    resumed = call_workers(PROCESSES, bloom_command(model, sets, broken), MP_DATASET_TYPE="idxmap")
    assert resumed.returncode == 0 and "resumed after step" in resumed.stderr, resumed.stderr
    assert losses(broken) == unbroken
    assert_same_weights(broken / "hf", whole / "hf")

    lines = map(json.loads, (whole / "log" / "metrics.jsonl").read_text().splitlines())
    evaluated = [line["valid_loss"] for line in lines if "valid_loss" in line]
    assert evaluated[-1] == pytest.approx(loss_of_transformers(whole / "hf", sets[2]), abs=BOUND)
