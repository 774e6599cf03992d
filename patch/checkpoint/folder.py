"""Where checkpoints lie, which one is the newest, and how one is published.

root/iter_0000100/         .metadata  __<rank>_<n>.distcp  common.pt  metadata.json  checksums.json
root/iter_0000200.tmp/     being written; never read
root/latest_checkpointed_iteration.txt "100"
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from patch.checkpoint.manifest import damage
from patch.checkpoint.together import from_rank_0
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.storage.names import (
    RELEASE,
    TRACKER,
    checkpoint_root,
    complete_iterations,
    is_complete,
    is_legacy,
    is_released,
    lacking_files,
    read_tracker,
)

_log = get_logger(__name__)

_STAGING = ".tmp"
_REPLACED = ".old"
_CURE = (
    "bring the files back, remove these checkpoints to start from step 1, or give another OUTPUT_BASEPATH "
    "(position 25)"
)


def iteration_folder(root: Path, iteration: int) -> Path:
    """The folder of one checkpoint."""
    return root / f"iter_{iteration:07d}"


def latest_iteration(root: Path, *, takes_older: bool = True) -> int | None:
    """The newest whole checkpoint below `root`: the tracker's, or else the next one, which is said.

    None where nothing was ever saved. Rank 0 looks and all ranks verify what it finds: a collective in a job.

    Args:
        takes_older: go on from an older one where the newest is damaged, as a resume does: it does again what
            is lost. Who only reads weights would take others than he thinks.
    Raises:
        CheckpointError: checkpoints were there and none is whole; training must not begin anew over them. Or
            the newest is damaged, and no older one is to be taken.
    """
    damaged: list[str] = []
    for iteration in from_rank_0(lambda: _candidates(root)):
        complaint = damage(iteration_folder(root, iteration))
        if complaint is None:
            for each in damaged:
                _log.warning("DAMAGED CHECKPOINT: %s; iteration %d is taken instead", each, iteration)
            return iteration
        damaged.append(complaint)
        if not takes_older:
            raise CheckpointError(
                f"{complaint}: the newest checkpoint is not what was saved; to take an older one, name its "
                f"own folder ({root / 'iter_*'}), or let a resume of that run train the lost steps again"
            )
    if damaged:
        raise CheckpointError(f"no checkpoint below {root} is whole: {damaged[0]}; {_CURE}")
    return None


def weights_folder(load: Path) -> Path:
    """The folder of the checkpoint that weights are to be read from.

    Args:
        load: that folder itself, one that holds checkpoints (of ours, of Megatron-LM's, converted), or a
            run's folder. A collective in a job.

    Returns:
        a whole checkpoint, or the folder of a legacy one (`mp_rank_*`).

    Raises:
        CheckpointError: none of them, or damaged.
    """
    if is_complete(load) and (complaint := damage(load)):
        raise CheckpointError(f"{complaint}: it is not what was saved; take another checkpoint")
    if is_complete(load) or any(load.glob("mp_rank_*")):
        return load
    root = checkpoint_root(load)
    if is_legacy(root):
        return _legacy_folder(root)
    if is_released(root):
        if lacking := lacking_files(root / RELEASE):
            raise CheckpointError(f"{root / RELEASE} lacks {', '.join(lacking)}; convert the model again")
        return root / RELEASE
    iteration = latest_iteration(root, takes_older=False)
    if iteration is None:
        raise CheckpointError(
            f"{load} holds no checkpoint, expected {TRACKER} with {RELEASE}/ or iter_*/ beside it, or a "
            "folder with .metadata"
        )
    _log.info("weights are those of iteration %d in %s", iteration, root)
    return iteration_folder(root, iteration)


def _legacy_folder(root: Path) -> Path:
    """The tracker's, or the one there is."""
    tracked = read_tracker(root) or ""
    named = [RELEASE] if tracked == RELEASE else [f"iter_{int(tracked):07d}"] if tracked.isdecimal() else []
    found = [path.parent.name for path in root.glob("*/mp_rank_*")]
    for name in named or sorted(set(found)):
        if name in found:
            return root / name
    raise CheckpointError(f"{root / TRACKER} names {tracked}, but there is no {tracked} with mp_rank_* in it")


def _candidates(root: Path) -> list[int]:
    """The iterations whose checkpoints are complete: the tracker's, then the others, the newest first."""
    tracked = _tracked_iteration(root)
    complete = sorted(complete_iterations(root), key=lambda iteration: (iteration == tracked, iteration))
    if not complete:
        _refuse_remains(root)
    elif complete[-1] != tracked:
        _log.warning(
            "%s names %s, which is no complete checkpoint; the newest complete one is %s",
            root / TRACKER, tracked, complete[-1],
        )  # fmt: skip
    return complete[::-1]


def _refuse_remains(root: Path) -> None:
    """A tracker or a folder that once was a checkpoint; a first save that was killed leaves neither."""
    remains = sorted(path.name for path in root.glob("iter_*") if not path.name.endswith(_STAGING))
    remains += [TRACKER] if (root / TRACKER).exists() else []
    if remains:
        raise CheckpointError(
            f"{root} holds {', '.join(remains)} and no complete checkpoint (iter_* with .metadata, common.pt "
            f"and metadata.json; a folder *{_REPLACED} is a checkpoint under another name): {_CURE}"
        )


def open_staging(target: Path) -> Path:
    """An empty folder beside `target` to write into; what killed runs left behind is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (_STAGING, _REPLACED):
        for leftover in target.parent.glob(f"iter_*{suffix}"):
            _log.warning("removing %s, left by a run that was stopped while it saved", leftover)
            shutil.rmtree(leftover)
    staging = staging_folder(target)
    staging.mkdir()
    return staging


def staging_folder(target: Path) -> Path:
    """The folder that becomes `target` once it is complete."""
    return target.with_name(target.name + _STAGING)


def publish(target: Path) -> None:
    """Turn the written staging folder into `target`, in the place of an older one, and track it.

    Every step leaves the disk with a complete checkpoint: data first, then the name, then the tracker.
    """
    staging = staging_folder(target)
    for path in (*staging.iterdir(), staging):
        sync(path)
    replaced = target.with_name(target.name + _REPLACED)
    if target.exists():
        target.rename(replaced)
    staging.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    tracker = target.parent / TRACKER
    draft = tracker.with_suffix(_STAGING)
    draft.write_text(f"{int(target.name[len('iter_') :])}\n", encoding="ascii")
    sync(draft)
    draft.replace(tracker)
    sync(target.parent)


def _tracked_iteration(root: Path) -> int | None:
    try:
        return int(read_tracker(root) or "")
    except ValueError:
        return None


def sync(path: Path) -> None:
    """Have the kernel write a file, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
