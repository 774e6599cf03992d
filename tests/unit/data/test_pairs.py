"""Rows of a preferred and another answer: their forms, what is wrong with others, their samples and preview.

That tokens are TRL's: tests/unit/training/test_preference.py.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama3_tokenizer import tiny_tokenizer

from patch.config.schema import DataConfig
from patch.data.chat_templates import LLAMA3_CHAT_TEMPLATE
from patch.data.formats import Conversation, FormatOptions, Text, to_pair
from patch.data.packing import PairSource
from patch.data.preview import Preview, terminal
from patch.data.sft.options import SftOptions
from patch.data.sft.source import SftSource, load_sft
from patch.errors import DataError

TOKENIZER = tiny_tokenizer(template=LLAMA3_CHAT_TEMPLATE)


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


QUESTION = [says("system", "be brief"), says("user", "hello"), says("assistant", "yes"), says("user", "two?")]
GOOD, BAD = says("assistant", "four"), says("assistant", "five")
SHAREGPT = [{"from": turn["role"].replace("user", "human"), "value": turn["content"]} for turn in QUESTION]
WHOLE = {"chosen": [*QUESTION, GOOD], "rejected": [*QUESTION, BAD]}


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": QUESTION, "chosen": [GOOD], "rejected": [BAD]}, {}),
        (WHOLE, {}),
        ({"prompt": "two?", "messages": [*QUESTION, GOOD], **WHOLE}, {}),  # UltraFeedback
        ({"messages": QUESTION, "chosen": GOOD, "rejected": BAD}, {}),
        ({"messages": QUESTION, "chosen": "four", "rejected": "five"}, {}),
        (
            {"conversations": SHAREGPT[1:], "system": "be brief"}
            | {key: {"from": "gpt", "value": x} for key, x in (("chosen", "four"), ("rejected", "five"))},
            {},
        ),
        (
            {
                "system": "be brief",
                "asked": "two?",
                "history": [["hello", "yes"]],
                "good": "four",
                "bad": "five",
            },
            {"instruction": "asked", "chosen": "good", "rejected": "bad"},
        ),
    ],
)
def test_forms_of_conversations_are_one(row: dict[str, Any], columns: dict[str, str]) -> None:
    for pair, answer in zip(to_pair(row, "here", FormatOptions(columns)), (GOOD, BAD), strict=True):
        assert isinstance(pair, Conversation)
        assert pair.messages == [*QUESTION, answer]
        assert pair.learned == (False,) * 4 + (True,)


def test_texts_have_no_template() -> None:
    head = "\n\nHuman: hello\n\nAssistant: yes\n\nHuman: two?\n\nAssistant:"
    for row in (
        {"prompt": head, "chosen": " four", "rejected": " five"},
        {"chosen": f"{head} four", "rejected": f"{head} five"},
    ):
        assert to_pair(row, "here") == (Text(" four", "here", head), Text(" five", "here", head))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "q", "chosen": "a"}, "no key rejected: found the keys prompt, chosen; expected"),
        ({"prompt": "q", "chosen": "a", "rejectd": "b"}, "rejectd, did you mean rejected?"),
        ({"prompt": "q", "chosen": "a", "rejected": [BAD]}, "got chosen 'a' and .* expected one form"),
        ({"prompt": "q", "chosen": None, "rejected": None}, "chosen: got null, expected a list of objects"),
        ({"chosen": "a", "rejected": "b"}, "texts without a prompt, expected the key prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "assistant speaks first, expected the user"),
        ({**WHOLE, "images": ["a"]}, "key images is not supported"),
        ({**WHOLE, "chosen": says("x", "y")}, "chosen: message 1: role"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"rows.json: row 3: .*{said}".replace("?", r"\?")):
        to_pair(row, "rows.json: row 3")


def load(folder: Path, rows: list[dict[str, Any]], length: int, **own: Any) -> SftSource:
    (folder / "rows.json").write_text(json.dumps(rows))
    return load_sft(folder / "rows.json", TOKENIZER, length, SftOptions(pairs=True, **own))


def plain(*sizes: int) -> dict[str, Any]:
    """Answers of so many tokens behind a prompt of one; with begin and end there are two more."""
    chosen, rejected = ("q" * size for size in sizes)
    return {"prompt": "x", "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(
    ("sizes", "rule", "kept"),
    [
        ((10, 9), "drop", [12, 11]),  # ids - 1 = answer and two more: 12 + 11 is all there is room for
        ((11, 10), "drop", []),
        ((30, 4), "cut-end", [17, 6]),  # the short one stays whole
        ((30, 20), "cut-end", [11, 11]),
        ((30, 20), "cut-begin", [11, 11]),
    ],
)
def test_a_pair_fits_into_one_sample(
    sizes: tuple[int, int], rule: Any, kept: list[int], tmp_path: Path
) -> None:
    rows = [plain(1, 2), plain(*sizes)]
    source = load(tmp_path, rows, 23, long_samples=rule, max_dropped_share=0.5)
    assert source.sizes[2:].tolist() == kept
    if kept and sum(sizes) > 23:
        whole = load(tmp_path, rows, 200)
        for index in (2, 3):
            ids, all_ids = source.conversation(index)[0], whole.conversation(index)[0]
            end = np.append(all_ids[0], all_ids[1 - len(ids) :])
            assert np.array_equal(ids, all_ids[: len(ids)] if rule == "cut-end" else end)


def test_samples_hold_whole_pairs(tmp_path: Path) -> None:
    sizes = [(1, 2), (20, 3), (5, 6), (2, 9)]
    source = load(tmp_path, [plain(*each) for each in sizes], 40)
    for is_packed, number in ((False, 4), (True, 2)):
        pairs = PairSource(source, 40, is_packed=is_packed, first=100)
        assert len(pairs) == number
        seen: list[int] = []
        for sample in map(pairs.__getitem__, range(number)):
            of, count = sample.of_sequences, len(sample.lengths) // 2
            assert of["sign"].tolist() == [1, -1] * count + [0] * (len(sample.lengths) % 2)
            for own, size in zip(of["number"][: 2 * count].tolist(), sample.lengths.tolist(), strict=False):
                assert size == sizes[(own - 100) // 2][own % 2] + 2
                seen.append(own)
        assert sorted(seen) == list(range(100, 108))
    assert pairs.place(0).startswith(f"{tmp_path / 'rows.json'}: row ")


def test_a_pair_with_an_answer_that_says_nothing_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 nothing to learn in an answer of the pair: row 2"):
        load(tmp_path, [plain(1, 2), plain(3, 0)], 40)


def test_preview_shows_both_answers(tmp_path: Path) -> None:
    load(tmp_path, [plain(1, 2)] * 3, 40)
    files = {"train_data_path": str(tmp_path / "rows.json"), "cache_dir": str(tmp_path / "cache")}
    data = DataConfig(dataset_type="raw", max_padding_length=40, **files)
    stream = io.StringIO()
    preview = Preview(data, TOKENIZER, pairs=True)
    preview.show_rows(terminal(stream))
    preview.show_statistics(terminal(stream))
    text = stream.getvalue()
    assert "row 1, chosen: 3 tokens and a last label, 2 learned" in text
    assert "row 1, rejected: 4 tokens and a last label, 3 learned" in text
    assert "3 of at most 40 tokens" in text
