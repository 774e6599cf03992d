"""Pre-training: preprocess, train with document masking, resume bit for bit."""

import json
from pathlib import Path

import pytest
from end_to_end.conftest import Office
from end_to_end.shell import call_workers, command, cut_back, losses

from toolkits.preprocess_pretrain import main as preprocess_pretrain

TOKENS_PER_STEP = 8 * 64


@pytest.mark.long
def test_documents_are_preprocessed_trained_and_resumed_to_the_bit(office: Office, tmp_path: Path) -> None:
    rows = office.train.read_text().splitlines()
    documents, prefix = tmp_path / "documents.jsonl", tmp_path / "set_text_document"
    output = tmp_path / "out"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    preprocess = ["--input", str(documents), "--output-prefix", str(tmp_path / "set")]
    assert preprocess_pretrain([*preprocess, "--tokenizer-name-or-path", str(office.model)]) == 0
    paths = {**office.positions(output), "DATASET_PATH": prefix, "VALID_DATASET_PATH": "none"}
    lengths = {"TRAIN_TOKENS_OR_ITERS": 6 * TOKENS_PER_STEP, "WARMUP_TOKENS_OR_ITERS": TOKENS_PER_STEP}
    arguments = command(**{**paths, **lengths, "SFT": "false", "DO": "true", "SAVE_INTERVAL": 3})
    arguments += ["--split", "90,10,0", "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]
    result = call_workers(2, arguments, MP_DATASET_TYPE="idxmap")
    assert result.returncode == 0, result.stderr
    unbroken = losses(output)
    assert "valid_loss" in (output / "log" / "metrics.jsonl").read_text()
    assert len(unbroken) == 6 and unbroken[-1] < unbroken[0] - 0.1
    cut_back(output, 3)
    resumed = call_workers(2, arguments, MP_DATASET_TYPE="idxmap")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after step 3" in resumed.stderr and losses(output) == unbroken
