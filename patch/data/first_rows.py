"""Looks at the first rows of a run's sets before any process starts; needs neither torch nor a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from patch.config.data_spec import files_of, parse_columns, parse_data
from patch.config.schema import DataConfig
from patch.data.formats import FormatOptions, to_conversation, to_pair
from patch.data.readers import read_rows
from patch.errors import about

_MOST_FILES, _MOST_ROWS = 16, 4


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
                    for row in islice(read_rows(file), _MOST_ROWS):
                        convert(row.value, f"{file}: {row.place}", options)
