"""Where checkpoints lie, which one is the newest, and how one is published.

root/iter_0000100/                     .metadata  __<rank>_<n>.distcp  common.pt  metadata.json
root/iter_0000200.tmp/                 being written; never read
root/latest_checkpointed_iteration.txt "100"
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from patch.logger import get_logger

_log = get_logger(__name__)

INDEX = ".metadata"
COMMON = "common.pt"
_FILES = (INDEX, COMMON, "metadata.json")
_TRACKER = "latest_checkpointed_iteration.txt"
_STAGING = ".tmp"
_REPLACED = ".old"


def iteration_folder(root: Path, iteration: int) -> Path:
    """The folder of one checkpoint."""
    return root / f"iter_{iteration:07d}"


def is_complete(folder: Path) -> bool:
    """Whether the folder holds every file that a checkpoint has whatever its size."""
    return all((folder / name).is_file() for name in _FILES)


def latest_iteration(root: Path) -> int | None:
    """The newest checkpoint below `root`: the tracker's, or else the newest complete folder, or None."""
    tracked = _tracked_iteration(root)
    if tracked is not None and is_complete(iteration_folder(root, tracked)):
        return tracked
    complete = [int(path.name[len("iter_") :]) for path in root.glob("iter_*") if _is_checkpoint(path)]
    newest = max(complete, default=None)
    if tracked is not None or newest is not None:
        _log.warning(
            "%s names %s, which is no complete checkpoint; the newest complete one is %s",
            root / _TRACKER, tracked, newest,
        )  # fmt: skip
    return newest


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
        _sync(path)
    replaced = target.with_name(target.name + _REPLACED)
    if target.exists():
        target.rename(replaced)
    staging.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    tracker = target.parent / _TRACKER
    draft = tracker.with_suffix(_STAGING)
    draft.write_text(f"{int(target.name[len('iter_') :])}\n", encoding="ascii")
    _sync(draft)
    draft.replace(tracker)
    _sync(target.parent)


def _is_checkpoint(path: Path) -> bool:
    return re.fullmatch(r"iter_\d+", path.name) is not None and is_complete(path)


def _tracked_iteration(root: Path) -> int | None:
    try:
        return int((root / _TRACKER).read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None


def _sync(path: Path) -> None:
    """Have the kernel write a file, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
