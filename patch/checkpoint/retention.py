"""Retention: which of a run's checkpoints stay, the removal of the others, and the links `best` and `last`.

A checkpoint that is removed first gets a hidden name that no reader looks for. A kill in the middle therefore
leaves each checkpoint whole, or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from patch.checkpoint.manifest import has_saved_lengths
from patch.logger import get_logger
from patch.storage.atomic import sync
from patch.storage.names import (
    CHECKSUMS_FILE,
    REFUSED_FILE,
    REMOVED_FILE,
    TRACKER,
    all_iterations,
    iteration_in,
    iteration_name,
    read_tracker,
)
from patch.storage.places import AnyPath
from patch.storage.remote import RemotePath

_logger = get_logger(__name__)

REMOVED = ".removed_"
"""The beginning of the name of a checkpoint that is being deleted."""


class Retention(NamedTuple):
    """Which checkpoints stay; the best one always does."""

    last: int | None = None
    """Number of the newest ones that stay; None: all."""
    every: int | None = None
    """Those whose iteration is a multiple of this stay too; None: no more."""

    def superseded(
        self,
        iterations: Iterable[int],
        best: int | None,
        is_whole: Callable[[int], bool],
        uncounted: Collection[int] = (),
    ) -> list[int]:
        """The iterations, of these, whose checkpoints may go; in ascending order. The newest never is.

        Args:
            iterations: those of the checkpoints up to the newest one.
            best: the iteration of the best checkpoint; None if none is known.
            is_whole: whether a checkpoint is whole; others neither count nor go. Those that stay anyway are
                not asked for, because it takes a look at each file.
            uncounted: iterations that are none of the `last` ones.
        """
        if self.last is None:
            return []
        newest, *older = sorted(iterations, reverse=True)
        left, gone = self.last - (newest not in uncounted), []
        for iteration in older:
            is_counted = left > 0 and iteration not in uncounted
            is_kept = iteration == best or (self.every and iteration % self.every == 0)
            if (is_kept and not is_counted) or not is_whole(iteration):
                continue
            if is_counted:
                left -= 1
            else:
                gone.append(iteration)
        return gone[::-1]


def set_aside_superseded(
    root: AnyPath, retention: Retention, newest: int, best: int | None, uncounted: Collection[int] = ()
) -> list[int]:
    """Take the names of the checkpoints that may go; `delete_set_aside` then frees their space.

    In a store, which cannot rename, the file .removed in each says so, and its marker goes.

    Call it in one process, after `newest` was published. Checkpoints of later iterations, which a resume from
    an older one left, are not touched, and damaged ones neither count nor go. Only the lengths of files are
    compared: the contents were summed while they were written, and to read them all again after each save
    would take one process longer than the save.

    Args:
        root: the folder of a run's checkpoints.
        retention: what stays.
        newest: the iteration of the checkpoint that was just saved.
        best: the iteration of the best checkpoint; None if none is known.
        uncounted: iterations that are none of the `last` ones: no run can resume from them, or they are from
            before this run went back to an older one.

    Returns:
        The iterations of the checkpoints that are gone.
    """
    if retention.last is None:
        return []

    def is_whole(iteration: int) -> bool:
        return has_saved_lengths(root / iteration_name(iteration))

    if not is_whole(newest):
        _logger.warning("%s is not whole: no older checkpoint is removed", root / iteration_name(newest))
        return []
    gone = []
    candidates = [iteration for iteration in all_iterations(root) if iteration <= newest]
    for iteration in retention.superseded(candidates, best, is_whole, uncounted):
        folder = root / iteration_name(iteration)
        try:
            _set_aside(folder)
        except OSError as error:
            _logger.warning("%s cannot be removed: %s", folder, error.strerror)
        else:
            gone.append(iteration)
    return gone


def _set_aside(folder: AnyPath) -> None:
    if isinstance(folder, RemotePath):
        (folder / REMOVED_FILE).write_bytes(b"")
        (folder / CHECKSUMS_FILE).unlink(missing_ok=True)
        return
    hidden = folder.with_name(REMOVED + folder.name)
    if hidden.exists():
        shutil.rmtree(hidden)
    folder.rename(hidden)
    sync(folder.parent)  # its files must not be gone, after a crash of the machine, while it has its old name


def delete_set_aside(root: AnyPath) -> None:
    """Delete the checkpoints that were set aside, also by a process that was killed before it could.

    Two threads may call it at once.

    Raises:
        OSError: a store fails.
    """
    if isinstance(root, RemotePath):
        for mark in root.glob(f"iter_*/{REMOVED_FILE}"):
            (mark.parent / CHECKSUMS_FILE).unlink(missing_ok=True)
            mark.parent.remove_tree()
        return
    for hidden in root.glob(f"{REMOVED}*"):
        shutil.rmtree(hidden, ignore_errors=True)
        if hidden.exists():
            _logger.warning("%s is a removed checkpoint that cannot be deleted: delete it yourself", hidden)


def find_refused(disk: Path, newest: int) -> set[int]:
    """The iterations of the checkpoints on the disk that a store has refused, up to `newest`.

    Those that a run saved there before it had a store are none of them.
    """
    found = (iteration for iteration in all_iterations(disk) if iteration <= newest)
    return {iteration for iteration in found if (disk / iteration_name(iteration) / REFUSED_FILE).is_file()}


def remove_refused(disk: Path, iterations: Collection[int]) -> None:
    """Remove checkpoints on the disk, because their store has a later one now.

    Whoever looks only at the disk would take them for the newest ones.

    Args:
        disk: the folder of checkpoints.
        iterations: of those that go.

    Raises:
        OSError: one cannot be removed.
    """
    if iteration_in(read_tracker(disk)) in iterations:
        (disk / TRACKER).unlink()  # before them: it must not name what is not there
    for iteration in iterations:
        _set_aside(disk / iteration_name(iteration))
    delete_set_aside(disk)


def point_link(root: Path, name: str, iteration: int | None) -> None:
    """Let the link `name` in `root` lead to a checkpoint; it is replaced atomically.

    Args:
        root: the folder of a run's checkpoints.
        name: the name of the link.
        iteration: that of the checkpoint; None, or one without a checkpoint: the link goes.

    Raises:
        OSError: the file system has no symbolic links, or something else has this name.
    """
    link = root / name
    if iteration is None or not (root / iteration_name(iteration)).is_dir():
        if link.is_symlink():
            link.unlink()
        return
    if link.is_symlink() and link.readlink().name == iteration_name(iteration):
        return
    draft = root / f".{name}.tmp"
    try:
        draft.unlink(missing_ok=True)
        draft.symlink_to(iteration_name(iteration), target_is_directory=True)
        draft.replace(link)
    finally:
        draft.unlink(missing_ok=True)
