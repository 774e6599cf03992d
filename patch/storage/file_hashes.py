"""SHA-256 of files' contents, remembered while the files stay as they are.

A remembered hash counts as long as the file's size, inode and both times (of its content and of its inode, in
nanoseconds) are the same. No program can set the time of the inode. A file that was changed less than two
seconds before is hashed, but not remembered, because a file system with coarse times could not tell the next
change.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from patch.storage.atomic import write_atomically
from patch.storage.text_files import read_json

_COARSE_NS = 2 * 10**9


class FileHashes:
    """The hashes of files, remembered in a folder.

    Args:
        folder: where they are remembered; it is created. If it cannot be written, nothing is remembered.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sha256(self, path: Path) -> str:
        """The hash of the file's content, in hexadecimal digits.

        Raises:
            OSError: the file cannot be read.
        """
        if (remembered := self.remembered(path)) is not None:
            return remembered
        state = _state(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        is_old = time.time_ns() - max(state["changed_ns"], state["inode_changed_ns"]) > _COARSE_NS
        if is_old and _state(path) == state:
            self._write(path, state, digest)
        return digest

    def remembered(self, path: Path) -> str | None:
        """The hash, if it is remembered and the file is still as it was. The file is not read."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            note = read_json(self._note(path))
            if note["state"] == _state(path):
                return note["sha256"]
        return None

    def remember(self, path: Path, digest: str) -> None:
        """Remember the hash of a file that the caller has just written, and that nothing else writes.

        Raises:
            OSError: the file does not exist.
        """
        self._write(path, _state(path), digest)

    def _note(self, path: Path) -> Path:
        name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
        return self._folder / f"{name}.json"

    def _write(self, path: Path, state: dict[str, int], digest: str) -> None:
        content = {"file": os.path.realpath(path), "state": state, "sha256": digest}
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._note(path), json.dumps(content) + "\n")


def _state(path: Path) -> dict[str, int]:
    found = path.stat()
    return {
        "bytes": found.st_size,
        "inode": found.st_ino,
        "changed_ns": found.st_mtime_ns,
        "inode_changed_ns": found.st_ctime_ns,
    }
