"""The index files that upstream makes for a pre-training run, kept as they were made.

They decide which document each sample comes from; upstream reads back whatever lies there. They follow from
data and seed alone, so one that has changed, or was half written by a killed run, is made again, to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patch.logger import get_logger
from patch.storage.checksums import Content, content, difference

_log = get_logger(__name__)

_RECORD = "checksums.json"


@contextmanager
def kept_as_made(folder: Path, split: str) -> Iterator[None]:
    """A block of one process in which upstream makes or reads the index files of one split (train, valid).

    What differs from its checksum, or has none, is removed before, so that upstream makes it again.

    Raises:
        OSError: a file cannot be removed, read or written.
    """
    known = _read(folder / _RECORD)
    for path in folder.glob(f"*-{split}-*.npy"):
        complaint = difference(path, known[path.name]) if path.name in known else f"{path} has no checksum"
        if complaint is not None:
            _log.warning("%s: the index files are made anew from data and seed, in the same order", complaint)
            path.unlink()
            known.pop(path.name, None)
    yield
    known |= {path.name: content(path) for path in folder.glob("*.npy") if path.name not in known}
    draft = folder / f"{_RECORD}.tmp"
    draft.write_text(json.dumps({name: known[name]._asdict() for name in sorted(known)}, indent=1) + "\n")
    draft.replace(folder / _RECORD)


def _read(path: Path) -> dict[str, Content]:
    """The checksums by file name; none where they cannot be read: then all files are made again."""
    try:
        return {name: Content(**held) for name, held in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
