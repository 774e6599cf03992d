"""The pre-training set that toolkits.preprocess_pretrain writes, read back by megatron-core."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llama3_tokenizer import build_tiny_tokenizer, tiny_tokenizer
from megatron.core.datasets.indexed_dataset import IndexedDataset

from patch.data.pretraining.preprocess import write_indexed
from patch.data.tokenizer import load_tokenizer
from patch.errors import DataError
from toolkits.preprocess_pretrain import main

TEXTS = ["hello world", "", "what is two plus two?\n\nfour", "\u4f60\u597d"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": 7}) + "\n" for text in TEXTS))
    return path


@pytest.mark.parametrize("append_eod", [True, False])
def test_each_row_becomes_a_document(tmp_path: Path, rows: Path, append_eod: bool, logged: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    prefix = str(tmp_path / "new" / "set")
    written = write_indexed(rows, tokenizer, prefix, json_key="text", append_eod=append_eod)
    indexed = IndexedDataset(prefix)
    end = [tokenizer.eos_token_id] if append_eod else []
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] + end for text in TEXTS if text]
    assert [indexed[index].tolist() for index in range(len(indexed))] == expected
    assert indexed.document_indices.tolist() == [0, 1, 2, 3]
    assert written == sum(map(len, expected))
    assert indexed.index.dtype == np.uint16
    assert any("1 rows with an empty text left out" in message for message in logged)


def test_large_vocabulary_is_written_in_four_bytes(tmp_path: Path, rows: Path, llama3_folder: Path) -> None:
    tokenizer = load_tokenizer(str(llama3_folder))
    write_indexed(rows, tokenizer, str(tmp_path / "set"), json_key="text", append_eod=True)
    indexed = IndexedDataset(str(tmp_path / "set"))
    assert indexed.index.dtype == np.int32
    assert indexed[0].tolist() == [15339, 1917, 128001]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"txt": "a"}',
            r"line 1: found the keys txt; expected text \(--json-key\); txt, did you mean text\?",
        ),
        ('{"text": "a"}\n{"text": 3}', "line 2: text: got 3, expected text"),
        ('{"text": "a"}\n{"text": "b"', "line 2: malformed JSON"),
        ('{"text": ""}', "no row has a text"),
        ("", "has no rows"),
    ],
)
def test_bad_input_is_named_and_leaves_no_files(tmp_path: Path, content: str, said: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(content)
    with pytest.raises(DataError, match=said):
        write_indexed(rows, tiny_tokenizer(), str(tmp_path / "set"), json_key="text", append_eod=True)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_tokenizer_without_eos_needs_no_append_eod(tmp_path: Path, rows: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no eos token.*--no-append-eod"):
        write_indexed(rows, tokenizer, str(tmp_path / "set"), json_key="text", append_eod=True)
    write_indexed(rows, tokenizer, str(tmp_path / "set"), json_key="text", append_eod=False)


def test_place_that_cannot_be_written_is_named(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(DataError, match="rows.jsonl/set: cannot be written"):
        write_indexed(rows, tiny_tokenizer(), str(rows / "set"), json_key="text", append_eod=True)


def test_command_line_makes_a_set_and_returns_the_errors_code(tmp_path: Path, rows: Path) -> None:
    build_tiny_tokenizer(tmp_path / "tok")
    arguments = [
        "--tokenizer",
        str(tmp_path / "tok"),
        "--output-prefix",
        str(tmp_path / "set"),
        "--workers",
        "1",
    ]
    command = [sys.executable, "-m", "toolkits.preprocess_pretrain", "--input", str(rows), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[3])
    assert done.returncode == 0, done.stderr
    assert "tokens" in done.stdout and len(IndexedDataset(str(tmp_path / "set"))) == 3


def test_command_line_names_a_missing_file(tmp_path: Path, capsys, monkeypatch) -> None:
    for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")
    build_tiny_tokenizer(tmp_path / "tok")
    options = ["--tokenizer", str(tmp_path / "tok"), "--output-prefix", str(tmp_path / "set")]
    assert main(["--input", str(tmp_path / "absent"), *options]) == DataError.exit_code
    assert "absent: cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--input", "x", *options, "--workers", "0"])
