"""The names of what lies in a run's folder, and which of its checkpoints are complete.

OUTPUT_BASEPATH/config.yaml                                        the resolved run
OUTPUT_BASEPATH/data.sha256                                        what its training data looked like
OUTPUT_BASEPATH/checkpoint/iter_0000100/                           .metadata  common.pt  metadata.json  ...
OUTPUT_BASEPATH/checkpoint/latest_checkpointed_iteration.txt       "100"
"""

from __future__ import annotations

import re
from pathlib import Path

from patch.errors import CheckpointError

RELEASE = "release"
"""In the tracker, and as a folder's name: weights without a training state."""
TRACKER = "latest_checkpointed_iteration.txt"
INDEX = ".metadata"
COMMON = "common.pt"
_FILES = (INDEX, COMMON, "metadata.json")
CONFIG_FILE = "config.yaml"


def checkpoint_root(folder: str | Path) -> Path:
    """Where the checkpoints of a run's folder lie; any other folder is taken for that place itself."""
    below = Path(folder) / "checkpoint"
    return below if below.is_dir() else Path(folder)


def lacking_files(folder: Path) -> list[str]:
    """The files that a checkpoint has whatever its size, and this folder has not."""
    return [name for name in _FILES if not (folder / name).is_file()]


def is_complete(folder: Path) -> bool:
    """Whether the folder holds every file that a checkpoint has whatever its size."""
    return not lacking_files(folder)


def is_legacy(root: Path) -> bool:
    """Whether `root`, or a checkpoint below it, is in Megatron-LM's old format: one pickle a rank."""
    return any(root.glob("mp_rank_*")) or any(root.glob("*/mp_rank_*"))


def is_released(root: Path) -> bool:
    """Whether `root` is said to hold weights without a training state: a converted model.

    Raises:
        CheckpointError: see `read_tracker`.
    """
    return read_tracker(root) == RELEASE


def read_tracker(root: Path) -> str | None:
    """What the tracker file below `root` names; None without one.

    Raises:
        CheckpointError: it cannot be read.
    """
    tracker = root / TRACKER
    try:
        return tracker.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{tracker} cannot be read: {error.strerror}; expected a file with the number of the newest "
            "checkpoint beside it: remove what is there, or make it readable"
        ) from error


def complete_iterations(root: Path) -> list[int]:
    """The iterations whose checkpoints below `root` are complete, in no order."""
    return [
        int(path.name[len("iter_") :])
        for path in root.glob("iter_*")
        if re.fullmatch(r"iter_\d+", path.name) and is_complete(path)
    ]
