"""PREFIX.meta.json: a set of another tokenizer is refused; one without the file is warned about."""

import json
from pathlib import Path
from typing import Any

import pytest
from llama3_tokenizer import SPECIAL_TOKENS, build_tiny_tokenizer, tiny_tokenizer
from small_runs import small_run
from transformers import PreTrainedTokenizerBase

import patch
from patch.data.pretraining.dataset import PretrainSource, load_training, load_validation
from patch.data.pretraining.preprocess import write_indexed
from patch.data.pretraining.run_sets import PretrainOptions
from patch.data.tokenizer import load_tokenizer
from patch.errors import DataError

TEXTS = ["hello world", "", "the quick brown fox", "what is two plus two?"] * 5


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Of a tokenizer in a folder."""
    build_tiny_tokenizer(tmp_path / "first")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer = load_tokenizer(str(tmp_path / "first"))
    write_indexed([tmp_path / "rows.jsonl"], tokenizer, {"text": str(tmp_path / "set")}, append_eod=True)
    return tmp_path / "set"


def load(prefix: Path, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> PretrainSource:
    run = small_run(seq_length=8, vocab_size=500, **changes)
    options = PretrainOptions(run.data, run.model, tokenizer, 1, prefix.parent / "index")
    load_validation(str(prefix), options)
    return load_training([str(prefix)], None, options, lambda one_pass: one_pass)


def meta(prefix: Path) -> Path:
    return Path(f"{prefix}.meta.json")


def test_file_tells_what_made_the_set(prefix: Path) -> None:
    found = json.loads(meta(prefix).read_text())
    tokens = Path(f"{prefix}.bin").stat().st_size // 2
    assert found["tokenizer"].endswith("/first") and found["vocabulary_size"] <= 400
    assert (found["documents"], found["tokens"]) == (20, tokens)
    assert (found["eod"], found["json_key"]) == (1, "text")
    assert found["made_by"] == f"llama-megatron-patch {patch.__version__}"


def test_same_vocabulary_is_accepted_with_more_tokens_and_another_template(
    prefix: Path, logged: list[str]
) -> None:
    tokenizer = tiny_tokenizer(template="{{ messages }}")
    tokenizer.add_tokens(["<one_more>"], special_tokens=True)
    tokenizer.pad_token = "<one_more>"
    load(prefix, tokenizer)
    assert not any("cannot be checked" in message for message in logged)


@pytest.mark.parametrize(
    "special", [["<|eot_id|>", *SPECIAL_TOKENS[:-2]], SPECIAL_TOKENS[:-1]], ids=["order", "fewer"]
)
def test_another_vocabulary_is_refused_with_both_names(
    tmp_path: Path, prefix: Path, special: list[str]
) -> None:
    tiny_tokenizer(special=special).save_pretrained(tmp_path / "second")
    with pytest.raises(
        DataError, match="made with tokenizer .*/first .*not all the same tokens in .*/second"
    ) as caught:
        load(prefix, load_tokenizer(str(tmp_path / "second")))
    assert caught.value.field == "tokenizer_name_or_path" and caught.value.exit_code == 3


@pytest.mark.parametrize(
    "content",
    [None, "{", "[]", '"format"', "[" * 100_000, '{"format": 2}', '{"format": 1}', "other", "types"],
)
def test_file_that_tells_nothing_is_warned_about(
    prefix: Path, content: str | None, logged: list[str]
) -> None:
    values = json.loads(meta(prefix).read_text())
    if content is None:
        meta(prefix).unlink()
    elif content in ("other", "types"):
        values |= {"tokens": 7} if content == "other" else {"vocabulary_size": [3], "eod": "x"}
        meta(prefix).write_text(json.dumps(values))
    else:
        meta(prefix).write_text(content)
    load(prefix, tiny_tokenizer(special=SPECIAL_TOKENS[:-1]))
    said = {None: "is missing", "other": "is of other files"}.get(content, "cannot be read")
    warned = [message for message in logged if "cannot be checked which tokenizer made the set" in message]
    assert len(warned) == 2 and all(f"set.meta.json {said}, so" in message for message in warned)


def test_end_of_document_is_that_of_the_set_not_of_the_tokenizer(prefix: Path) -> None:
    """An instruct model's eos is the end of a turn, while its base model's tokenizer ended the documents."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|eot_id|>"
    source = load(prefix, tokenizer, reset_attention_mask=True)
    samples = [source[index] for index in range(len(source))]
    assert any((sample.tokens == 1).any() for sample in samples)
    for sample in samples:
        ends = (sample.tokens[:-1] == 1).nonzero().flatten() + 1
        assert sample.lengths is not None
        assert sample.lengths.cumsum(0).tolist() == [*ends.tolist(), 8]


def test_documents_without_an_end_have_no_borders(tmp_path: Path, prefix: Path) -> None:
    outputs = {"text": str(tmp_path / "endless")}
    write_indexed([tmp_path / "rows.jsonl"], tiny_tokenizer(), outputs, append_eod=False)
    load(tmp_path / "endless", tiny_tokenizer())
    with pytest.raises(DataError, match="no token ends its documents: was made with --no-append-eod"):
        load(tmp_path / "endless", tiny_tokenizer(), reset_attention_mask=True)
