"""Files and folders that appear whole or not at all, whatever ends the process or the machine.

Each is written under another name beside its own. Its bytes are on the disk before it gets its name, so that
a name never stands for a part.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from patch.logger import get_logger

_logger = get_logger(__name__)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, or replace it at once: on an error the file that was there stays as it was.

    Args:
        content: text is written as UTF-8.

    Raises:
        OSError: it cannot be written, as on a full disk.
    """
    draft = path.with_name(f"{path.name}.tmp")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        publish_file(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def publish_file(draft: Path, path: Path) -> None:
    """Give a finished file its name, in the place of an older file.

    Args:
        draft: the finished file, on the same file system as `path`.

    Raises:
        OSError: it cannot be written to the disk or renamed.
    """
    sync(draft)
    draft.replace(path)
    sync(path.parent)


class StagedFolder(NamedTuple):
    """A folder that is written under another name and takes the target's name once it is whole.

    All three names are in one folder, so that renaming moves no bytes.
    """

    target: Path
    partial: Path
    """Where it is written."""
    replaced: Path
    """Where an older target waits until the new one has its name."""

    def open(self) -> None:
        """Make the empty folder `partial`; what an interrupted process left there is removed.

        Raises:
            OSError: the folder cannot be made, or what is there cannot be removed.
        """
        if self.partial.exists():
            remove_leftover(self.partial)
        self.partial.mkdir(parents=True)

    def publish(self) -> None:
        """Give the written folder the target's name; an older target comes back where that fails.

        Raises:
            OSError: a file cannot be written to the disk, or a folder cannot be renamed.
        """
        for path in (*self.partial.rglob("*"), self.partial):
            sync(path)
        shutil.rmtree(self.replaced, ignore_errors=True)
        try:
            if self.target.exists():
                self.target.rename(self.replaced)
            self.partial.rename(self.target)
            sync(self.target.parent)
        except OSError:
            if self.replaced.exists() and not self.target.exists():
                self.replaced.rename(self.target)
            raise
        shutil.rmtree(self.replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written so far; nothing happens where there is nothing."""
        shutil.rmtree(self.partial, ignore_errors=True)


def remove_leftover(folder: Path) -> None:
    """Remove a folder that an interrupted process left, and say so.

    Raises:
        OSError: it cannot be removed.
    """
    _logger.warning("removing %s, left by a process that was stopped while it wrote there", folder)
    shutil.rmtree(folder)


def sync(path: Path) -> None:
    """Have the kernel write a file, or a folder's names, to the disk.

    Raises:
        OSError: it cannot be opened or written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
