"""Which kind a file is, by its bytes: compressed, parquet, other encodings, and what is none of these."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import tarfile
import tracemalloc
import zipfile
import zlib
from datetime import date
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from patch.config.data_spec import files_of
from patch.data.readers import json_rows, read_rows
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


PACKERS = [gzip.compress, zstandard.compress]


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("data", [LIST, LINES, b"\xef\xbb\xbf" + LINES])
def test_compressed_files_are_read_like_others(tmp_path: Path, pack, data: bytes) -> None:
    path = write(tmp_path, pack(data))
    assert values(path) == ROWS
    places = [row.place for row in read_rows(path)]
    assert places == [row.place for row in read_rows(write(tmp_path, data))]


@pytest.mark.parametrize("pack", PACKERS)
def test_all_members_are_read(tmp_path: Path, pack) -> None:
    half = len(LINES) // 2  # a row may lie in two members
    data = pack(LINES[:half]) + pack(LINES[half:]) + pack(b"") + pack(LINES)
    assert values(write(tmp_path, data)) == ROWS + ROWS


@pytest.mark.parametrize(("pack", "name"), [(gzip.compress, "gzip"), (zstandard.compress, "zstd")])
def test_compressed_data_that_is_cut_or_damaged_is_refused(tmp_path: Path, pack, name: str) -> None:
    whole = pack(LINES * 1000)
    for cut in (9, len(whole) // 2, len(whole) - 1):
        with pytest.raises(DataError, match=f"its {name} data ends early (in|after) .*; expected a whole"):
            values(write(tmp_path, whole[:cut]))
    for wrong in (whole + b"tail", whole[:8] + b"\xff" * 8 + whole[16:]):
        with pytest.raises(DataError, match=f"its {name} data is damaged (in|after) .*; expected a whole"):
            values(write(tmp_path, wrong))


def test_data_that_is_cut_names_the_last_row_that_was_read(tmp_path: Path) -> None:
    """Up to a buffer's length before the place where it is cut."""
    data = b"".join(b'{"text": "%x"}\n' % (n**9 % 2**64) for n in range(1, 30_000))
    half = gzip.compress(data, 1)[: len(data) // 4]
    readable = zlib.decompressobj(31).decompress(half)
    with pytest.raises(DataError) as caught:
        values(write(tmp_path, half))
    (last,) = re.findall(r"ends early after line (\d+) \(", str(caught.value))
    least = readable[: len(readable) - 2**18].count(b"\n")
    assert 1 < least <= int(last) <= readable.count(b"\n")


def test_checksum_of_gzip_is_checked(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(LINES))
    whole[-6] ^= 1
    with pytest.raises(DataError, match="its gzip data is damaged .*incorrect data check"):
        values(write(tmp_path, bytes(whole)))


def test_malformed_row_of_a_compressed_file_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows.json: line 3: malformed JSON: got NaN"):
        values(write(tmp_path, gzip.compress(LINES + b'{"a": NaN}\n')))


@pytest.mark.parametrize("pack", PACKERS)
def test_bomb_is_refused_while_it_is_read(tmp_path: Path, monkeypatch, pack) -> None:
    """30 MB of one row, of which a limit of 1 MiB lets little be unpacked."""
    monkeypatch.setattr(json_rows, "_LONGEST_ROW", 1 << 20)
    path = write(tmp_path, pack(b'{"a": "' + b"x" * 30_000_000))
    tracemalloc.start()
    with pytest.raises(DataError, match="line 1: has more than 1048576 bytes"):
        values(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_zstd_that_asks_for_much_memory_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30)
    data = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(DataError, match="its zstd data .*requires too much memory"):
        values(write(tmp_path, data.compress(LINES) + data.flush()))


def parquet(path: Path, rows: list, **options) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd"])
def test_parquet_rows_are_read_over_row_groups(tmp_path: Path, compression: str) -> None:
    rows = [{"text": f"row {index}", "turns": [{"role": "user", "n": index}]} for index in range(500)]
    path = parquet(tmp_path / "rows.json", rows, compression=compression, row_group_size=90)
    read = list(read_rows(path))
    assert [row.value for row in read] == rows
    assert [read[0].place, read[-1].place] == ["row 1", "row 500"]


def test_nulls_inside_the_columns_of_parquet_are_absent_keys(tmp_path: Path) -> None:
    rows = [
        {"a": "x", "call": {"city": "Ulm"}, "list": [1, None]},
        {"a": None, "call": {"unit": "C", "deep": [{"p": 1}, {"q": None}]}, "list": None},
    ]
    path = parquet(tmp_path / "rows", rows)
    rows[1]["call"]["deep"][1] = {}
    assert values(path) == rows


def test_other_types_of_parquet_become_python_objects(tmp_path: Path) -> None:
    rows = [{"text": "x", "day": date(2026, 1, 2), "image": b"\0\xff", "score": 0.5, "ok": True}]
    assert values(parquet(tmp_path / "rows", rows)) == rows
    column = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "rows")
    assert [row["text"] for row in values(tmp_path / "rows")] == ["a", "b", "a"]


def test_parquet_that_cannot_be_rows_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows", [{"a": index} for index in range(1000)])
    whole = path.read_bytes()
    for wrong in (whole[:-1], whole[: len(whole) // 2], whole[:4], whole[:-40] + b"\xff" * 32 + whole[-8:]):
        with pytest.raises(DataError, match="its parquet data is damaged or ends early after row 0 "):
            values(write(tmp_path, wrong))
    with pytest.raises(DataError, match="rows: has no rows, expected at least one"):
        values(parquet(path, [{"a": 1}][:0]))
    with pytest.raises(DataError, match="has no rows"):
        pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.string())}), path)
        values(path)
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"]), path)
    with pytest.raises(DataError, match="has two columns 'a', expected a name for each column"):
        values(path)


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


def arrow_file() -> bytes:
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"a": [1]})
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def arrow_stream() -> bytes:
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"a": [1]})
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            LINES.decode().encode("utf-16"),
            "is UTF-16 text, expected UTF-8; convert it: iconv -f UTF-16",
        ),
        (LINES.decode().encode("utf-16-le"), "is UTF-16LE text, expected UTF-8"),
        (LIST.decode().encode("utf-16-be"), "is UTF-16BE text, expected UTF-8"),
        (LINES.decode().encode("utf-32"), "is UTF-32 text, expected UTF-8"),
        (LIST.decode().encode("utf-32-le"), "is UTF-32LE text, expected UTF-8"),
        (LIST.decode().encode("utf-32-be"), "is UTF-32BE text, expected UTF-8"),
        (gzip.compress(LINES.decode().encode("utf-16")), "is UTF-16 text, expected UTF-8"),
        (zipped(LINES), "is a zip archive; unpack it; expected JSON, JSONL or parquet"),
        (tar(LINES), "is a tar archive; unpack it"),
        (gzip.compress(tar(LINES)), "is a tar archive; unpack it"),
        (gzip.compress(gzip.compress(LINES)), "is compressed twice"),
        (bz2.compress(LINES), "is compressed by bzip2; unpack it, or use gzip or zstd"),
        (lzma.compress(LINES), "is compressed by xz"),
        (pickle.dumps(ROWS), "is a Python pickle"),
        (arrow_file(), "is an Arrow file, perhaps of datasets.save_to_disk; use Dataset.to_parquet"),
        (arrow_stream(), "is an Arrow stream, perhaps of datasets.save_to_disk; use Dataset.to_parquet"),
        (b"<!DOCTYPE html>", "begins with '<!DOCTYPE html>', expected JSON, which begins with"),
        (b"version https://git-lfs.github.com/spec/v1\n", "begins with 'version https://git-"),
        (gzip.compress(b""), "has no rows, expected at least one JSON object"),
        (b"\xef\xbb\xbf", "has no rows, expected at least one JSON object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip's bytes hold the time
)
def test_other_kinds_are_named(tmp_path: Path, data: bytes, said: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(DataError) as caught:
        values(path)
    assert str(caught.value).startswith(f"{path}: {said}")


def test_compressed_parquet_is_named(tmp_path: Path) -> None:
    data = gzip.compress(parquet(tmp_path / "rows", ROWS).read_bytes())
    with pytest.raises(DataError, match="is a compressed parquet file, .*; unpack it"):
        values(write(tmp_path, data))


@pytest.mark.parametrize("name", ["alpaca_en_demo", "alpaca_zh_demo", "glaive_toolcall_en_demo"])
def test_real_sets_are_the_same_in_every_form(tmp_path: Path, shared_data: Path, name: str) -> None:
    rows = json.loads((shared_data / f"{name}.json").read_bytes())
    (tmp_path / "1.json").write_bytes((shared_data / f"{name}.json").read_bytes())
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress(lines, 1))
    (tmp_path / "3.json.zst").write_bytes(zstandard.compress("".join(map(json.dumps, rows)).encode()))
    parquet(tmp_path / "4.parquet", rows)
    files = files_of(str(tmp_path))
    assert len(files) == 4
    for path in files:
        assert values(path) == rows, path
