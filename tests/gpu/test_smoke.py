"""Short runs on a GPU through the shell: 16-bit types, offload, evaluation, resume, export and import.

`make gpu-check` runs them; without CUDA they skip themselves. On two GPUs or more NCCL runs with two ranks.
"""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from end_to_end.conftest import Office
from end_to_end.shell import assert_same_weights, call, command, cut_back, losses, training_records

from toolkits.preprocess_pretrain import main as preprocess_pretrain

STEPS = 3
TWO_RANKS = [{"TP": 2}, {"PP": 2}, {"DO": "true"}]


def train(office: Office, output: Path, *flags: str, ranks: int = 1, **changes: object) -> str:
    """Three deterministic steps with a checkpoint after each, and an export; the run's messages."""
    steps = {"TRAIN_TOKENS_OR_ITERS": STEPS, "WARMUP_TOKENS_OR_ITERS": 1, "SAVE_INTERVAL": 1}
    arguments = [
        *command(**{**office.positions(output), **steps, **changes}),
        *("--deterministic-mode", "--export-hf", *flags),
    ]
    result = call(
        arguments,
        NPROC_PER_NODE=ranks,
        CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))),
        TOKENIZER_PATH=office.model,
        MP_DATASET_TYPE="raw" if changes.get("SFT", "true") == "true" else "idxmap",
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


def test_a_run_with_offload_resumes_to_the_bit_and_its_export_is_where_the_next_begins(
    office: Office, tmp_path: Path
) -> None:
    train_and_resume(office, tmp_path / "out", PR="bf16", OPTIMIZER_OFFLOAD="static")
    last = training_records(tmp_path / "out")[-1]
    assert last["offload_fraction"] == 1.0 and last["mfu"] is not None and last["peak_memory_gib"] > 0
    train(office, tmp_path / "on", PR="bf16", PRETRAIN_CHECKPOINT_PATH=tmp_path / "out" / "hf")
    assert losses(tmp_path / "on")[0] < losses(tmp_path / "out")[0]


def test_pre_training_resumes_to_the_bit_from_what_was_written_beside_it(
    office: Office, tmp_path: Path
) -> None:
    """Background saves copy weights and states to the host while the next steps change them."""
    documents, prefix = tmp_path / "documents.jsonl", tmp_path / "set_text_document"
    rows = office.train.read_text().splitlines()
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    preprocess = ["--input", str(documents), "--output-prefix", str(tmp_path / "set")]
    assert preprocess_pretrain([*preprocess, "--tokenizer-name-or-path", str(office.model)]) == 0
    data = {"SFT": "false", "DATASET_PATH": prefix, "VALID_DATASET_PATH": "none", "PR": "bf16"}
    tokens = 8 * 64
    data |= {"TRAIN_TOKENS_OR_ITERS": STEPS * tokens, "WARMUP_TOKENS_OR_ITERS": tokens}
    train_and_resume(office, tmp_path / "beside", "--async-save", **data)
    train(office, tmp_path / "waiting", "--no-async-save", **data)
    assert losses(tmp_path / "beside") == losses(tmp_path / "waiting")
    assert_same_weights(tmp_path / "beside" / "hf", tmp_path / "waiting" / "hf")


def test_preferences_by_adapters_resume_to_the_bit(office: Office, tmp_path: Path) -> None:
    answers = [{"instruction": f"{n} plus 1?", "chosen": f"{n + 1}.", "rejected": "No"} for n in range(24)]
    (rows := tmp_path / "pairs.json").write_text(json.dumps(answers))
    data = {"DATASET_PATH": rows, "VALID_DATASET_PATH": rows, "PR": "bf16", "GLOBAL_BATCH_SIZE": 4}
    flags = ("--objective", "dpo", "--packing", "--dpo-beta", "0.5", "--lora-rank", "4", "--lora-alpha", "8")
    flags += ("--quantize-base", "nf4")
    train_and_resume(office, tmp_path / "out", *flags, **data)
    assert losses(tmp_path / "out")[0] == pytest.approx(math.log(2))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("layout", TWO_RANKS, ids=["tensor", "pipeline", "sharded-replicas"])
def test_two_ranks_over_nccl_resume_to_the_bit(
    office: Office, tmp_path: Path, layout: dict[str, object]
) -> None:
    train_and_resume(office, tmp_path / "out", ranks=2, PR="bf16", **layout)
