"""preview_data: figures counted by hand, the tokens of rows, exit codes, hostile rows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from indexed_sets import write_set
from llama3_tokenizer import SPECIAL_TOKENS, tiny_tokenizer

from patch.data import load_sft, load_tokenizer
from patch.data.formats.turns import PLAIN
from toolkits.preprocess_pretrain import main as preprocess
from toolkits.preview_data import main

ROWS = [
    {"instruction": "hello", "output": "world"},
    {"instruction": "hello", "output": "world"},
    {"instruction": "hello", "output": ""},
    {"instruction": "<|eot_id|>", "output": "world"},
    {"instruction": "hello", "output": "the quick " * 10},
]
LENGTH = 30
TEXTS = ["hello world", "", "hello" + " hello" * 699]
HEADERS = "<|begin_of_text|> <|start_header_id|> user <|end_header_id|> \u21b5\u21b5".split()
ANSWER = "<|eot_id|> <|start_header_id|> assistant <|end_header_id|> \u21b5\u21b5".split()
HOSTILE = "<script>alert(1)</script> </mark> &amp; \"'> \x1b[31m [bold]"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _write(folder: Path, rows: list, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _flags(tokenizer: Path, *more: object, length: int = LENGTH) -> list[str]:
    return ["--tokenizer-name-or-path", str(tokenizer), "--seq-length", str(length), *map(str, more)]


@pytest.fixture(scope="module")
def seen(tokenizer, tmp_path_factory):
    """All five rows as JSON."""
    folder = tmp_path_factory.mktemp("seen")
    rows = _write(folder, ROWS)
    more = ("--rows", 9, "--max-dropped-share", 0.2, "--cache-dir", folder / "cache")
    assert main([str(rows), *_flags(tokenizer, *more, "--json", folder / "it.json")]) == 0
    return json.loads((folder / "it.json").read_text()), rows


def test_figures_are_those_counted_by_hand(seen):
    (figures,) = seen[0]["sets"]
    report = figures["report"]
    assert (report["rows"], report["samples"], report["longest"]) == (5, 4, 31)
    assert report["dropped"] == {"nothing to learn": {"count": 1, "first": ["line 3"]}}
    assert report["cut"] == {"count": 1, "first": ["line 5"]} and report["unlearned"] == 1
    assert report["special"] == {"count": 1, "first": ["line 4"]}
    assert (figures["duplicates"], figures["most_copies"], figures["median"]) == (1, 2, 16)
    assert figures["padded_share"] == pytest.approx(1 - 75 / 120)
    packing = figures["packing"]
    assert (packing["num_tokens"], packing["num_learned"], packing["num_packs"]) == (75, 26, 3)
    assert packing["used_share"] == pytest.approx(75 / 90) and packing["gain"] == pytest.approx(4 / 3)


def test_rows_are_shown_with_what_became_of_them(seen):
    rows = seen[0]["rows"]
    assert [row["where"].rsplit(": ")[-1] for row in rows] == [f"line {number}" for number in range(1, 6)]
    assert [len(row["samples"]) for row in rows] == [1, 1, 0, 1, 1]
    assert rows[2]["remarks"] == ["dropped: nothing to learn"]
    assert rows[3]["remarks"] == [
        "special tokens that its text spells out are encoded as text (--allow-special-tokens)"
    ]
    assert rows[4]["remarks"] == ["31 tokens, 30 fit: --long-samples cut-end; learned tokens are lost"]
    sample = rows[0]["samples"][0]
    assert sample["texts"] == [*HEADERS, "hello", *ANSWER, "world", "<|eot_id|>"]
    assert sample["learned"] == [0] * 11 + [1, 1]


def test_shown_tokens_are_those_that_a_run_learns(seen, tokenizer):
    values, rows = seen
    source = load_sft(rows, load_tokenizer(str(tokenizer)), LENGTH, replace(PLAIN, max_dropped_share=1.0))
    shown = [sample for row in values["rows"] for sample in row["samples"]]
    assert len(shown) == len(source)
    for index, sample in enumerate(shown):
        size = len(sample["ids"]) - 1
        assert sample["ids"][1:] == source[index].labels[:size].tolist()
        assert sample["learned"][1:] == source[index].loss_mask[:size].tolist()


def test_hostile_rows_are_text(tokenizer, tmp_path, capsys):
    folder = tmp_path / "<b>\x1b[2J&"
    folder.mkdir()
    rows = _write(folder, [{"instruction": HOSTILE, "output": HOSTILE}])
    assert main([str(rows), *_flags(tokenizer, length=200)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_too_many_drops_are_shown_and_end_with_exit_code_3(tokenizer, tmp_path, capsys):
    file = tmp_path / "it.json"
    assert main([str(_write(tmp_path, ROWS)), *_flags(tokenizer, "--json", file)]) == 3
    said = capsys.readouterr()
    assert "--max-dropped-share" in said.err and "dropped: nothing to learn  1: line 3" in said.out
    # 12, 12, 21 and 30 tokens, the last of 31
    assert "median 16, 90% have at most 27, longest row 31" in said.out and file.is_file()


def test_one_row_is_found_by_the_number_that_messages_give_in_each_of_several_sets(
    tokenizer, tmp_path, capsys
):
    for name in ("a.jsonl", "b.jsonl"):
        rows = _write(tmp_path, ROWS, name)
        rows.write_text("\n" + rows.read_text())
    output, text = tmp_path / "it.json", f"0.7 {tmp_path}/a.jsonl 0.3 {tmp_path}/b.jsonl"
    flags = _flags(tokenizer, "--row", 5, "--json", output, "--max-dropped-share", 0.2)
    assert main([text, *flags]) == 0
    assert f"{rows}: line 5: 21 tokens and a last label, 2 learned" in capsys.readouterr().out
    values = json.loads(output.read_text())
    assert [each["name"] for each in values["sets"]] == [
        f"0.7 {tmp_path}/a.jsonl", f"0.3 {tmp_path}/b.jsonl",
    ]  # fmt: skip
    assert [Path(row["where"]).name for row in values["rows"]] == ["a.jsonl: line 5", "b.jsonl: line 5"]
    assert main([text, *_flags(tokenizer, "--row", 9, "--no-statistics")]) == 3
    assert "no line 9" in capsys.readouterr().err


def test_a_run_and_its_variables_say_what_flags_do_not(tokenizer, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run.yaml"
    data = {"train_data_path": str(_write(tmp_path, ROWS)), "dataset_type": "raw", "max_padding_length": 20}
    run.write_text(json.dumps({"data": data, "checkpoint": {"load": str(tokenizer)}}))
    assert main(["--config", str(run), "--row", "5", "--no-statistics"]) == 0
    assert "31 tokens, 20 fit" in capsys.readouterr().out
    assert main(["--config", str(run), "--row", "5", "--no-statistics", "--max-padding-length", "25"]) == 0
    assert "31 tokens, 25 fit" in capsys.readouterr().out
    monkeypatch.setenv("TOKENIZER_PATH", str(tokenizer))
    assert main([data["train_data_path"], "--no-statistics"]) == 0
    assert "learned" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "no data is named"),
        (["none.jsonl", "--max-padding-length", "0"], 2, "--max-padding-length"),
        (["none.jsonl", "--train-on", "first"], 2, "expected one of all, last"),
        (["none.jsonl"], 3, "none.jsonl does not exist"),
        (["x" * 300], 3, "x does not exist"),
        (["wrong.jsonl"], 3, "wrong.jsonl: line 1"),
        (["rows.jsonl", "--no-statistics", "--json", "."], 2, ". cannot be written"),
    ],
)
def test_wrong_commands_are_refused(arguments, code, said, tokenizer, tmp_path, monkeypatch, capsys):
    """Nothing is explained before an error."""
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, [{"question": "a"}], "wrong.jsonl")
    _write(tmp_path, ROWS[:1])
    assert main([*arguments, "--tokenizer-name-or-path", str(tokenizer)]) == code
    told = capsys.readouterr()
    assert said in told.err and (told.out == "" or "--json" in arguments)


@pytest.fixture(scope="module")
def documents(tokenizer, tmp_path_factory) -> Path:
    """A set of three documents, as a user makes it."""
    folder = tmp_path_factory.mktemp("documents")
    rows = _write(folder, [{"text": text} for text in TEXTS])
    arguments = ["--input", str(rows), "--output-prefix", str(folder / "set"), "--workers", "1"]
    assert preprocess([*arguments, "--tokenizer-name-or-path", str(tokenizer)]) == 0
    return folder / "set_text_document"


def test_documents_are_shown_with_figures_counted_by_hand(documents, tokenizer, tmp_path, capsys):
    file = tmp_path / "it.json"
    arguments = _flags(tokenizer, "--rows", 3, "--json", file)
    assert main([str(documents), *arguments]) == 0
    values = json.loads(file.read_text())
    encoder = load_tokenizer(str(tokenizer))
    ids, long_ids = (encoder(text, add_special_tokens=False)["input_ids"] for text in (TEXTS[0], TEXTS[2]))
    eos, size = encoder.eos_token_id, len(long_ids) + 1
    whole, empty, long = values["rows"]
    assert whole["samples"][0]["ids"] == [*ids, eos] and set(whole["samples"][0]["learned"]) == {1}
    assert (empty["samples"], empty["remarks"]) == ([], ["an empty document"])
    assert long["samples"][0]["ids"] == long_ids[:512]
    assert long["remarks"] == [f"the first 512 of {size:,} tokens"]
    (figures,) = values["sets"]
    assert figures["counts"] == {
        "documents": 3, "empty documents": 1, "sequences": 2, "tokens": len(ids) + 1 + size,
        "samples of 30": (len(ids) + size) // 30,
    }  # fmt: skip
    assert (figures["median"], figures["longest"], figures["stored_as"]) == (len(ids) + 1, size, "uint16")
    assert figures["provenance"]["tokenizer"] == str(tokenizer)
    said = capsys.readouterr().out
    assert f"{documents}: document 1: {len(ids) + 1} tokens" in said and str(tokenizer) in said


def test_documents_that_are_not_there_or_of_another_tokenizer_are_refused(
    documents, tokenizer, tmp_path, capsys
):
    tiny_tokenizer(special=reversed(SPECIAL_TOKENS)).save_pretrained(tmp_path)
    for data, flags, code, expected in (
        (documents, _flags(tokenizer, "--row", 4), 3, "no document 4, expected one of 3 (--row)"),
        (documents, _flags(tmp_path), 3, "was made with tokenizer"),
        (f"{documents}.bin", _flags(tokenizer), 2, f"without the ending, that is {documents}"),
    ):
        assert main([str(data), *flags]) == code
        said = capsys.readouterr()
        assert expected in said.err and said.out == ""


def test_packs_of_pais_sets_are_shown_as_conversations(tokenizer, tmp_path, capsys):
    # Two conversations and two tokens of padding: what is learned begins after 3 and 1 of their tokens.
    ids = [10, 11, 12, 13, -1 - 14, 20, -1 - 21, 0, 0]
    labels = [-100, -100, 13, 14, -100, 21, -100, -100, -100]
    file, prefix = tmp_path / "it.json", write_set(tmp_path / "set", [ids + labels])
    assert main([prefix, *_flags(tokenizer, "--json", file)]) == 0
    values = json.loads(file.read_text())
    (row,) = values["rows"]
    assert [sample["ids"] for sample in row["samples"]] == [[10, 11, 12, 13, 14], [20, 21]]
    assert [sample["learned"] for sample in row["samples"]] == [[0, 0, 0, 1, 1], [0, 1]]
    assert row["remarks"] == ["and 2 tokens of padding"]
    (figures,) = values["sets"]
    assert figures["counts"] == {"samples of 9": 1, "conversations": 2, "tokens": 7, "learned": 3}
    assert "not known: no .meta.json" in capsys.readouterr().out
