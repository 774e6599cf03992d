"""Which files of a folder hold the rows of a set: of a folder here, or of a snapshot of the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from patch.errors import DataError
from patch.storage.text_files import read_json

TABLES = (".csv", ".tsv")
DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".gz", ".zst", *TABLES)
"""The endings of the files that are read from a folder. The format of a file is found by its content."""

_ARROW = ".arrow"
_STATE = "state.json"
_DESCRIPTION = re.compile(r"(dataset_infos?|dataset_dict|\..*)\.json")
"""What Hugging Face's datasets writes beside rows; state.json only beside Arrow files."""
_CACHE = re.compile(r"cache-.*\.arrow")
"""Results of `map` and `filter`, which datasets keeps beside a set that was loaded from a folder."""


def row_files(files: Iterable[Path]) -> list[Path]:
    """Those files of a folder that hold its rows, sorted.

    Not those that describe a set, nor caches. Tables of text only where nothing else has rows: they are often
    lists of something else.
    """
    found = [file for file in files if file.suffix.lower() in DATA_SUFFIXES]
    found = [file for file in found if not _DESCRIPTION.fullmatch(file.name)]
    saved = {file.parent for file in found if file.suffix == _ARROW}
    found = sorted(
        file
        for file in found
        if not (_CACHE.fullmatch(file.name) or (file.name == _STATE and file.parent in saved))
    )
    return [file for file in found if file.suffix.lower() not in TABLES] or found


def check_saved(files: Sequence[Path], field: str | None = None) -> None:
    """Check that a folder has all files that `save_to_disk` wrote.

    Args:
        files: all files of the folder.
        field: the field of the configuration that holds it, for messages.

    Raises:
        DataError: one is missing.
    """
    for state in (file for file in files if file.name == _STATE):
        try:
            listed = [state.parent / entry["filename"] for entry in read_json(state)["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError):  # of another program
            continue
        if missing := sorted({*listed}.difference(files)):
            raise DataError(
                f"{missing[0]} is missing, which {_STATE} beside it lists; copy the folder again", field=field
            )
