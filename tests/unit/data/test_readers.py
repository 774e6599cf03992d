"""Files of rows of any size and kind: JSON, compressed, tables, and what is none of these.

Small files of text, whole and broken, are in answers.txt.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import random
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from patch.config.data_spec import files_of
from patch.data.formats.rows import to_conversation
from patch.data.readers import json_rows
from patch.data.readers.rows import read_rows
from patch.errors import DataError

ROWS = [{"a": 1}, {"b": "zwei", "c": [{"d": "\u4e09"}]}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
LIST = json.dumps(ROWS).encode()


def write(folder: Path, data: bytes) -> Path:
    path = folder / "rows.json"  # the name never says the kind
    path.write_bytes(data)
    return path


def values(path: Path) -> list:
    return [row.value for row in read_rows(path)]


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, "zstd", asbytes=True)


PACKERS = [gzip.compress, zstd]
LAYOUTS = {
    "list": lambda rows: json.dumps(rows, indent=2, ensure_ascii=False),
    "lists": lambda rows: json.dumps(rows[:1], indent=2) + "\n" + json.dumps(rows[1:]),
    "lines": lambda rows: "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
    "joined": lambda rows: "".join(map(json.dumps, rows)),
    "pretty": lambda rows: "\n".join(json.dumps(row, indent=2) for row in rows),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_that_were_written_wherever_the_text_is_cut(tmp_path: Path, layout: str) -> None:
    """Brackets, quotes and escapes in strings, and rows longer than what is read at once."""
    texts = ['"', "\\", '\\"', '\\\\"', "}", "]", '"}', "\\\\", '{"a": [', "\\n\n", "\xa0三", "[" * 1000]
    pick = random.Random(0)
    rows = [{"all": pick.choices(texts, k=pick.randrange(1, 40)), "deep": [[], [{}]]} for _ in range(3000)]
    rows += [{"long": '\\"' * 400_000}, *rows[:9]]
    assert values(write(tmp_path, LAYOUTS[layout](rows).encode())) == rows
    for before in (b"\xef\xbb\xbf", b"\n\n  ", b"\xef\xbb\xbf\r\n"):
        assert values(write(tmp_path, before + LAYOUTS[layout](ROWS).encode() + b"\n\n")) == ROWS


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"a": 1}\n{"a": 1' + b"0" * 5000 + b"}", "line 2: malformed JSON: n"),
        (b'[{"a":\n-1' + b"0" * 5000 + b"}]", "line 2: malformed JSON"),
        (b'{"a":' * 5000, "line 1: malformed JSON: depth limit exceeded"),
        (b'{"a": 1}\n{"a": \n{"a": 1}\n{"a": 2}\n' * 9, "line 4: malformed JSON: Expecting ',' delimiter"),
    ],
    ids=["giant", "giant in a list", "deep", "joined"],
)
def test_number_or_nesting_without_end_names_the_line(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(DataError, match=f"rows.json: {said}"):
        values(write(tmp_path, data))


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


@pytest.mark.parametrize("pack", [bytes, *PACKERS])
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


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("data", [LIST, LINES, b"\xef\xbb\xbf" + LINES])
def test_compressed_files_are_read_like_others(tmp_path: Path, pack, data: bytes) -> None:
    places = [row.place for row in read_rows(write(tmp_path, data))]
    half = len(data) // 2  # a row may lie in two members
    for packed in (pack(data), pack(data[:half]) + pack(data[half:]) + pack(b"")):
        read = list(read_rows(write(tmp_path, packed)))
        assert [row.value for row in read] == ROWS
        assert [row.place for row in read] == places


@pytest.mark.parametrize(("pack", "name"), [(gzip.compress, "gzip"), (zstd, "zstd")])
def test_compressed_data_that_is_cut_or_damaged_is_refused(tmp_path: Path, pack, name: str) -> None:
    whole = pack(LINES * 1000)
    for cut in (9, len(whole) // 2, len(whole) - 1):
        with pytest.raises(DataError, match=f"its {name} data ends early (in|after) .*; expected a whole"):
            values(write(tmp_path, whole[:cut]))
    for wrong in (whole + b"tail", whole[:8] + b"\xff" * 8 + whole[16:]):
        with pytest.raises(DataError, match=f"its {name} data is damaged (in|after) .*; expected a whole"):
            values(write(tmp_path, wrong))


def test_zstd_that_asks_for_much_memory_is_refused(tmp_path: Path) -> None:
    # A frame of one block, which is not compressed, with a window of 2**30 bytes (RFC 8878).
    data = b"\x28\xb5\x2f\xfd\0\xa0" + (len(LINES) << 3 | 1).to_bytes(3, "little") + LINES
    with pytest.raises(DataError, match="its zstd data .*requires too much memory"):
        values(write(tmp_path, data))


def parquet(table: pyarrow.Table, at_once: int) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, row_group_size=at_once)
    return sink.getvalue().to_pybytes()


def arrow_file(table: pyarrow.Table, at_once: int, new: Callable[..., Any] = pyarrow.ipc.new_file) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with new(sink, table.schema) as opened:
        opened.write_table(table, max_chunksize=at_once)
    return sink.getvalue().to_pybytes()


def arrow_stream(table: pyarrow.Table, at_once: int) -> bytes:
    """As Hugging Face's `save_to_disk` writes them."""
    return arrow_file(table, at_once, pyarrow.ipc.new_stream)


FORMS = [parquet, arrow_file, arrow_stream]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("at_once", [90, 1000])
def test_tables_of_values_are_rows(tmp_path: Path, form, at_once: int) -> None:
    """Over row groups and batches. A null inside a column is an absent key; values are Python's."""
    rows = [{"text": f"row {index}", "turns": [{"role": "user", "n": index}]} for index in range(500)]
    rows[7]["turns"] = [{"role": "user"}, {"n": 3, "deep": [{"p": 1}, {}]}]
    rows = [{**row, "day": date(2026, 1, 2), "image": b"\0\xff", "none": None} for row in rows]
    table = pyarrow.Table.from_pylist(rows)
    table = table.set_column(0, "text", table["text"].dictionary_encode())
    read = list(read_rows(write(tmp_path, form(table, at_once))))
    assert [row.value for row in read] == rows
    assert [read[0].place, read[-1].place] == ["row 1", "row 500"]


@pytest.mark.parametrize("form", FORMS)
def test_table_that_is_cut_damaged_or_none_is_refused(tmp_path: Path, form) -> None:
    """Also between two batches; and where offsets lead out of the data, which pyarrow would follow."""
    table = pyarrow.table({"a": [f"row {index}" for index in range(1000)]})
    whole = form(table, 250)
    said = "data is damaged or ends early after row 0 "
    for size in (4, 9, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        with pytest.raises(DataError, match=said if size > 4 else f"{said}|begins with"):
            values(write(tmp_path, whole[:size]))
    offsets = pyarrow.array([0, 5, 10], pyarrow.int32()).buffers()[1].to_pybytes()[:12]
    if form in (arrow_file, arrow_stream):
        with pytest.raises(DataError, match=said):
            values(write(tmp_path, whole.replace(offsets, offsets[:4] + b"\x7f" * 4 + offsets[8:], 1)))
    with pytest.raises(DataError, match="has no rows, expected at least one"):
        values(write(tmp_path, form(table[:0], 9)))
    doubled = pyarrow.Table.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"])
    with pytest.raises(DataError, match="two columns are named 'a', expected unique names"):
        values(write(tmp_path, form(doubled, 9)))


_SAVES = """
import json, sys
from pathlib import Path
import datasets
folder = Path(sys.argv[1])
saved = datasets.Dataset.from_list(json.loads(sys.argv[2]), on_mixed_types="use_json")
saved.save_to_disk(folder / "saved", num_shards=2)
again = datasets.load_from_disk(folder / "saved").filter(lambda row: "3" not in str(row))
again.save_to_disk(folder / "filtered")
datasets.DatasetDict(train=saved, test=again).save_to_disk(folder / "both")
print(json.dumps([list(saved), list(again)]))
"""


def test_what_datasets_saves_is_read_as_it_reads_it(tmp_path: Path) -> None:
    """Folders of the real library: in two files, filtered, of several splits, with values of mixed types."""
    packages = os.environ.get("TRL", "")
    if not packages and find_spec("datasets") is None:
        pytest.skip("the package datasets is not installed, nor in a folder that TRL names (.ci/run)")
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": "one", "y": [2]}}]
    rows = [
        {"messages": [{"role": "user", "content": f"Q{index}"}, {"role": "assistant", "tool_calls": [call]}]}
        for index in range(5)
        for call in calls
    ]
    environ = {**os.environ, "PYTHONPATH": packages, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", _SAVES, str(tmp_path), json.dumps(rows)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    saved, again = json.loads(done.stdout.splitlines()[-1])
    assert any(file.name.startswith("cache-") for file in (tmp_path / "saved").iterdir())
    sets = {"saved": saved, "filtered": again, "both/train": saved, "both/test": again}
    for name, expected in sets.items():
        files = files_of(str(tmp_path / name))
        assert len(files) == (2 if name == "saved" else 1)
        read = [to_conversation(row, name).messages for path in files for row in values(path)]
        assert read == [to_conversation(row, name).messages for row in expected]
    with pytest.raises(DataError, match=f"several splits: training .*, such as '{tmp_path}/both/train'"):
        files_of(str(tmp_path / "both"))


TABLE = [
    {"instruction": "I", "input": "a, b", "output": 'she said "no"'},
    {"instruction": "\u95ee", "input": "", "output": "two\nlines\n\nof\ttext; 3"},
    {"instruction": "J", "input": "1", "output": "O"},
]


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
@pytest.mark.parametrize("pack", [bytes, *PACKERS])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_tables_of_text_are_rows(tmp_path: Path, delimiter: str, pack, end: str) -> None:
    """The oracle is Python's own writer; `bytes` packs nothing."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(TABLE[0]), delimiter=delimiter, lineterminator=end)
    writer.writeheader()
    writer.writerows(TABLE)
    path = tmp_path / ("rows.tsv.gz" if delimiter == "\t" else "rows.CSV")
    path.write_bytes(pack(b"\xef\xbb\xbf" + (text.getvalue() + end).encode()))
    read = list(read_rows(path))
    assert [row.value for row in read] == TABLE
    assert [row.place for row in read] == ["line 2", "line 3", "line 7"]


def tar(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("rows.json")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("rows.json", data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (LINES.decode().encode("utf-16"), "is UTF-16 text, expected UTF-8; convert it: iconv -f UTF-16"),
        (LIST.decode().encode("utf-16-be"), "is UTF-16BE text, expected UTF-8"),
        (gzip.compress(LIST.decode().encode("utf-32-be")), "is UTF-32BE text"),
        (zipped(LINES), "is a zip archive, or the workbook of a spreadsheet; unpack it, or save the"),
        (gzip.compress(tar(LINES)), "is a tar archive; unpack it"),
        (gzip.compress(gzip.compress(LINES)), "is compressed twice"),
        (bz2.compress(LINES), "is compressed by bzip2; unpack it, or use gzip or zstd"),
        (lzma.compress(LINES), "is compressed by xz"),
        (pickle.dumps(ROWS), "is a Python pickle"),
        (gzip.compress(parquet(pyarrow.table({"a": [1]}), 9)), "is a compressed parquet file or stream;"),
        (gzip.compress(arrow_stream(pyarrow.table({"a": [1]}), 9)), "is a compressed Arrow file or stream;"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip's bytes hold the time
)
def test_other_kinds_are_named(tmp_path: Path, data: bytes, said: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(DataError) as caught:
        values(path)
    assert str(caught.value).startswith(f"{path}: {said}")
