"""JSON lists and JSONL, whole and broken."""

import json
import os
from pathlib import Path

import pytest

from patch.data.readers import read_rows
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


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\n\n  ", b"\xef\xbb\xbf\r\n"])
@pytest.mark.parametrize("render", [as_list, as_lines])
def test_rows_are_read_whatever_the_layout(tmp_path: Path, before: bytes, render) -> None:
    path = write(tmp_path, before + render(ROWS) + b"\n\n")
    assert [row.value for row in read_rows(path)] == ROWS


def test_places_count_from_one_and_blank_lines_count_too(tmp_path: Path) -> None:
    assert [row.place for row in read_rows(write(tmp_path, as_list(ROWS)))] == ["row 1", "row 2", "row 3"]
    lines = write(tmp_path, b'{"a": 1}\n\n{"b": 2}\n')
    assert [row.place for row in read_rows(lines)] == ["line 1", "line 3"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"a": 1}\n{"a": }\n', "line 2: malformed JSON"),
        (b'{"a": 1}\n\n{"a": "\xff"}\n', "line 3: malformed JSON: not UTF-8"),
        (b'{\n  "a": 1\n}\n', "line 1: malformed JSON"),
        (b'[\n{"a": 1},\n{"a" 2}\n]', "line 3: malformed JSON"),
        ('[\n{"a": "三三"},\n{"a" 2}\n]'.encode(), "line 3: malformed JSON"),
        (b'\xef\xbb\xbf[\n{"a": 1},\n', "line 3: malformed JSON"),
        (b'[{"a": 1},\n{"a": 2}', "line 2: malformed JSON"),
        (b'[{"a": 1},\n{"a": "\xff"}]', "line 2: malformed JSON: not UTF-8"),
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
        (b"", "line 1: has more than 268435456 bytes"),
        (b"[\n", "line 2: malformed JSON: a zero byte"),
    ],
)
def test_sparse_file_is_refused_without_holding_it(tmp_path: Path, begin: bytes, said: str) -> None:
    path = write(tmp_path, begin)
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match=f"{path}: {said}"):
        list(read_rows(path))
