"""JSON lists, JSONL and joined JSON, whole and broken."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from patch.data.readers import json_rows, read_rows
from patch.data.readers.brackets import outermost_values
from patch.errors import DataError

ROWS = [{"a": 1}, {"b": "zwei"}, {"c": "三"}]


def write(folder: Path, data: bytes) -> Path:
    path = folder / "rows.data"
    path.write_bytes(data)
    return path


def as_list(rows: list) -> bytes:
    return json.dumps(rows, indent=2, ensure_ascii=False).encode()


def as_lines(rows: list) -> bytes:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()


def as_joined(rows: list) -> bytes:
    return b"".join(json.dumps(row).encode() for row in rows)


def as_pretty(rows: list) -> bytes:
    return "\n".join(json.dumps(row, indent=2, ensure_ascii=False) for row in rows).encode()


def as_lists(rows: list) -> bytes:
    return as_list(rows[:1]) + b"\n" + as_list(rows[1:])


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\n\n  ", b"\xef\xbb\xbf\r\n"])
@pytest.mark.parametrize("render", [as_list, as_lists, as_lines, as_joined, as_pretty])
def test_rows_are_read_whatever_the_layout(tmp_path: Path, before: bytes, render) -> None:
    path = write(tmp_path, before + render(ROWS) + b"\n\n")
    assert [row.value for row in read_rows(path)] == ROWS


def test_places_count_from_one_and_blank_lines_count_too(tmp_path: Path) -> None:
    assert [row.place for row in read_rows(write(tmp_path, as_list(ROWS)))] == ["row 1", "row 2", "row 3"]
    lines = write(tmp_path, b'{"a": 1}\n\n{"b": 2}\n')
    assert [row.place for row in read_rows(lines)] == ["line 1", "line 3"]
    pretty = write(tmp_path, b'{"a":\n1}\n\n{\n"b": 2} {"c": 3}\n')
    assert [row.place for row in read_rows(pretty)] == ["line 1", "line 4", "line 5"]
    lists = write(tmp_path, b'[{"a": 1}]\n[\n{"b": 2},\n{"c": 3}]')
    assert [row.place for row in read_rows(lists)] == ["row 1", "row 2", "row 3"]


def test_lines_may_go_on_as_joined_objects(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"a": 1}\n{"b":\n[{}, {}]}{"c": "}"}\n\n{"d": 1}')
    assert [tuple(row) for row in read_rows(path)] == [
        ("line 1", {"a": 1}),
        ("line 2", {"b": [{}, {}]}),
        ("line 3", {"c": "}"}),
        ("line 5", {"d": 1}),
    ]


@pytest.mark.parametrize("render", [as_list, as_lines, as_joined, as_pretty])
def test_brackets_and_quotes_in_strings_are_text(tmp_path: Path, render) -> None:
    texts = [
        '"',
        "\\",
        '\\"',
        '\\\\"',
        "}",
        "]",
        '"}',
        "\\\\",
        '{"a": [',
        "\\n\n",
        "[" * 1000,
        '\\"' * 40_000,
    ]
    rows = [{text: text + "x"} for text in texts] + [{"all": [texts, {"a": texts}]}]
    assert [row.value for row in read_rows(write(tmp_path, render(rows)))] == rows


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_values_are_cut_alike_whatever_the_pieces(size: int) -> None:
    rows = [{"a": '\\"}', "b": [[], {}]}, [1, ["]"]], {}, {"c\\": "\\\\"}]
    text = json.dumps(rows).encode()
    pieces = (text[start : start + size] for start in range(0, len(text), size))
    cut = list(outermost_values(pieces, 1, 1000))
    assert [json.loads(value) for _, value in cut[:-1]] == rows
    assert b"".join(between + value for between, value in cut) == text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"a": 1}\n{"a": }\n', "line 2: malformed JSON"),
        (b'{"a": 1}\n\n{"a": "\xff"}\n', "line 3: malformed JSON: got b'\\xff', which is not UTF-8; convert"),
        (b'{"a": 1}\n{"a": "cut\n{"a": 1}\n', "line 2: malformed JSON: "),
        (b'{"a": 1}\n{"a": 1', "line 2: malformed JSON: unexpected end of data; is the file cut off?"),
        (
            b'{"a": NaN}\n',
            "line 1: malformed JSON: got NaN, which is no JSON value; expected a",
        ),
        (b'{\n"a":\n-Infinity}', "line 3: malformed JSON (in the text that begins at line 1): got Infinity"),
        (b'{\n  "a": 1\n', "line 1: malformed JSON: unexpected end of data; is the file cut off?"),
        (
            b'{"a": 1}\n{"a": \n{"a": 1}\n',
            "line 2: malformed JSON: unexpected end of data; the line ends",
        ),
        (b'{"a": 1}\n{"a": \n\n', "line 2: malformed JSON: unexpected end of data; is the file cut off?"),
        (b'{"a": 1}}\n{"b": 2}', "line 1: malformed JSON: "),
        (b'{"a": 1},\n{"b": 2}', "line 1: malformed JSON: "),
        (b'{"a":\n1} 5 {"b":\n2}', "line 2: got a number, expected an object"),
        (b'{"a": "\\ud800"}', "line 1: malformed JSON: no low surrogate in string"),
        (b'[\n{"a": 1},\n{"a" 2}\n]', "line 3: malformed JSON"),
        ('[\n{"a": "三三"},\n{"a" 2}\n]'.encode(), "line 3: malformed JSON"),
        (b'\xef\xbb\xbf[\n{"a": 1},\n', "line 3: malformed JSON"),
        (b'[{"a": 1},\n{"a": 2}', "line 2: malformed JSON"),
        (b'[{"a": 1},\n{"a": "\xff"}]', "line 2: malformed JSON: got b'\\xff', which is not UTF-8"),
        (b'[{"a": 1}\n{"a": 2}]', "line 2: malformed JSON: got nothing, expected a comma between"),
        (b'[{"a": 1},,{"a": 2}]', "line 1: malformed JSON: got ',,', expected a comma between two rows"),
        (b'[{"a": 1},\n{"a": NaN}]', "line 2: malformed JSON: got NaN, which is no JSON value"),
        (b'[{"a": 1},\n]', "line 2: malformed JSON: got ',\\n]', expected a comma between two rows and ]"),
        (b'[{"a": 1}]\n{"a": 2}', "malformed JSON: got ']\\n{"),
        (b'[{"a": 1}]]', "line 1: malformed JSON: got ']]'"),
        (b"[", "line 1: malformed JSON: got the end of the file inside the list, expected"),
        (b'[{"a": 1}, "b", {"a": 1}]', "row 2: got a string, expected an object"),
        (b'[{"a": 1}, ["b"], {"a": 1}]', "row 2: got a list, expected an object"),
        (b'[{"a": 1}, nul]', "line 1: malformed JSON: "),
        (b"instruction,output\nhello,world\n", "begins with 'instruction,output\\nh', expected JSON"),
        (b'"text"', "begins with '\"text\"', expected JSON, which begins with [ or {, parquet or Arrow"),
        (b'{"a": 1}\n[1, 2]\n', "line 2: got a list, expected an object"),
        (b'{"a": 1}\n"text"\n', "line 2: got a string, expected an object"),
        (b'[{"a": 1}, null, {"a": 1}]', "row 2: got null, expected an object"),
        (b'[{"a": 1},\n\0', "line 2: malformed JSON: a zero byte"),
        (b'{"a": 1}\n\0\0\n', "line 2: malformed JSON"),
        (b"[1]", "row 1: got a number, expected an object"),
        (b"[]", "has no rows"),
        (b"", "has no rows"),
        (b" \n\n", "has no rows"),
    ],
)
def test_bad_file_names_file_and_place(tmp_path: Path, data: bytes, said: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            list(read_rows(path))


@pytest.mark.timeout(60)
def test_pipe_or_device_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(DataError, match=f"{path}: is a pipe or a device, expected"):
            list(read_rows(path))


def test_rows_before_a_bad_line_are_given_first(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, b'{"a": 1}\n{"a": }\n'))
    assert next(rows).value == {"a": 1}
    with pytest.raises(DataError):
        next(rows)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (b"", r"begins with '\\x00"),
        (b'{"a": 1}\n', "line 2: has more than 268435456 bytes"),
        (b'{"a":\n1}\n', "line 3: malformed JSON: a zero byte"),
        (b"[\n", "line 2: malformed JSON: a zero byte"),
    ],
)
def test_sparse_file_is_refused_without_holding_it(tmp_path: Path, begin: bytes, said: str) -> None:
    path = write(tmp_path, begin)
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match=f"{path}: {said}"):
        list(read_rows(path))


@pytest.mark.parametrize(
    "begin", [b'{"a": "', b'[{"a": "', b'{"b":\n2}{"a": "', b'{"b": 1}\n{"a": "', b"[\n", b"[1, "]
)
def test_row_over_the_limit_is_refused_while_it_is_read(tmp_path: Path, monkeypatch, begin: bytes) -> None:
    monkeypatch.setattr(json_rows, "LONGEST_ROW", 1 << 20)
    path = write(tmp_path, begin + b" " * (1 << 24) + b'"}]')
    tracemalloc.start()
    with pytest.raises(DataError, match="line [12]: has more than 1048576 bytes, expected one JSON object"):
        list(read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20


@pytest.mark.parametrize("render", [as_list, as_lines, as_joined])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, render) -> None:
    path = write(tmp_path, render([{"text": "word " * 1000}] * 4000))  # 20 MB
    tracemalloc.start()
    assert sum(1 for _ in read_rows(path)) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
