"""Reads the rows of a parquet file, a batch of rows at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patch.errors import DataError

MAGIC = b"PAR1"
"""The first bytes of a parquet file."""

_ROWS_AT_ONCE = 128
"""Few, because compression hides how long the rows are."""


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and value of each row; memory holds one batch of rows, and one page of each column.

    A null in a struct, and in the row itself, is an absent key: parquet gives all rows the same keys. Dates,
    decimals and binary columns become Python's objects.

    Raises:
        DataError: the file is damaged or ends early, or two columns have one name.
        OSError: the file cannot be read.
    """
    from pyarrow.parquet import ParquetFile  # only parquet files need it

    number = 0
    try:
        # Threads would be in the way of forked workers; the buffer replaces reading whole columns.
        with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            _check_names(path, file.schema_arrow.names)
            for batch in file.iter_batches(_ROWS_AT_ONCE, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", {key: _without_nulls(value) for key, value in row.items()}
    except (DataError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - pyarrow has many errors for damaged data, ValueError among them
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"{path}: its parquet data is damaged or ends early after row {number} ({error!s:.300}); "
            "expected a whole file: copy or make it again"
        ) from error


def _check_names(path: Path, names: list[str]) -> None:
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
