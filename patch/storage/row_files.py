"""Which files of a folder hold the rows of a set: of a folder here, or of a snapshot of the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from patch.errors import DataError

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

    Raises:
        DataError: a folder that `save_to_disk` wrote lacks a file.
    """
    found = [file for file in files if file.suffix.lower() in DATA_SUFFIXES]
    found = [file for file in found if not _DESCRIPTION.fullmatch(file.name)]
    saved = {file.parent for file in found if file.suffix == _ARROW}
    states = {file for file in found if file.name == _STATE and file.parent in saved}
    found = sorted(file for file in found if file not in states and not _CACHE.fullmatch(file.name))
    for state in states:
        _check_complete(state, found)
    return [file for file in found if file.suffix.lower() not in TABLES] or found


def _check_complete(state: Path, found: list[Path]) -> None:
    try:
        listed = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):  # of another program
        return
    if missing := sorted({state.parent / name for name in listed}.difference(found)):
        raise DataError(f"{missing[0]} is missing, which {_STATE} beside it lists; copy the folder again")
