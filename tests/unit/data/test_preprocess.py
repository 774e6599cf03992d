"""Sets that toolkits.preprocess_pretrain writes, against upstream's tokenizer and builder."""

import gzip
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from full_disk import disk_full_after
from llama3_tokenizer import build_tiny_tokenizer, tiny_tokenizer
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.tokenizers import MegatronTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from patch.data.pretraining.preprocess import WrittenSet, document_reader, write_indexed
from patch.data.tokenizer import load_tokenizer
from patch.errors import DataError
from toolkits.preprocess_pretrain import main

TEXTS = ["hello world", "", "what is two plus two?\n\nfour", "\u4f60\u597d"]
ROWS = [
    {"text": "hello world", "title": "a", "id": 7},
    {"text": "", "title": "nothing"},
    {"text": ["one sentence.", "", " and another"], "title": ""},
    {"text": [], "title": ["", ""]},
    {"text": "\u4f60\u597d <|eot_id|> spelled out", "title": "\U0001f600"},
    {"text": "the lazy dog " * 50 + "<|end_of_text|>", "title": "\n\n"},
]


def upstream_bytes(
    folder: Path, rows: list[dict], key: str, tokenizer_folder: Path, append_eod: bool
) -> list[bytes]:
    """The .bin and .idx of upstream's builder and tokenizer, filled as Megatron-LM's tool fills them.

    A document that ends with the end token gets no second one.
    """
    tokenizer = MegatronTokenizer.from_pretrained(
        str(tokenizer_folder), metadata_path={"library": "huggingface"}, include_special_tokens=False
    )
    builder = IndexedDatasetBuilder(f"{folder}/upstream.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    for row in rows:
        ids, lengths = [], []
        for sentence in row[key] if isinstance(row[key], list) else [row[key]]:
            if found := tokenizer.tokenize(sentence):
                ids += found
                lengths.append(len(found))
        if ids and append_eod and ids[-1] != tokenizer.eod:
            ids.append(tokenizer.eod)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(f"{folder}/upstream.idx")
    return [(folder / f"upstream.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def set_bytes(prefix: object) -> list[bytes]:
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": 7}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_tokenizer(folder)
    return folder


@pytest.mark.parametrize("append_eod", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_every_key_has_the_bytes_of_megatron_lm(
    tmp_path: Path, tiny_folder: Path, append_eod: bool, workers: int, logged: list[str]
) -> None:
    """Empty texts, lists of sentences, special tokens in the text; more rows than one batch of a worker."""
    rows = ROWS * 400
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outputs = {key: str(tmp_path / f"new/{key}") for key in ("text", "title")}
    tokenizer = load_tokenizer(str(tiny_folder))
    written = write_indexed(
        [tmp_path / "rows.jsonl"], tokenizer, outputs, append_eod=append_eod, workers=workers
    )
    for key, prefix in outputs.items():
        assert set_bytes(prefix) == upstream_bytes(tmp_path, rows, key, tiny_folder, append_eod)
    empty, with_special = {"text": 800, "title": 800}, {"text": 800, "title": 0}
    for key, prefix in outputs.items():
        tokens = len(np.fromfile(f"{prefix}.bin", np.uint16))
        assert written[key] == WrittenSet(2400, empty[key], tokens, with_special[key])
    suffixes = [path.suffix for path in (tmp_path / "new").iterdir()]
    assert sorted(suffixes) == sorted([".bin", ".idx", ".json"] * 2)
    assert any("text: 2400 documents, 800 of them empty" in message for message in logged)
    assert [m for m in logged if "spell out special" in m][0].startswith(f"{outputs['text']}: 800 documents")


@pytest.mark.parametrize("kind", ["lines", "gzip", "parquet"])
def test_reader_knows_how_much_is_read(tmp_path: Path, kind: str) -> None:
    """Also of a file whose rows are much longer than itself: compressed, or with a dictionary."""
    for name in ("one", "two"):
        pick = random.Random(name)
        rows = ({"text": f"{pick.getrandbits(1200):x} " * 5} for _ in range(12_000))
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).write_bytes(gzip.compress(lines.encode()) if kind == "gzip" else lines.encode())
        if kind == "parquet":
            pq.write_table(pa.table({"text": ["the lazy dog " * 50] * 12_000}), tmp_path / name)
    reading = document_reader([tmp_path / "one", tmp_path / "two"], ["text"])
    assert reading.share == 0
    shares = [reading.share for _ in reading.batches()]
    assert shares == sorted(shares) and 0.8 < shares[-1] <= reading.share == 1
    assert any(0.2 < share < 0.5 for share in shares) and any(0.6 < share < 1 for share in shares)


def test_large_vocabulary_has_the_bytes_of_megatron_lm(tmp_path: Path) -> None:
    """Of more ids than 16 bits hold."""
    core = Tokenizer(models.WordLevel({f"w{number}": number for number in range(70_000)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w3")
    tokenizer.save_pretrained(tmp_path / "tok")
    (tmp_path / "rows.jsonl").write_text('{"text": "w7 w69999"}\n')
    write_indexed([tmp_path / "rows.jsonl"], tokenizer, {"text": str(tmp_path / "set")}, append_eod=True)
    indexed = IndexedDataset(str(tmp_path / "set"))
    assert indexed.index.dtype == np.int32 and indexed[0].tolist() == [7, 69999, 3]
    expected = upstream_bytes(tmp_path, [{"text": "w7 w69999"}], "text", tmp_path / "tok", True)
    assert set_bytes(tmp_path / "set") == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"txt": "a"}',
            r"line 1: found the keys txt; expected text \(--json-keys\); txt, did you mean text\?",
        ),
        ('{"text": "a"}\n{"text": 3}', "line 2: text: got 3, expected text"),
        ('{"text": "a"}\n{"text": ["b", null]}', "line 2: text: got .'b', None., expected text"),
        ('{"text": "a"}\n{"text": "b"', "line 2: malformed JSON"),
        ('{"text": ""}', "no row has a text under text"),
        ("", "has no rows"),
    ],
)
def test_bad_input_is_named_and_leaves_no_files(tmp_path: Path, content: str, said: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(content)
    with pytest.raises(DataError, match=said):
        write_indexed([rows], tiny_tokenizer(), {"text": str(tmp_path / "set")}, append_eod=True, workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_tokenizer_without_eos_needs_no_append_eod(tmp_path: Path, rows: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    outputs = {"text": str(tmp_path / "set")}
    with pytest.raises(DataError, match="no eos token.*--no-append-eod"):
        write_indexed([rows], tokenizer, outputs, append_eod=True)
    write_indexed([rows], tokenizer, outputs, append_eod=False)


def killed_after(left: int, rows: Path, prefix: Path) -> int:
    """The exit code of a process that writes the set and is killed before change number `left` of a name."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def die(event: str, arguments: tuple) -> None:
        nonlocal left
        if event in ("os.rename", "os.remove"):
            left -= 1
            if left < 0:
                os._exit(9)

    sys.addaudithook(die)
    write_indexed([rows], tiny_tokenizer(), {"text": str(prefix)}, append_eod=True)
    os._exit(0)


def test_kill_between_two_files_never_leaves_a_pair_that_does_not_match(
    tmp_path: Path, rows: Path, monkeypatch
) -> None:
    """Killed before each file that gets its name or goes: an .idx is there only if it fits the .bin."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    prefix, old = tmp_path / "set", tmp_path / "old.jsonl"
    old.write_text(json.dumps({"text": "what was here before " * 9}) + "\n")
    write_indexed([old], tiny_tokenizer(), {"text": str(prefix)}, append_eod=True)
    before = set_bytes(prefix)
    write_indexed([rows], tiny_tokenizer(), {"text": str(tmp_path / "new")}, append_eod=True)
    after = set_bytes(tmp_path / "new")
    seen = set()
    for left in range(12):
        for name, data in zip(("bin", "idx"), before, strict=True):
            Path(f"{prefix}.{name}").write_bytes(data)
        code = killed_after(left, rows, prefix)
        if not Path(f"{prefix}.idx").exists():
            seen.add("neither")
        else:
            assert set_bytes(prefix) in (before, after), f"killed before change {left}"
            seen.add("old" if set_bytes(prefix) == before else "new")
        if code == 0:
            break
    assert seen == {"old", "neither", "new"} and code == 0


def test_full_disk_is_named_and_leaves_the_old_set(tmp_path: Path, rows: Path) -> None:
    outputs = {"text": str(tmp_path / "set")}
    write_indexed([rows], tiny_tokenizer(), outputs, append_eod=True)
    before = set_bytes(tmp_path / "set")
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "the quick brown fox " * 9000}) + "\n")
    with disk_full_after(8192), pytest.raises(DataError, match="set: cannot be written: File too large"):
        write_indexed([tmp_path / "long.jsonl"], tiny_tokenizer(), outputs, append_eod=True)
    assert set_bytes(tmp_path / "set") == before
    assert not list(tmp_path.glob("*.partial*"))
    with pytest.raises(DataError, match="rows.jsonl/set: cannot be written"):
        write_indexed([rows], tiny_tokenizer(), {"text": str(rows / "set")}, append_eod=True)


def test_command_line_makes_a_set_of_each_key(tmp_path: Path, tiny_folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    (tmp_path / "folder").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (tmp_path / "folder" / "one.jsonl").write_bytes(lines)
    (tmp_path / "two.json").write_text(json.dumps(ROWS))
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(lines))
    files = [str(tmp_path / name) for name in ("folder", "two.*")]
    options = ["--tokenizer-name-or-path", str(tiny_folder), "--output-prefix", str(tmp_path / "set")]
    options += ["--workers", "2", "--input", *files, "--json-keys", "text", "title"]
    assert main(options) == 0
    said = capsys.readouterr().out
    for key in ("text", "title"):
        prefix = tmp_path / f"set_{key}_document"
        assert set_bytes(prefix) == upstream_bytes(tmp_path, ROWS * 3, key, tiny_folder, True)
        assert f"DATASET_PATH is {prefix}\n" in said
    before = [set_bytes(tmp_path / f"set_{key}_document") for key in ("text", "title")]
    assert main(options) == DataError.exit_code
    said = capsys.readouterr().err
    assert f"{tmp_path}/set_text_document.bin, {tmp_path}/set_text_document.idx" in said
    assert "remove these files, or give another --output-prefix" in said
    assert before == [set_bytes(tmp_path / f"set_{key}_document") for key in ("text", "title")]


@pytest.mark.parametrize("flags", [[], ["--split-at-blank-lines"]])
def test_plain_text_is_a_document_a_file_or_one_between_blank_lines(
    tmp_path: Path, tiny_folder: Path, flags: list[str]
) -> None:
    (tmp_path / "texts" / "below").mkdir(parents=True)
    texts = ["\ufeffhello\nworld\n\n \r\n[two\n", "\nyes"]
    (tmp_path / "texts" / "a.txt").write_text(texts[0], newline="")
    (tmp_path / "texts" / "below" / "b.txt").write_text(texts[1])
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(texts[0].encode()))
    options = ["--tokenizer-name-or-path", str(tiny_folder), "--output-prefix", str(tmp_path / "set"), *flags]
    assert main([*options, "--workers", "1", "--input", str(tmp_path / "texts"), str(tmp_path / "*.gz")]) == 0
    parts = [[texts[0][1:]], texts[1:]] if not flags else [["hello\nworld", "[two"], ["yes"]]
    rows = [{"text": text} for text in (*parts[0], *parts[1], *parts[0])]
    assert set_bytes(tmp_path / "set_text_document") == upstream_bytes(
        tmp_path, rows, "text", tiny_folder, True
    )
