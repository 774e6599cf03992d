"""The names of what lies on disk: in a run's folder, in a checkpoint, beside a tokenizer.

OUTPUT_BASEPATH/config.yaml                                        the resolved run
OUTPUT_BASEPATH/data.sha256                                        what its training data looked like
OUTPUT_BASEPATH/checkpoint/iter_0000100/                           .metadata  common.pt  metadata.json  ...
OUTPUT_BASEPATH/checkpoint/latest_checkpointed_iteration.txt       "100"
OUTPUT_BASEPATH/log/metrics.jsonl, log/loss.png, tensorboard/      what the run reported
OUTPUT_BASEPATH/data_index/                                        which document each sample comes from
OUTPUT_BASEPATH/hf/                                                the exported model
"""

from __future__ import annotations

import re
from pathlib import Path

from patch.errors import CheckpointError

# In a run's folder.
CONFIG_FILE = "config.yaml"
DATA_FINGERPRINT_FILE = "data.sha256"
CHECKPOINT_FOLDER = "checkpoint"
METRICS_FILE = "log/metrics.jsonl"
LOSS_PLOT_FILE = "log/loss.png"
TENSORBOARD_FOLDER = "tensorboard"
DATA_INDEX_FOLDER = "data_index"
HF_FOLDER = "hf"

# In a folder of checkpoints.
RELEASE = "release"
"""In the tracker, and as a folder's name: weights without a training state."""
TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION_PREFIX = "iter_"

# In a checkpoint. METADATA_FILE is the index of its tensors, METADATA_JSON_FILE names the format.
METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
METADATA_JSON_FILE = "metadata.json"
_CHECKPOINT_FILES = (METADATA_FILE, COMMON_FILE, METADATA_JSON_FILE)

CHECKSUMS_FILE = "checksums.json"
"""What the files of a folder held: in a checkpoint and in data_index/."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
"""A folder with one of these holds a tokenizer; tokenizer_config.json alone says only how to use one."""


def iteration_name(iteration: int) -> str:
    """The name of one checkpoint's folder: iter_0000100."""
    return f"{_ITERATION_PREFIX}{iteration:07d}"


def find_checkpoint_root(folder: str | Path) -> Path:
    """Where the checkpoints of a run's folder lie; any other folder is taken for that place itself."""
    below = Path(folder) / CHECKPOINT_FOLDER
    return below if below.is_dir() else Path(folder)


def lacking_files(folder: Path) -> list[str]:
    """The files that a checkpoint has whatever its size, and this folder has not."""
    return [name for name in _CHECKPOINT_FILES if not (folder / name).is_file()]


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
        int(path.name.removeprefix(_ITERATION_PREFIX))
        for path in root.glob(f"{_ITERATION_PREFIX}*")
        if re.fullmatch(rf"{_ITERATION_PREFIX}\d+", path.name) and is_complete(path)
    ]
