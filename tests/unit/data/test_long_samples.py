"""What becomes of conversations that are too long: by every rule, against rules written by hand."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llama3_tokenizer import tiny_tokenizer

from patch.data.formats.turns import PLAIN
from patch.data.sft.source import SftSource, load_sft
from patch.data.sft.truncation import Headers, Tokens, cut
from patch.errors import DataError

CUTS = Path(__file__).with_name("cuts.txt")
RULES = ("cut-end", "cut-begin", "split", "drop")
BEGIN = 1000
ANSWER = 500
"""Ids from here on are learned."""


def tokens(text: str) -> Tokens:
    """Turns, divided by bars: small letters are a prompt, capital ones an answer; ^ is the begin of text."""
    ids, turns = [], []
    for turn in text.split("|"):
        turns.append(len(ids))
        ids += [BEGIN if sign == "^" else ord(sign) + ANSWER * sign.isupper() for sign in turn]
    learned = [ANSWER <= token < BEGIN for token in ids]
    return Tokens(np.array(ids, np.int32), np.array(learned), turns)


def text_of(sample: Tokens) -> str:
    """The ids as signs: capital letters are learned. The first id of a sample never is."""
    signs = []
    for index, (token, learned) in enumerate(zip(sample.ids, sample.learned, strict=True)):
        sign = "^" if token == BEGIN else chr(token % ANSWER).lower()
        signs.append(sign.upper() if learned and index else sign)
    return "".join(signs)


def test_rules_written_by_hand() -> None:
    """cuts.txt; below its blank line the headers of turns have two tokens."""
    for headers, part in zip((Headers(), Headers(2, 2)), CUTS.read_text().split("\n\n"), strict=True):
        for line in (line for line in part.splitlines() if line[0] != "#"):
            given, _, expected = line.partition(" ->")
            rule, length, conversation = given.split()
            samples = cut(tokens(conversation), int(length), rule, BEGIN, headers)
            assert [text_of(sample) for sample in samples] == expected.split(), line
            assert all(len(sample.ids) <= int(length) + 1 for sample in samples)


def test_samples_of_many_conversations() -> None:
    """They begin at turns or inside texts; split learns every token once; cuts change no conversation."""
    pick = np.random.default_rng(0)
    for number in range(500):
        sizes = pick.integers(1, 30, size=(pick.integers(1, 9), 2))
        signs = list("BCbd") if number % 2 else list("BC")  # small letters are not learned
        turns = [f"pq{'a' * asked}gh{''.join(pick.choice(signs, told))}" for asked, told in sizes]
        whole = tokens(("^" if pick.integers(2) else "") + "|".join(turns))
        ids, marks = whole.ids.copy(), whole.learned.copy()
        length = int(pick.integers(12, 60))
        samples = {rule: cut(whole, length, rule, BEGIN, Headers(2, 2)) for rule in RULES}
        for sample in samples["split"] + samples["cut-begin"]:
            assert len(sample.ids) <= length + 1
            assert number % 2 or text_of(sample).lower().removeprefix("^")[0] not in "qh"
        learned = [token for each in samples["split"] for token in each.ids[1:][each.learned[1:]]]
        assert learned == whole.ids[1:][whole.learned[1:]].tolist()
        assert np.array_equal(whole.ids, ids) and np.array_equal(whole.learned, marks)


def write_rows(folder: Path, conversations: list[list[str]]) -> Path:
    """Each conversation is a list of texts: of the user and the assistant by turns."""
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for texts in conversations:
            roles = ("user", "assistant") * len(texts)
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def load(path: Path, length: int, rule: str, **others) -> SftSource:
    data = replace(PLAIN, long_samples=rule, max_dropped_share=1.0, **others)
    return load_sft(path, tiny_tokenizer(), length, data)


def texts(source: SftSource) -> list[str]:
    """The samples; learned tokens are in brackets."""
    tokenizer = tiny_tokenizer()
    found = []
    for index in range(len(source)):
        ids, learned = source.conversation(index)
        pieces = [tokenizer.decode(token) for token in ids]
        marked = "".join(f"[{piece}]" if flag else piece for piece, flag in zip(pieces, learned, strict=True))
        found.append(marked.replace("][", ""))
    return found


def turn(question: str, answer: str) -> str:
    headers = "<|start_header_id|>{}<|end_header_id|>\n\n"
    asked = f"{headers.format('user')}{question}<|eot_id|>{headers.format('assistant')}"
    return f"{asked}[{answer}<|eot_id|>]"


def test_rules_on_conversations_and_what_they_cost(tmp_path: Path, logged: list[str]) -> None:
    """A turn has 12 tokens. The answer of the second conversation is longer than a sample."""
    path = write_rows(tmp_path, [["hello", "yes", "hello", "no"], ["hello", "world", "x", "yes no " * 9]])
    begin = "<|begin_of_text|>"
    assert texts(load(path, 12, "cut-end")) == [begin + turn("hello", each) for each in ("yes", "world")]
    assert any("2 of 2 rows cut to 12 tokens, 2 of them in an answer; the longest" in m for m in logged)
    first, second, third = turn("hello", "yes"), turn("hello", "no"), turn("hello", "world")
    assert texts(load(path, 20, "cut-begin"))[0] == begin + second
    assert any("2 of 2 rows cut at the begin to 20 tokens, 2 of them in an answer" in m for m in logged)
    split = load(path, 20, "split")
    assert texts(split)[:3] == [begin + first, begin + second, begin + third]
    assert any("2 of 2 rows split into samples of 20 tokens, 0 of them in an answer" in m for m in logged)
    assert split.num_learned == load(path, 200, "split").num_learned == load(path, 200, "drop").num_learned
    assert split.report.samples == len(split) > 4 and split.report.cut.count == 2
    assert split.sizes.max() == 20
    assert len(load(path, 24, "drop")) == 1
    assert any("1 of 2 rows dropped: over 24 tokens: line 2" in m for m in logged)
    with pytest.raises(DataError, match="none of 2 rows has anything .*2 over 20 tokens: line 1, line 2"):
        load(path, 20, "drop")
    with pytest.raises(DataError, match="within 4 tokens: 2 nothing .*the longest row with one has"):
        load(path, 4, "cut-end")


def test_too_many_drops_end_the_run_with_the_flag_that_allows_them(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [["hello", "yes"]] * 8 + [["hello", ""], ["hello", "no " * 30]])
    load_sft(path, tiny_tokenizer(), 20, replace(PLAIN, long_samples="drop", max_dropped_share=0.2))
    with pytest.raises(DataError) as caught:
        load_sft(path, tiny_tokenizer(), 20, replace(PLAIN, long_samples="drop", max_dropped_share=0.19))
    assert caught.value.field == "max_dropped_share" and caught.value.exit_code == 3
    assert str(caught.value).startswith(
        f"{path}: 2 of 10 rows (20.0%) are dropped: 1 nothing to learn: line 9; 1 over 20 tokens: line 10; "
    )


def test_answers_beyond_the_length_name_the_length_that_keeps_them(tmp_path: Path) -> None:
    chats = [["hello " * 30, "yes"], ["hello " * 50, "yes"], ["hello", "yes"]]
    path = write_rows(tmp_path, chats)
    with pytest.raises(DataError, match="2 nothing to learn in the 20 tokens that are kept") as caught:
        load_sft(path, tiny_tokenizer(), 20)
    said = re.search(
        r"raise --max-padding-length \(position 8 PAD_LEN\) .* to (\d+), or --long-samples split, or allow",
        str(caught.value),
    )
    assert said is not None
    longest = int(said[1])
    everything = load_sft(path, tiny_tokenizer(), 1000)
    assert longest == max(everything.sizes)
    load_sft(path, tiny_tokenizer(), longest, replace(PLAIN, max_dropped_share=0.0))
    path = write_rows(tmp_path, [["hello", ""], ["hello", "yes"]])
    with pytest.raises(DataError, match="correct the rows, or allow more"):
        load_sft(path, tiny_tokenizer(), 20)


@pytest.mark.parametrize("rule", RULES)
def test_long_texts_give_the_samples_that_encoding_all_of_them_gives(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """Long questions, long answers, many turns; runs that are one token each, or one word to the pattern."""
    words = "hello world the quick brown fox jumps over lazy dog yes no " * 100
    chats = [
        ["hello", words],
        [words, "yes"],
        ["hello", "yes"],
        [words[:3000], words[:700], "hello", words[:400]],
        ["hello world", "the fox\n\njumps"] * 60,
    ]
    if rule != "split":  # of pieces without a blank the border may be another
        mixed = "".join(random.Random(0).choices(["two plus", "\n\n", "1234", " <|eot_id|> ", "\t"], k=3000))
        long = ["y" * 3000, "x" + " " * 9000 + "y", "\u4f60\u597d" * 5000, mixed]
        chats += [["x" * 3000, text] for text in long] + [["hello", text] for text in long]
    path = write_rows(tmp_path, chats)
    whole = texts(load(path, 300, rule))
    monkeypatch.setattr("patch.data.sft.rows.LONG_TEXT", 1000)
    monkeypatch.setattr("patch.data.sft.rows._NEAR", 100)
    assert texts(load(path, 300, rule)) == whole
    said = f"{len(chats) - 1} of {len(chats)} rows so long that only the part that samples need was encoded"
    assert any(said in message for message in logged) == (rule != "split")


def test_last_turn_alone_is_learned_and_kept(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [["hello", "yes", "hello", "no"]])
    source = load(path, 20, "cut-begin", train_on="last")
    assert texts(source) == ["<|begin_of_text|>" + turn("hello", "no")], "no half of the first turn"
    rows = [{"messages": [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes", "weight": 0},
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": "no"},
    ]}]  # fmt: skip
    path.write_text(json.dumps(rows))
    assert texts(load(path, 20, "cut-begin")) == texts(source) == texts(load(path, 20, "split"))


@pytest.mark.parametrize(
    ("row", "lengths", "begins"),
    [
        # 35 ids: begin of text, 4 of a header, the question, its end, 4 of a header, the answer, its end.
        (["yes " * 12, "no"], (32, 33), "yes"),  # from id 3, 2 on
        (["yes", "no " * 12], (25, 27), "no"),  # from id 10, 8 on
        (["yes", "no " * 12], (28,), "<|start_header_id|>assistant<|end_header_id|>"),  # from id 7 on
    ],
)
def test_no_sample_begins_inside_a_header_of_a_template(tmp_path, row, lengths, begins) -> None:
    path = write_rows(tmp_path, [row])
    for length in lengths:
        (text,) = texts(load(path, length, "cut-begin"))
        assert text.endswith("no<|eot_id|>]")
        assert text.removeprefix("<|begin_of_text|>").startswith(begins), (length, text)
