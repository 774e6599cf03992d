"""Reads the rows of a table of text: CSV, or TSV. Its first row names the columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import BufferedReader
from itertools import chain
from pathlib import Path

from patch.data.readers.arrow_rows import check_names
from patch.data.readers.json_rows import LONGEST_ROW
from patch.data.readers.streams import NOT_UTF8
from patch.errors import DataError

_DELIMITERS = ",\t;"
"""Delimiters of CSV, of TSV, and of CSV where the comma is the decimal sign."""


def csv_rows(path: Path, stream: BufferedReader) -> Iterator[tuple[str, dict[str, str]]]:
    """Place and value of each row; memory holds one row. Every cell is a text.

    What separates the cells is the comma, tabulator or semicolon that the first line has most of. A cell in
    quotation marks may hold it, and line feeds; a quotation mark is doubled there.

    Args:
        path: the file, for messages.
        stream: its text in UTF-8.

    Raises:
        DataError: the text is not UTF-8, a row has not as many cells as the first one, a quotation mark is
            not closed, a cell is over 256 MiB, or two columns have one name.
    """
    csv.field_size_limit(LONGEST_ROW)
    lines = _lines(path, stream)
    first = next(lines, "")
    delimiter = max(_DELIMITERS, key=first.count)
    reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    names: list[str] = []
    line = 1
    try:
        for cells in reader:
            begin, line = line, reader.line_num + 1
            if not names:
                names = cells
                check_names(path, names)
            elif cells:
                if len(cells) != len(names):
                    raise DataError(
                        f"{path}: line {begin}: got {len(cells)} cells, expected {len(names)} as in the "
                        f"first row; a cell that holds {delimiter!r}, quotes or line ends stands in "
                        "quotation marks"
                    )
                yield f"line {begin}", dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise DataError(
            f"{path}: line {line}: malformed CSV: {error}; is a quotation mark not doubled or not closed?"
        ) from error


def _lines(path: Path, stream: BufferedReader) -> Iterator[str]:
    number = 0
    while data := stream.readline(LONGEST_ROW):
        number += 1
        try:
            yield data.decode()
        except UnicodeDecodeError as error:
            got = data[error.start : error.end]
            raise DataError(f"{path}: line {number}: malformed CSV: got {got!r}, {NOT_UTF8}") from error
