"""JSON lists, JSONL and joined JSON, whole and broken."""

import gzip
import json
import os
import random
import tracemalloc
from functools import partial
from pathlib import Path

import pyarrow
import pytest

from patch.data.readers import json_rows, read_rows
from patch.errors import DataError

ROWS = [{"a": 1}, {"b": "zwei"}, {"c": "三"}]
LAYOUTS = {
    "list": lambda rows: json.dumps(rows, indent=2, ensure_ascii=False),
    "lists": lambda rows: json.dumps(rows[:1], indent=2) + "\n" + json.dumps(rows[1:]),
    "lines": lambda rows: "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
    "joined": lambda rows: "".join(map(json.dumps, rows)),
    "pretty": lambda rows: "\n".join(json.dumps(row, indent=2) for row in rows),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "rows.data"
    path.write_bytes(data)
    return path


def values(path: Path) -> list:
    return [row.value for row in read_rows(path)]


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\n\n  ", b"\xef\xbb\xbf\r\n"])
@layouts
def test_rows_are_read_whatever_the_layout(tmp_path: Path, before: bytes, layout: str) -> None:
    assert values(write(tmp_path, before + LAYOUTS[layout](ROWS).encode() + b"\n\n")) == ROWS


@layouts
def test_rows_are_those_that_were_written_wherever_the_text_is_cut(tmp_path: Path, layout: str) -> None:
    """Brackets, quotes and escapes in strings, and rows longer than what is read at once."""
    texts = ['"', "\\", '\\"', '\\\\"', "}", "]", '"}', "\\\\", '{"a": [', "\\n\n", "\xa0三", "[" * 1000]
    pick = random.Random(0)
    rows = [{"all": pick.choices(texts, k=pick.randrange(1, 40)), "deep": [[], [{}]]} for _ in range(3000)]
    rows += [{"long": '\\"' * 400_000}, *rows[:9]]
    assert values(write(tmp_path, LAYOUTS[layout](rows).encode())) == rows


@pytest.mark.parametrize(
    ("data", "places"),
    [
        (b'[{"a": 1},\n{"b": 2}]', ["row 1", "row 2"]),
        (b'[{"a": 1}]\n[\n{"b": 2},\n{"c": 3}]', ["row 1", "row 2", "row 3"]),
        (b'{"a": 1}\n\n{"b": 2}\n', ["line 1", "line 3"]),
        (b'{"a":\n1}\n\n{\n"b": 2} {"c": 3}\n', ["line 1", "line 4", "line 5"]),
        # Lines that go on as joined objects.
        (b'{"a": 1}\n{"b":\n[{}, {}]}{"c": "}"}\n\n{"d": 1}', ["line 1", "line 2", "line 3", "line 5"]),
    ],
)
def test_places_count_from_one_and_blank_lines_count_too(tmp_path: Path, data: bytes, places: list) -> None:
    assert [row.place for row in read_rows(write(tmp_path, data))] == places


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"a": 1}\n{"a": }\n', "line 2: malformed JSON: unexpected character, expected a JSON value"),
        (b'{"a": 1}\n\n{"a": "\xff"}\n', "line 3: malformed JSON: got b'\\xff', which is not UTF-8; convert"),
        (b'{"a": 1}\n{"a": \n{"a": 1}\n', "line 2: malformed JSON: unexpected end of data; is the file cut"),
        (b'{"a": 1}\n{"a": \n{"a": 1}\n{"a": 2}\n' * 9, "line 4: malformed JSON: Expecting ',' delimiter"),
        pytest.param(b'{"a": 1}\n{"a": 1' + b"0" * 5000 + b"}", "line 2: malformed JSON: n", id="giant"),
        pytest.param(b'[{"a":\n-1' + b"0" * 5000 + b"}]", "line 2: malformed JSON", id="giant in a list"),
        (b'{"a": NaN}\n', "line 1: malformed JSON: got NaN, which is no JSON value; expected a"),
        (b'{\n"a":\n-Infinity}', "line 3: malformed JSON: got Infinity"),
        (b'{"a": 1},\n{"b": 2}', "line 1: malformed JSON: "),
        (b'{"a":\n1} 5 {"b":\n2}', "line 2: got a number, expected an object"),
        (b'{"a": "\\ud800"}', "line 1: malformed JSON: no low surrogate in string"),
        pytest.param(b'{"a":' * 5000, "line 1: malformed JSON: depth limit exceeded", id="deep"),
        ('[\n{"a": "三三"},\n{"a" 2}\n]'.encode(), "line 3: malformed JSON: Expecting ':' delimiter, got"),
        (b'\xef\xbb\xbf[\n{"a": 1},\n', "line 1: malformed JSON: unexpected end of data; is the"),
        (b'[{"a": 1},\n{"a": "\xff"}]', "line 2: malformed JSON: got b'\\xff', which is not UTF-8"),
        (b'[{"a": 1}\n{"a": 2}]', "line 2: malformed JSON: Expecting ',' delimiter, got"),
        (b'[{"a": 1},,{"a": 2}]', "line 1: malformed JSON: Expecting value, got ',"),
        (b'[{"a": 1},\n]', "line 2: malformed JSON: Expecting value, got ']'"),
        (b'[{"a": 1}, ["b"], {"a": 1}]', "row 2: got a list, expected an object"),
        (b"instruction,output\nhello,world\n", "begins with 'instruction,output\\nh', expected JSON"),
        (b'[{"a": 1},\n\0', "line 2: malformed JSON: Expecting value, got '\\x00"),
        (b"[]", "has no rows"),
    ],
    ids=repr,
)
def test_bad_file_names_file_and_place(tmp_path: Path, data: bytes, said: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(DataError) as caught:
        values(path)
    assert said in str(caught.value).removeprefix(f"{path}: ")


def test_rows_before_a_fault_are_given_first(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, b'{"a": 1}\n{"a": }\n'))
    assert next(rows).value == {"a": 1}
    with pytest.raises(DataError):
        next(rows)


@pytest.mark.timeout(60)
def test_what_is_no_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "pipe", "is a pipe or a device"),
        (Path("/dev/zero"), "is a pipe or a device"),
        (tmp_path / "absent.json", "cannot be read"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(DataError, match=f"{path}: {said}.*expected a file of rows"):
            values(path)


zstd = partial(pyarrow.compress, codec="zstd", asbytes=True)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
@pytest.mark.parametrize("begin", [b'{"a": "', b'[{"a": "', b'{"b":\n2}{"a": "', b'{"b": 1}\n{"a": "', b"["])
def test_text_over_the_limit_is_refused_while_it_is_read(tmp_path, monkeypatch, begin: bytes, pack) -> None:
    """Also of a file that is small until it is unpacked."""
    for limit in ("LONGEST_ROW", "LONGEST_TEXT"):
        monkeypatch.setattr(json_rows, limit, 1 << 20)
    path = write(tmp_path, pack(begin + b" " * (1 << 24) + b'"}]'))
    tracemalloc.start()
    with pytest.raises(DataError, match="line [12]: has more than 1048576 bytes, expected one JSON object"):
        values(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_memory_does_not_grow_with_a_file_of_lines(tmp_path: Path) -> None:
    path = write(tmp_path, LAYOUTS["lines"]([{"text": "word " * 1000}] * 4000).encode())  # 20 MB
    tracemalloc.start()
    assert sum(1 for _ in read_rows(path)) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
