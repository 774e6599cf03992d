"""The index files that upstream makes for a pre-training run, checked before they are read.

They decide which document each sample comes from; upstream reads back whatever lies there. They follow from
data and seed alone, so one that has changed, or was half written by a killed run, is made again, to the bit.
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

_logger = get_logger(__name__)


@contextmanager
def kept_as_made(folder: Path, split: str) -> Iterator[None]:
    """A block of one process in which upstream makes or reads the index files of one split (train, valid).

    What differs from its checksum, or has none, is removed before, so that upstream makes it again.

    Raises:
        OSError: a file cannot be removed, read or written.
    """
    checksums = folder / CHECKSUMS_FILE
    known = _read(checksums)
    for path in folder.glob(f"*-{split}-*.npy"):
        complaint = difference(path, known[path.name]) if path.name in known else f"{path} has no checksum"
        if complaint is not None:
            _logger.warning(
                "%s: the index files are made anew from data and seed, in the same order", complaint
            )
            path.unlink()
            known.pop(path.name, None)
    yield
    known |= {path.name: content(path) for path in folder.glob("*.npy") if path.name not in known}
    write_atomically(checksums, json.dumps(to_json(known), indent=1) + "\n")


def _read(path: Path) -> dict[str, Content]:
    """The checksums by file name; none where they cannot be read: then all files are made again."""
    try:
        return from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
