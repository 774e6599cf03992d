"""Looks at the first rows of a run's sets before any process starts; needs neither torch nor a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from patch.config.data_spec import files_of, parse_columns, parse_data
from patch.config.schema import DataConfig
from patch.data.formats import FormatOptions, to_conversation, to_pair
from patch.data.readers import read_rows
from patch.errors import about
from patch.storage.places import open_to_read

_MOST_FILES, _MOST_ROWS = 16, 4
_LARGEST_LIST = 1 << 26


def check_first_rows(data: DataConfig, *, pairs: bool) -> None:
    """Refuse a set of rows whose first rows a worker would refuse because of their format.

    Args:
        data: the run's sets.
        pairs: whether each row has two answers.

    Raises:
        DataError: a file cannot be read, or one of its first rows is of no known format.
    """
    options = FormatOptions(parse_columns(data.columns), data.alpaca_input_join)
    convert: Callable[..., object] = to_pair if pairs else to_conversation
    for field in ("train_data_path", "valid_data_path"):
        with about(field):
            text = getattr(data, field)
            for part in () if text is None else parse_data(text, field):
                for file in files_of(part.path, field)[:_MOST_FILES]:
                    if _is_large_list(file):
                        continue
                    for row in islice(read_rows(file), _MOST_ROWS):
                        convert(row.value, f"{file}: {row.place}", options)


def _is_large_list(file: Path) -> bool:
    """Whether a file is a JSON list of more than 64 MiB, which the workers check: it is held whole."""
    if not file.is_file() or file.stat().st_size <= _LARGEST_LIST:
        return False
    with open_to_read(file) as stream:
        return stream.read(64).lstrip()[:1] == b"["
