"""Where checkpoints lie, which one is the newest, and how one is published.

root/iter_0000100/         .metadata  __<rank>_<n>.distcp  common.pt  metadata.json  checksums.json
root/iter_0000200.tmp/     being written; never read
root/latest_checkpointed_iteration.txt "100"
"""

from __future__ import annotations

from pathlib import Path

from patch.checkpoint.manifest import damage
from patch.distributed.collectives import from_rank_0
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.storage.atomic import StagedFolder, remove_leftover, write_atomically
from patch.storage.names import (
    RELEASE,
    TRACKER,
    complete_iterations,
    find_checkpoint_root,
    is_complete,
    is_legacy,
    is_released,
    iteration_name,
    lacking_files,
    read_tracker,
)

_logger = get_logger(__name__)

_PARTIAL = ".tmp"
_REPLACED = ".old"
_CURE = (
    "bring the files back, remove these checkpoints to start from step 1, or give another OUTPUT_BASEPATH "
    "(position 25)"
)


def iteration_folder(root: Path, iteration: int) -> Path:
    """The folder of one checkpoint."""
    return root / iteration_name(iteration)


def latest_iteration(root: Path, *, takes_older: bool = True) -> int | None:
    """The newest whole checkpoint below `root`: the tracker's, or else the next one, with a warning.

    None where nothing was ever saved. Rank 0 looks and all ranks verify what it finds: a collective in a job.

    Args:
        takes_older: return an older one where the newest is damaged, as a resume does, which trains the lost
            steps again. A caller that only reads weights would get other weights than the user thinks.
    Raises:
        CheckpointError: checkpoints were there and none is whole; training must not begin anew over them. Or
            the newest is damaged, and no older one is to be taken.
    """
    damaged: list[str] = []
    for iteration in from_rank_0(lambda: _candidates(root)):
        complaint = damage(iteration_folder(root, iteration))
        if complaint is None:
            for each in damaged:
                _logger.warning("DAMAGED CHECKPOINT: %s; iteration %d is taken instead", each, iteration)
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
    root = find_checkpoint_root(load)
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
    _logger.info("weights are those of iteration %d in %s", iteration, root)
    return iteration_folder(root, iteration)


def _legacy_folder(root: Path) -> Path:
    """The checkpoint that the tracker names; where it names none, the first one there is."""
    tracked = read_tracker(root) or ""
    found = sorted({path.parent.name for path in root.glob("*/mp_rank_*")})
    wanted = iteration_name(int(tracked)) if tracked.isdecimal() else tracked
    if tracked.isdecimal() or tracked == RELEASE:
        found = [name for name in found if name == wanted]
    if found:
        return root / found[0]
    raise CheckpointError(f"{root / TRACKER} names {tracked}, but there is no {tracked} with mp_rank_* in it")


def _candidates(root: Path) -> list[int]:
    """The iterations whose checkpoints are complete: the tracker's, then the others, the newest first."""
    tracked = _tracked_iteration(root)
    complete = sorted(complete_iterations(root), key=lambda iteration: (iteration == tracked, iteration))
    if not complete:
        _refuse_remains(root)
    elif complete[-1] != tracked:
        _logger.warning(
            "%s names %s, which is no complete checkpoint; the newest complete one is %s",
            root / TRACKER, tracked, complete[-1],
        )  # fmt: skip
    return complete[::-1]


def _refuse_remains(root: Path) -> None:
    """A tracker or a folder that once was a checkpoint; a first save that was killed leaves neither."""
    remains = sorted(path.name for path in root.glob("iter_*") if not path.name.endswith(_PARTIAL))
    remains += [TRACKER] if (root / TRACKER).exists() else []
    if remains:
        raise CheckpointError(
            f"{root} holds {', '.join(remains)} and no complete checkpoint (iter_* with .metadata, common.pt "
            f"and metadata.json; a folder *{_REPLACED} is a checkpoint under another name): {_CURE}"
        )


def staged_checkpoint(target: Path) -> StagedFolder:
    """The folder of one checkpoint and the names beside it that it has while it is written or replaced."""
    return StagedFolder(
        target, target.with_name(target.name + _PARTIAL), target.with_name(target.name + _REPLACED)
    )


def open_staging(target: Path) -> Path:
    """An empty folder beside `target` to write into; what killed runs left behind is removed.

    Raises:
        OSError: it cannot be made, or what is there cannot be removed.
    """
    for suffix in (_PARTIAL, _REPLACED):
        for leftover in target.parent.glob(f"iter_*{suffix}"):
            remove_leftover(leftover)
    staged = staged_checkpoint(target)
    staged.open()
    return staged.partial


def publish(target: Path) -> None:
    """Turn the written staging folder into `target`, in the place of an older one, and track it.

    Every step leaves the disk with a complete checkpoint: data first, then the name, then the tracker.

    Raises:
        OSError: something cannot be written or renamed.
    """
    staged_checkpoint(target).publish()
    iteration = int(target.name.removeprefix("iter_"))
    write_atomically(target.parent / TRACKER, f"{iteration}\n")


def _tracked_iteration(root: Path) -> int | None:
    try:
        return int(read_tracker(root) or "")
    except ValueError:
        return None
