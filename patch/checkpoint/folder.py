"""The folders of checkpoints: finding the newest checkpoint, and publishing a written one.

root/iter_0000100/         .metadata  __<rank>_<n>.distcp  common.pt  metadata.json  checksums.json
root/iter_0000200.tmp/     being written; never read
root/latest_checkpointed_iteration.txt "100"

A store cannot rename, so a checkpoint is written under its final name. It counts as complete when it has
checksums.json. The file .unfinished marks remains that may be removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, overload

from patch.checkpoint.manifest import damage, is_marked
from patch.distributed.collectives import fail_together, from_rank_0
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.preflight.checkpoint_places import hint_of_store
from patch.storage.atomic import StagedFolder, remove_leftover, sync, write_atomically
from patch.storage.names import (
    CHECKSUMS_FILE,
    RELEASE,
    REMOVED_FILE,
    TRACKER,
    UNFINISHED_FILE,
    all_iterations,
    complete_iterations,
    find_checkpoint_root,
    is_complete,
    is_legacy,
    is_released,
    iteration_in,
    iteration_name,
    iteration_of,
    lacking_files,
    newest_of,
    read_tracker,
)
from patch.storage.places import AnyPath
from patch.storage.remote import RemotePath

_logger = get_logger(__name__)

_PARTIAL = ".tmp"
_REPLACED = ".old"
_REMOVED = ".removed_"
"""Name prefix of a checkpoint that is being deleted."""
_RESUME_CURE = "bring the files back, remove these checkpoints to start from step 1, or give another folder"
_LOAD_CURE = "bring the files back, or give another checkpoint"
_RELEASE_CURE = "it is not what was saved; convert the model again"
_FOLDER_CURE = "it is not what was saved; take another checkpoint"


class NoWholeCheckpointError(CheckpointError):
    """There are checkpoints, or remains of checkpoints, but none is complete and undamaged."""


def iteration_folder(root: AnyPath, iteration: int) -> AnyPath:
    """Return the folder of one checkpoint."""
    return root / iteration_name(iteration)


def latest_iteration(root: AnyPath) -> int | None:
    """Return the newest undamaged checkpoint in `root`, or None if nothing was ever saved there.

    It is the checkpoint that the tracker names, or else the next newest one, with a warning that names the
    damaged file. A folder without checksums.json counts as damaged, because that file is written last. In a
    job this is a collective: rank 0 lists the checkpoints, and all ranks verify them.

    Raises:
        CheckpointError: all checkpoints are damaged. Training must not start over beside them.
    """
    damaged: list[str] = []
    field = "save" if isinstance(root, RemotePath) else "output_path"
    with fail_together(f"{root} cannot be read", CheckpointError):
        ordered = from_rank_0(lambda: _newest_first(root, _saved_iterations(root), _RESUME_CURE, field))
    for iteration in ordered:
        complaint = damage(iteration_folder(root, iteration))
        if complaint is None:
            for skipped in damaged:
                _logger.warning("DAMAGED CHECKPOINT: %s; iteration %d is taken instead", skipped, iteration)
            return iteration
        damaged.append(complaint)
    if damaged:
        raise NoWholeCheckpointError(
            f"no checkpoint below {root} is whole: {damaged[0]}; {_RESUME_CURE}", field=field
        )
    return None


def _saved_iterations(root: AnyPath) -> list[int]:
    """Return the iterations of the checkpoints in `root`, including damaged ones, in any order."""
    iterations = all_iterations(root)
    if isinstance(root, RemotePath):  # unmarked ones are interrupted uploads
        return [iteration for iteration in iterations if is_marked(iteration_folder(root, iteration))]
    return iterations


@overload
def weights_folder(load: Path) -> Path: ...
@overload
def weights_folder(load: AnyPath) -> AnyPath: ...
def weights_folder(load: AnyPath) -> AnyPath:
    """Return the folder of the checkpoint from which weights are read; a collective in a job.

    Args:
        load: a checkpoint, a folder of checkpoints (ours, Megatron-LM's or converted), or a run's folder.
    Returns:
        the folder of a complete checkpoint, or of a legacy checkpoint (`mp_rank_*`).
    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    found, verify = unverified_weights(load)
    verify()
    return found


def unverified_weights(load: AnyPath) -> tuple[AnyPath, Callable[[], None]]:
    """Return the folder of `weights_folder`, and a function that verifies it while the caller reads.
    Both are collectives in a job and raise the errors of `weights_folder`.
    """
    with fail_together(f"{load} cannot be read", CheckpointError):
        found, cure = from_rank_0(lambda: _find_weights(load))
    if (iteration := iteration_of(found)) is not None:
        _logger.info("weights are those of iteration %d in %s", iteration, found.parent)

    def verify() -> None:
        if cure is not None and (complaint := damage(found)):
            raise CheckpointError(f"{complaint}: {cure}")

    return found, verify


def _find_weights(load: AnyPath) -> tuple[AnyPath, str | None]:
    """Return the checkpoint's folder, and the advice if it is damaged, or None if it has no checksums."""
    load = load.resolve() if isinstance(load, Path) else load  # `best` and `last` are links
    if is_marked(load):
        return load, _RELEASE_CURE if load.name == RELEASE else _FOLDER_CURE
    if is_complete(load) or any(load.glob("mp_rank_*")):
        return load, None
    root = find_checkpoint_root(load)
    if is_legacy(root):
        return _legacy_folder(root), None
    if is_released(root):
        if lacking := lacking_files(root / RELEASE):
            raise CheckpointError(f"{root / RELEASE} lacks {', '.join(lacking)}; convert the model again")
        return root / RELEASE, _RELEASE_CURE if is_marked(root / RELEASE) else None
    is_ours = any(is_marked(iteration_folder(root, iteration)) for iteration in all_iterations(root))
    iterations = _saved_iterations(root) if is_ours else complete_iterations(root)
    found = _newest_first(root, iterations, _LOAD_CURE, "load")
    if not found:
        raise CheckpointError(
            f"{load} has no checkpoint, expected {TRACKER} with {RELEASE}/ or iter_*/ beside it, or a "
            f"folder with .metadata{hint_of_store(load)}"
        )
    # A load of weights never takes an older checkpoint, because users expect the newest.
    cure = (
        "the newest checkpoint is not what was saved; to take an older one, name its own folder "
        f"({root / 'iter_*'}), or let a resume of that run train the lost steps again"
    )
    return iteration_folder(root, found[0]), cure if is_ours else None


def _legacy_folder(root: AnyPath) -> AnyPath:
    """Return the legacy checkpoint that the tracker names, or the first one if it names none."""
    tracked = read_tracker(root) or ""
    names = sorted({path.parent.name for path in root.glob("*/mp_rank_*")})
    iteration = iteration_in(tracked)
    if iteration is not None or tracked == RELEASE:
        tracked_name = tracked if iteration is None else iteration_name(iteration)
        names = [name for name in names if name == tracked_name]
    if names:
        return root / names[0]
    raise CheckpointError(f"{root / TRACKER} names {tracked}, but there is no {tracked} with mp_rank_* in it")


def _newest_first(root: AnyPath, iterations: list[int], cure: str, field: str) -> list[int]:
    """Return the newest iteration (see `newest_of`), then the tracker's, then the rest from new to old.
    If there are only remains of checkpoints, raise an error with the advice `cure`.
    """
    tracked, newest = iteration_in(read_tracker(root)), newest_of(root, iterations)
    if newest is None:
        _refuse_remains(root, cure, field)
    elif tracked in iterations and newest != tracked:
        _logger.warning(
            "%s names %s, and %s was completed after that: a run was killed between the two; to go back to "
            "%s, write the file again",
            root / TRACKER, tracked, iteration_name(newest), tracked,
        )  # fmt: skip
    elif newest != tracked:
        _logger.warning(
            "%s names %s, which is not there; the newest checkpoint is %s", root / TRACKER, tracked, newest
        )
    return sorted(iterations, key=lambda i: (i == newest, i == tracked, i), reverse=True)


def _refuse_remains(root: AnyPath, cure: str, field: str) -> None:
    """Refuse a folder with a tracker or with a checkpoint under another name.
    A run that was killed during its first save leaves neither, so it may start again.
    """
    remains = []
    if not isinstance(root, RemotePath):
        remains = sorted(path.name for path in root.glob("iter_*") if not path.name.endswith(_PARTIAL))
    remains += [TRACKER] if (root / TRACKER).exists() else []
    if remains:
        raise NoWholeCheckpointError(
            f"{root} has {', '.join(remains)} and no complete checkpoint (iter_* with {CHECKSUMS_FILE}; a "
            f"folder *{_REPLACED} is a checkpoint under another name): {cure}",
            field=field,
        )


class MarkedFolder(NamedTuple):
    """The folder of one checkpoint in a store. Unlike `StagedFolder`, it is written under its final name.
    All methods raise OSError if the store fails.
    """

    partial: RemotePath

    def open(self) -> None:
        """Remove an older folder of this name, its marker first, and begin a new one."""
        unfinished = self.partial / UNFINISHED_FILE
        if self.partial.is_dir():
            unfinished.write_bytes(b"")
            (self.partial / CHECKSUMS_FILE).unlink(missing_ok=True)
            self.partial.remove_tree()
        unfinished.write_bytes(b"")

    def publish(self, *, files_are_synced: bool) -> None:
        """Remove the file .unfinished; the marker, the last file, has published the folder already."""
        try:
            (self.partial / UNFINISHED_FILE).unlink(missing_ok=True)
        except OSError as error:
            _logger.warning(
                "%s is complete, but has still %s: %s", self.partial, UNFINISHED_FILE, error.strerror
            )


def staged_checkpoint(target: AnyPath) -> StagedFolder | MarkedFolder:
    """Return the folder of one checkpoint, with the temporary names for writing or replacing it."""
    if isinstance(target, RemotePath):
        return MarkedFolder(target)
    return StagedFolder(
        target, target.with_name(target.name + _PARTIAL), target.with_name(target.name + _REPLACED)
    )


def open_staging(target: AnyPath) -> AnyPath:
    """Remove the folders that killed runs left, and create an empty temporary folder for `target`.
    The caller has checked that it still holds the lock.

    Raises:
        OSError: the folder cannot be created, or an old one cannot be removed.
    """
    if isinstance(target, RemotePath):
        _remove_unfinished(target.parent)
    else:
        for suffix in (_PARTIAL, _REPLACED):
            for leftover in target.parent.glob(f"iter_*{suffix}"):
                remove_leftover(leftover)
    staged = staged_checkpoint(target)
    staged.open()
    return staged.partial


def _remove_unfinished(root: RemotePath) -> None:
    for hint in root.glob(f"iter_*/{UNFINISHED_FILE}"):
        if is_marked(hint.parent):  # killed before it could remove the hint
            hint.unlink(missing_ok=True)
        else:
            _logger.warning("removing %s, which was not written to its end", hint.parent)
            hint.parent.remove_tree()


def publish(target: AnyPath) -> None:
    """Rename the written folder to its final name, replacing an older one, and update the tracker.

    The files are synced already. The order (data, name, tracker) always leaves a complete checkpoint on disk.

    Raises:
        OSError: the folder cannot be renamed.
        CheckpointError: the tracker cannot be written.
    """
    staged_checkpoint(target).publish(files_are_synced=True)
    tracker = target.parent / TRACKER
    try:
        write_atomically(tracker, f"{int(target.name.removeprefix('iter_'))}\n")
    except OSError as error:
        raise CheckpointError(
            f"{target} is complete, but {tracker} could not be written: {error.strerror}; make room there, "
            "and start again: a resume goes on from this checkpoint",
            field="output_path",
        ) from error


def mark_removed(folder: AnyPath) -> None:
    """Rename a checkpoint so that it no longer counts; `delete_removed` then frees its space.
    A store cannot rename: there the file .removed marks the checkpoint, and its checksums.json is removed.

    Raises:
        OSError: it cannot be renamed.
    """
    if isinstance(folder, RemotePath):
        (folder / REMOVED_FILE).write_bytes(b"")
        (folder / CHECKSUMS_FILE).unlink(missing_ok=True)
        return
    hidden = folder.with_name(_REMOVED + folder.name)
    if hidden.exists():
        shutil.rmtree(hidden)
    folder.rename(hidden)
    sync(folder.parent)  # else a crash could leave the old name without files


def delete_removed(root: AnyPath) -> None:
    """Delete the checkpoints that were set aside, also by a killed process. Two threads may call this.

    Raises:
        OSError: a store fails.
    """
    if isinstance(root, RemotePath):
        for mark in root.glob(f"iter_*/{REMOVED_FILE}"):
            (mark.parent / CHECKSUMS_FILE).unlink(missing_ok=True)
            mark.parent.remove_tree()
        return
    for hidden in root.glob(f"{_REMOVED}*"):
        shutil.rmtree(hidden, ignore_errors=True)
        if hidden.exists():
            _logger.warning("%s is a removed checkpoint that cannot be deleted: delete it yourself", hidden)
