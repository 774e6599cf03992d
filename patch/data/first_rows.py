"""Check of the first rows of a run's data sets before any process starts, without torch or a tokenizer."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from patch.config.choices import RowKind
from patch.config.data_spec import files_of, sets_of
from patch.config.schema import DataConfig
from patch.data.formats.rows import read_row
from patch.data.readers.rows import read_rows
from patch.errors import about
from patch.storage.places import open_to_read

_MOST_FILES, _MOST_ROWS = 16, 4
_LARGEST_LIST = 1 << 26


def check_first_rows(data: DataConfig, row_kind: RowKind) -> None:
    """Refuse a data set whose first rows have a format that a worker would refuse.

    Raises:
        DataError: a file cannot be read, or one of its first rows has no known format.
    """
    for field, parts in sets_of(data).items():
        with about(field):
            for part in parts:
                for file in files_of(part.path)[:_MOST_FILES]:
                    if _is_large_list(file):
                        continue
                    for row in islice(read_rows(file), _MOST_ROWS):
                        read_row(row_kind, row.value, f"{file}: {row.place}", data)


def _is_large_list(file: Path) -> bool:
    """Return whether a file is a JSON list over 64 MiB. Only workers check it: memory holds a list whole."""
    if not file.is_file() or file.stat().st_size <= _LARGEST_LIST:
        return False
    with open_to_read(file) as stream:
        return stream.read(64).lstrip()[:1] == b"["
