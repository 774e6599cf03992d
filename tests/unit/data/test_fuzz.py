"""Damaged files and templates, by the hundred and from a fixed seed: a DataError, or a right result."""

import json
import random
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from indexed_sets import consecutive, write_set
from small_runs import small_run

from patch.data.formats.rows import to_conversation
from patch.data.pretraining.dataset import load_training
from patch.data.pretraining.run_sets import PretrainOptions
from patch.data.readers.rows import read_rows
from patch.errors import DataError

SEED = 20
ROWS = [
    {"instruction": "hello", "input": "", "output": "world"},
    {"messages": [{"role": "user", "content": "\u4f60\u597d"}, {"role": "assistant", "content": "\n\n"}]},
    {"query": "2 + 2", "response": "4", "system": None, "id": 1.5e3, "more": [True, {"a": []}]},
]
# Pieces that mean something to a parser.
JSON_WORDS = rb'[ ] { } " \ \u \ud800 , : 1e999 null NaN - "role" "messages"'.split()
JSON_WORDS += [b"\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"[" * 2000, b'{"a":' * 2000]


def mutated(pick: random.Random, whole, words: list):
    """Bytes or text with one to four pieces cut out, doubled, moved, or replaced by a word."""
    for _ in range(pick.randint(1, 4)):
        start, end = sorted(pick.choices(range(len(whole) + 1), k=2))
        end = min(end, start + pick.choice((0, 1, 1, 8, 10**9)))
        place = pick.randint(0, len(whole))
        piece = pick.choice([pick.choice(words), whole[start:end], whole[:0]])
        whole = pick.choice([whole[:start] + piece + whole[end:], whole[:place] + piece + whole[place:]])
    return whole


def joined_values(text: str):
    """JSON values one after another, as Python's own json reads them."""
    place = 0
    while rest := text[place:].lstrip():
        value, end = json.JSONDecoder().raw_decode(rest)
        yield value
        place = len(text) - len(rest) + end


@pytest.mark.timeout(100)
def test_damaged_rows(tmp_path: Path) -> None:
    """What is read equals what Python's own json reads."""
    pick = random.Random(SEED)
    path = tmp_path / "rows"
    outcomes: Counter = Counter()
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    pretty = "\n".join(json.dumps(row, indent=1) for row in ROWS)
    files = [json.dumps(ROWS, indent=1).encode(), lines, pretty.encode()]
    for _ in range(400):
        data = mutated(pick, pick.choice(files), JSON_WORDS)
        path.write_bytes(data)
        try:
            rows = [row.value for row in read_rows(path)]
            conversations = [to_conversation(row, "row") for row in rows]
        except DataError as error:
            assert len(str(error)) < 5000
            outcomes["refused"] += 1
            continue
        text = data.decode("utf-8-sig")
        values = list(joined_values(text))
        is_list = text.lstrip().startswith("[")
        assert rows == (list(chain(*values)) if is_list else values), text
        assert all(set(message) == {"role", "content"} for each in conversations for message in each.messages)
        outcomes["read"] += 1
    assert outcomes["refused"] > 40 and outcomes["read"] > 40


@pytest.mark.timeout(100)
def test_damaged_sets(tmp_path: Path) -> None:
    """Every sample that is read is one of consecutive numbers, as they were written."""
    pick, run = random.Random(SEED), small_run(seq_length=8, vocab_size=250)
    prefix = tmp_path / "set"
    outcomes: Counter = Counter()
    write_set(prefix, consecutive([60, 0, 100, 41]))
    whole = {name: (tmp_path / name).read_bytes() for name in ("set.idx", "set.bin")}
    words = [bytes(4), bytes(8), b"\xff" * 4, b"\xff" * 8, b"\x01", b"\x02\0\0\0", b"\x80", b"\x08"]
    words += [np.int64(value).tobytes() for value in (1, 2, 3, 4, 240, 640, 2**31, 2**62, -(2**63))]
    for case in range(150):
        name = pick.choice(["set.idx", "set.idx", "set.bin"])
        data = bytearray(whole[name])
        if pick.random() < 0.3:
            data = mutated(pick, data, words)
        else:  # the size stays, so that more than the size is checked
            word = pick.choice(words)
            place = pick.randrange(len(data) - len(word))
            data[place : place + len(word)] = word
        for each in whole:
            (tmp_path / each).write_bytes(data if each == name else whole[each])
        try:
            options = PretrainOptions(run.data, run.model, None, 1234, tmp_path / f"index {case}")
            source = load_training([str(prefix)], None, options, lambda one_pass: 12)
            samples = [source[index] for index in range(len(source))]
        except DataError:
            outcomes["refused"] += 1
            continue
        for sample in samples:
            assert sample.loss_mask.all() and int(sample.labels.max()) < 250
            if name == "set.idx":
                steps = (sample.labels - sample.tokens).tolist()
                assert all(step in (1, -200) for step in steps), (case, data)
        outcomes["read"] += 1
    assert outcomes["refused"] > 15 and outcomes["read"] > 15


def test_keys_and_roles_of_any_size_and_number_are_named_in_part() -> None:
    """A search for the nearest name in 50 MB would take hours."""
    long = "instruction" * 5_000_000
    for row in (
        {long: "I", "output": "O"},
        {f"{long}{number}": number for number in range(3)} | {str(number): number for number in range(10**5)},
        {"messages": [{"role": long, "content": ""}]},
        {"messages": [{long: "user", "content": ""}]},
        {"prompt": "Q", "completion": "A", "tools": [{long: 1}]},
    ):
        with pytest.raises(DataError, match="instructioninstruction") as caught:
            to_conversation(row, "row")
        assert len(str(caught.value)) < 1500
