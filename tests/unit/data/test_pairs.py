"""Samples of a preferred and another answer, and their preview; the forms of rows are in answers.txt.

That tokens are TRL's: tests/unit/training/test_preference.py.
"""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama3_tokenizer import tiny_tokenizer

from patch.config.choices import RowKind
from patch.config.schema import DataConfig
from patch.data import collate
from patch.data.chat_templates import LLAMA3_CHAT_TEMPLATE
from patch.data.formats.turns import PLAIN
from patch.data.packing import PairSource, UnpairedSource, mismatched
from patch.data.preview.preview import Preview
from patch.data.preview.tokens import terminal
from patch.data.sft.source import SftSource, load_sft
from patch.errors import DataError

TOKENIZER = tiny_tokenizer(template=LLAMA3_CHAT_TEMPLATE)


def load(
    folder: Path, rows: list[dict[str, Any]], length: int, row_kind: RowKind = "pair", **own: Any
) -> SftSource:
    (folder / "rows.json").write_text(json.dumps(rows))
    return load_sft(folder / "rows.json", TOKENIZER, length, replace(PLAIN, **own), row_kind)


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


def test_dropped_pairs_are_not_to_be_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"raise --max-padding-length .* to \d+, or allow more"):
        load(tmp_path, [plain(1, 2), plain(11, 10)], 23, long_samples="drop")


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


def test_samples_of_labelled_answers_have_mismatched_ones_beside_them(tmp_path: Path) -> None:
    rows = [
        {"prompt": "x" * begin, "completion": "q" * size, "label": size > 3}
        for begin, size in ((1, 4), (9, 2), (2, 30))
    ]
    source = load(tmp_path, rows, 24, row_kind="unpaired")
    ids = [source.conversation(index)[0] for index in range(3)]
    prompts = [2, 10, 3]  # with begin of text
    others = [np.append(ids[i][: prompts[i]], ids[i - 1][prompts[i - 1] :])[:25] for i in range(3)]
    for is_packed in (False, True):
        samples = UnpairedSource(source, 24, is_packed=is_packed, first=10)
        assert len(samples) == 3, "with the answer of the third row the first fills one too"
        for sample in map(samples.__getitem__, range(3)):
            other, row = mismatched(collate([sample])), (int(sample.of_sequences["number"][0]) - 10) // 2
            assert sample.of_sequences["sign"][0] == (1 if rows[row]["label"] else -1)
            assert other.of_sequences["number"][0] == 11 + 2 * row
            whole = (ids[row], sample.tokens, sample.labels, sample.loss_mask)
            mixed = (others[row], other.tokens[0], other.labels[0], other.loss_mask[0])
            for expected, tokens, labels, mask in (whole, mixed):
                size = len(expected) - 1
                assert tokens[:size].tolist() == expected[:-1].tolist()
                assert labels[:size].tolist() == expected[1:].tolist()
                assert mask.nonzero().flatten().tolist() == [*range(prompts[row] - 1, size)]


def test_a_set_of_one_labelled_answer_is_refused(tmp_path: Path) -> None:
    source = load(tmp_path, [{"prompt": "x", "completion": "q", "label": True}], 24, row_kind="unpaired")
    with pytest.raises(DataError, match="row 1 is the only one with something to learn; expected another"):
        UnpairedSource(source, 24, is_packed=False)


def test_a_pair_with_an_answer_that_says_nothing_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 nothing to learn in an answer of the pair: row 2"):
        load(tmp_path, [plain(1, 2), plain(3, 0)], 40)


def preview_of(tmp_path: Path, rows: list[dict[str, Any]], kind: RowKind) -> str:
    load(tmp_path, rows, 40, row_kind=kind)
    files = {"train_data_path": str(tmp_path / "rows.json"), "cache_dir": str(tmp_path / "cache")}
    data = DataConfig(dataset_type="raw", max_padding_length=40, **files)
    stream = io.StringIO()
    preview = Preview(data, TOKENIZER, kind)
    preview.show_rows(terminal(stream))
    preview.show_statistics(terminal(stream))
    return stream.getvalue()


def test_preview_shows_both_answers(tmp_path: Path) -> None:
    text = preview_of(tmp_path, [plain(1, 2)] * 3, "pair")
    assert "row 1, chosen: 3 tokens and a last label, 2 learned" in text
    assert "row 1, rejected: 4 tokens and a last label, 3 learned" in text
    assert "3 of at most 40 tokens" in text


def test_preview_shows_labels(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "completion": "qq", "label": label} for label in (True, False)]
    text = preview_of(tmp_path, rows, "unpaired")
    assert "row 1: 4 tokens and a last label, 3 learned (75.0%)\n  desirable\n" in text
    assert "2 of at most 40 tokens" in text
