"""Atomic writes: a file or folder appears complete or not at all, even if the process or machine crashes.

It is written under a temporary name in the same folder, synced to the disk, and then renamed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from patch.errors import CheckpointError, PatchError
from patch.logger import get_logger
from patch.storage.places import AnyPath
from patch.storage.remote import RemotePath

_logger = get_logger(__name__)


def write_atomically(path: AnyPath, content: str | bytes) -> None:
    """Write or replace a file atomically; in a store, as far as the store does so.

    On an error the old file stays unchanged. Text is written as UTF-8.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    data = content.encode() if isinstance(content, str) else content
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    draft = path.with_name(f"{path.name}.tmp")
    try:
        draft.write_bytes(data)
        publish_file(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_record(
    path: Path, content: str | bytes, kind: type[PatchError] = CheckpointError, field: str = "output_path"
) -> None:
    """Write or replace a file of a run's folder, or of the folder in `field`, atomically; create its folder.

    Raises:
        PatchError: the file cannot be written; of this kind, by default a CheckpointError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}; make room there, or give another folder"
        raise kind(what, field=field) from error


def publish_file(draft: Path, path: Path) -> None:
    """Sync a finished file to the disk and rename it to its final name, replacing an older file.

    Args:
        draft: the finished file, on the same file system as `path`.
    Raises:
        OSError: the file cannot be synced or renamed.
    """
    sync(draft)
    draft.replace(path)
    sync(path.parent)


class StagedFolder(NamedTuple):
    """A folder that is written under a temporary name, and renamed to the target's name when it is complete.
    All three names are in one folder, so that renaming moves no bytes.
    """

    target: Path
    partial: Path
    """The temporary name while the folder is written."""
    replaced: Path
    """The temporary name of an older target while it is replaced."""

    def open(self) -> None:
        """Create the empty folder `partial`; remove one that an interrupted process left.

        Raises:
            OSError: the folder cannot be created, or the old folder cannot be removed.
        """
        if self.partial.exists():
            remove_leftover(self.partial)
        self.partial.mkdir(parents=True)

    def publish(self, *, files_are_synced: bool = False) -> None:
        """Sync the written folder to the disk and rename it to the target's name.

        If renaming fails, an older target gets its name back.

        Args:
            files_are_synced: whether each file has been synced already.
        Raises:
            OSError: a file cannot be synced, or a folder cannot be renamed.
        """
        for path in () if files_are_synced else self.partial.rglob("*"):
            sync(path)
        sync(self.partial)
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
        """Remove `partial` and its contents, if it exists."""
        shutil.rmtree(self.partial, ignore_errors=True)


def remove_leftover(folder: Path) -> None:
    """Remove a folder that an interrupted process left, and log a warning.

    Raises:
        OSError: the folder cannot be removed.
    """
    _logger.warning("removing %s, left by a process that was stopped while it wrote there", folder)
    shutil.rmtree(folder)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk (fsync).

    Raises:
        OSError: the file or folder cannot be opened or written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
