"""Reads the rows of a parquet file, or of an Arrow file or stream, a batch of rows at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patch.errors import DataError

_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
KINDS = {_PARQUET: "parquet", _ARROW_FILE: "Arrow", _ARROW_STREAM: "Arrow"}
"""The first bytes of these files. Hugging Face's `save_to_disk` writes streams."""

_ROWS_AT_ONCE = 128
"""Few, because compression hides how long the rows are."""
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def magic_of(head: bytes) -> bytes | None:
    """The first bytes by which a file is one of `KINDS`; None if it is none.

    Args:
        head: the beginning of the file.
    """
    return next((magic for magic in KINDS if head.startswith(magic)), None)


def arrow_rows(path: Path, magic: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and value of each row; memory holds few rows, of parquet also one page of each column.

    A null in a struct, and in the row itself, is an absent key: all rows have the same keys. Dates,
    decimals and binary columns become Python's objects.

    Args:
        path: the file.
        magic: of `magic_of`.

    Raises:
        DataError: the file is damaged or ends early, or two columns have one name.
        OSError: the file cannot be read.
    """
    number = 0
    try:
        for batch in _parquet_batches(path) if magic == _PARQUET else _arrow_batches(path, magic):
            check_names(path, batch.schema.names)
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", {key: _without_nulls(value) for key, value in row.items()}
    except (DataError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - pyarrow has many errors for damaged data, ValueError among them
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"{path}: its {KINDS[magic]} data is damaged or ends early after row {number} ({error!s:.300}); "
            "expected a whole file: copy or make it again"
        ) from error


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile  # only parquet files need it

    # Threads would be in the way of forked workers; the buffer replaces reading whole columns.
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        yield from file.iter_batches(_ROWS_AT_ONCE, use_threads=False)


def _arrow_batches(path: Path, magic: bytes) -> Iterator[Any]:
    import pyarrow  # only these files need it

    # Mapped: a batch may be the whole file.
    with pyarrow.memory_map(str(path)) as file:
        if magic == _ARROW_STREAM:
            _check_end(file)
            batches: Any = pyarrow.ipc.open_stream(file)
        else:
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            batch.validate(full=True)  # damaged offsets would lead anywhere in memory
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield batch.slice(start, _ROWS_AT_ONCE)


def _check_end(file: Any) -> None:
    """Refuse a stream without its end: pyarrow takes one that is cut between two batches as whole."""
    if file.read_at(len(_STREAM_END), max(0, file.size() - len(_STREAM_END))) != _STREAM_END:
        raise ValueError("the end of the stream is missing")


def check_names(path: Path, names: list[str]) -> None:
    """Refuse two columns of one name, of which a row could have only one.

    Raises:
        DataError: there are such.
    """
    doubled = [name for name, count in Counter(names).items() if count > 1]
    if doubled:
        raise DataError(f"{path}: has two columns {doubled[0]!r}, expected a name for each column")


def _without_nulls(value: Any) -> Any:
    """A struct has every field that any row has; the ones that this row lacks are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
