"""Checks the index files that upstream writes for a pre-training run before upstream reads them again.

They decide which document each sample comes from, and upstream reads them without a check. They depend only
on data and seed, so a file that is damaged, or was half written by a killed run, is made again with the same
contents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patch.logger import get_logger
from patch.storage.atomic import write_atomically
from patch.storage.checksums import Content, content, difference, from_json, to_json
from patch.storage.names import CHECKSUMS_FILE
from patch.storage.text_files import read_json

_logger = get_logger(__name__)


@contextmanager
def kept_as_made(folder: Path, split: str) -> Iterator[None]:
    """A context in which upstream writes or reads the index files of one split; for one process only.

    On entry, files that have no checksum or differ from it are removed, so that upstream writes them again.
    On exit, the checksums of new files are stored.

    Args:
        folder: the folder of the index files.
        split: "train" or "valid", as in the files' names.

    Raises:
        OSError: a file cannot be removed, read or written.
    """
    checksums = folder / CHECKSUMS_FILE
    known = _read(checksums)
    for path in folder.glob(f"*-{split}-*.npy"):
        complaint = difference(path, known[path.name]) if path.name in known else f"{path} has no checksum"
        if complaint is not None:
            _logger.warning(
                "%s: the index files are made again from data and seed, in the same order", complaint
            )
            path.unlink()
            known.pop(path.name, None)
    yield
    known |= {path.name: content(path) for path in folder.glob("*.npy") if path.name not in known}
    write_atomically(checksums, json.dumps(to_json(known), indent=1) + "\n")


def _read(path: Path) -> dict[str, Content]:
    """The checksums by file name; empty if they cannot be read, so that all files are made again."""
    try:
        return from_json(read_json(path))
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
