"""The names of files and folders on disk: in a run's folder, a checkpoint, a tokenizer's folder, a data set.

OUTPUT_BASEPATH/config.yaml                                        the resolved run
OUTPUT_BASEPATH/data.json                                          hashes of its data and of what encodes it
OUTPUT_BASEPATH/checkpoint/iter_0000100/                           .metadata  common.pt  metadata.json  ...
OUTPUT_BASEPATH/checkpoint/latest_checkpointed_iteration.txt       "100"
OUTPUT_BASEPATH/checkpoint/best_checkpointed_iteration.txt         "100", the best value
OUTPUT_BASEPATH/checkpoint/last, best                              links to the two that these files name
OUTPUT_BASEPATH/log/metrics.jsonl, log/loss.png, tensorboard/      the run's metrics
OUTPUT_BASEPATH/log/last_saved_iteration.txt                       "100", also of a checkpoint in a store
OUTPUT_BASEPATH/log/stacks/rank_0.txt                              where the ranks were when the run hung
OUTPUT_BASEPATH/log/traces/rank_0.json.gz                          steps of --profile, a file a rank
OUTPUT_BASEPATH/log/reported/wandb.jsonl                           what a service has taken of metrics.jsonl
OUTPUT_BASEPATH/log/pushed_to_hub.txt                              repositories that this run has created
OUTPUT_BASEPATH/data_index/                                        index files: the document of each sample
OUTPUT_BASEPATH/data_cache/                                        tokenized sets, if the user has no cache
OUTPUT_BASEPATH/hf/                                                the exported model
OUTPUT_BASEPATH/STOP                                               written by people: ends the run

With --save URL, the checkpoints and their .txt files are at URL/, config.yaml, data.json, reference.json and
metrics.jsonl beside them; OUTPUT_BASEPATH/checkpoint/ has only what was saved before --save was given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import overload

from patch.errors import CheckpointError, DataError
from patch.numbers import to_int
from patch.storage.places import AnyPath, any_path, subfolders
from patch.storage.remote import RemotePath
from patch.storage.text_files import read_json, read_small

# In a run's folder.
CONFIG_FILE = "config.yaml"
DATA_RECORD_FILE = "data.json"
CHECKPOINT_FOLDER = "checkpoint"
METRICS_FILE = "log/metrics.jsonl"
LOSS_PLOT_FILE = "log/loss.png"
LAST_SAVED_FILE = "log/last_saved_iteration.txt"
STACKS_FOLDER = "log/stacks"
TRACES_FOLDER = "log/traces"
REPORTED_FOLDER = "log/reported"
PUSHED_FILE = "log/pushed_to_hub.txt"
TENSORBOARD_FOLDER = "tensorboard"
DATA_INDEX_FOLDER = "data_index"
DATA_CACHE_FOLDER = "data_cache"
HF_FOLDER = "hf"
ADAPTER_FOLDER = "adapter"
REFERENCE_FILE = "reference.json"
STOP_FILE = "STOP"

# In a folder of checkpoints.
RELEASE = "release"
"""The tracker's content and the folder's name for weights without a training state."""
TRACKER = "latest_checkpointed_iteration.txt"
BEST_TRACKER = "best_checkpointed_iteration.txt"
_MOST_TRACKER_BYTES = 1 << 16
LAST_LINK = "last"
BEST_LINK = "best"
_ITERATION_PREFIX = "iter_"

# In a checkpoint. METADATA_FILE is the index of its tensors, METADATA_JSON_FILE names the format.
METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
METADATA_JSON_FILE = "metadata.json"
_CHECKPOINT_FILES = (METADATA_FILE, COMMON_FILE, METADATA_JSON_FILE)
COMMON_KEY = "common_state/shard_0_1"
"""Since megatron-core 0.19 the plain values are an object of this name among the tensors; no COMMON_FILE."""
_MOST_INDEX_BYTES = 1 << 32

CHECKSUMS_FILE = "checksums.json"
"""Lengths and checksums of the files in a folder: in a checkpoint and in data_index/."""
UNFINISHED_FILE = ".unfinished"
REMOVED_FILE = ".removed"
"""In a checkpoint of a store: it is being written, it is being removed."""

SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
WEIGHTS_NAME, WEIGHTS_INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER_WEIGHTS_NAME, ADAPTER_CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"
"""The files of weights of Hugging Face and PEFT, as in transformers.utils, whose import takes 0.4 s."""
STEP_FILE = "trainer_state.json"
"""{"global_step": 100}: the step of a model or an adapter; the name and the key of transformers' Trainer."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
"""A tokenizer's folder has at least one of these. tokenizer_config.json alone is not enough to load one."""

# In a data set: of a folder here, or of a snapshot of the hub.
TABLES, TEXT = (".csv", ".tsv"), ".txt"
DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".gz", ".zst", *TABLES)
"""The endings of the files that are read from a folder. The format of a file is found by its content."""

_ARROW = ".arrow"
_STATE = "state.json"
_DESCRIPTION = re.compile(r"(dataset_infos?|dataset_dict|\..*)\.json")
"""Files that Hugging Face's datasets writes beside rows; state.json only beside Arrow files."""
_CACHE = re.compile(r"cache-.*\.arrow")
"""Results of `map` and `filter`, which datasets keeps beside a set that was loaded from a folder."""


def iteration_name(iteration: int) -> str:
    """The name of one checkpoint's folder: iter_0000100."""
    return f"{_ITERATION_PREFIX}{iteration:07d}"


def iteration_of(folder: AnyPath) -> int | None:
    """The step of one checkpoint's folder, by its name; None for a folder of another name."""
    match = re.fullmatch(rf"{_ITERATION_PREFIX}(\d{{1,18}})", folder.name)
    return int(match[1]) if match else None


@overload
def find_checkpoint_root(folder: Path) -> Path: ...
@overload
def find_checkpoint_root(folder: RemotePath) -> RemotePath: ...
@overload
def find_checkpoint_root(folder: str) -> AnyPath: ...
def find_checkpoint_root(folder: str | AnyPath) -> AnyPath:
    """The folder of a run's checkpoints: `folder`/checkpoint if that exists, else `folder` itself."""
    folder = any_path(folder) if isinstance(folder, str) else folder
    checkpoints = folder / CHECKPOINT_FOLDER
    return checkpoints if checkpoints.is_dir() else folder


def lacking_files(folder: AnyPath) -> list[str]:
    """The files that every checkpoint has and that this folder lacks."""
    lacking = [name for name in _CHECKPOINT_FILES if not (folder / name).is_file()]
    if lacking == [COMMON_FILE]:
        with suppress(OSError):  # who reads the index says why
            if COMMON_KEY.encode() in read_small(folder / METADATA_FILE, _MOST_INDEX_BYTES):
                return []
    return lacking


def is_complete(folder: AnyPath) -> bool:
    """Whether the folder has all the files that every checkpoint has."""
    return not lacking_files(folder)


def is_legacy(root: AnyPath) -> bool:
    """Whether `root`, or a checkpoint in it, has Megatron-LM's old format: one pickle for each rank."""
    return any(root.glob("mp_rank_*")) or any(root.glob("*/mp_rank_*"))


def is_released(root: AnyPath) -> bool:
    """Whether the tracker in `root` names a converted model: weights without a training state.

    Raises:
        CheckpointError: see `read_tracker`.
    """
    return read_tracker(root) == RELEASE


def read_tracker(root: AnyPath) -> str | None:
    """The checkpoint that the tracker file in `root` names; None if there is no tracker file.

    Raises:
        CheckpointError: the tracker file cannot be read.
    """
    tracker = root / TRACKER
    try:
        return read_small(tracker, _MOST_TRACKER_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{tracker} cannot be read: {error.strerror}; expected a file with the number of the newest "
            "checkpoint beside it: remove what is there, or make it readable"
        ) from error


def iteration_in(tracked: str | None) -> int | None:
    """The iteration that the text of a tracker names; None if it names none, as `release` does not."""
    return to_int(tracked) if tracked is not None and tracked.isdecimal() else None


def newest_of(root: AnyPath, iterations: Iterable[int]) -> int | None:
    """Which of the checkpoints in `root` is the newest one; None if there is none.

    That is the one that the tracker names, unless a later one got its marker after the tracker was written: a
    run was killed between the two. People who want to go back write an older number into the tracker, which
    is younger than the markers then.

    Raises:
        CheckpointError: see `read_tracker`.
    """
    found = set(iterations)
    tracked = iteration_in(read_tracker(root))
    if tracked is None or tracked not in found:
        return max(found, default=None)
    written = _written_at(root / TRACKER)
    later = (i for i in found if i > tracked)
    untracked = (i for i in later if _written_at(root / iteration_name(i) / CHECKSUMS_FILE) >= written)
    return max(untracked, default=tracked)


def _written_at(file: AnyPath) -> float:
    """When a file was written, in seconds by the clock of its file system; -1 if it is not there."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return -1.0


def complete_iterations(root: AnyPath) -> list[int]:
    """The iterations of all complete checkpoints in `root`, in no particular order."""
    return [iteration for iteration in all_iterations(root) if is_complete(root / iteration_name(iteration))]


def all_iterations(root: AnyPath) -> list[int]:
    """The iterations of all folders in `root` with the name of a checkpoint, in no particular order."""
    found = (iteration_of(root / name) for name in subfolders(root))
    return [iteration for iteration in found if iteration is not None]


def row_files(files: Iterable[Path], *, with_text: bool = False) -> list[Path]:
    """The files of a folder that hold its rows, sorted.

    Not those that describe a set, nor caches. Tables of text only where nothing else has rows: they are often
    lists of something else. Plain text only where there are no tables either, and if it is asked for.
    """
    found = [file for file in files if file.suffix.lower() in (*DATA_SUFFIXES, *[TEXT] * with_text)]
    found = [file for file in found if not _DESCRIPTION.fullmatch(file.name)]
    saved = {file.parent for file in found if file.suffix == _ARROW}
    found = sorted(
        file
        for file in found
        if not (_CACHE.fullmatch(file.name) or (file.name == _STATE and file.parent in saved))
    )
    for last in ((*TABLES, TEXT), (TEXT,)):
        if others := [file for file in found if file.suffix.lower() not in last]:
            return others
    return found


def check_saved(files: Sequence[Path], field: str | None = None) -> None:
    """Check that a folder has all files that `save_to_disk` wrote.

    Args:
        files: all files of the folder.
        field: the field of the configuration that holds it, for messages.

    Raises:
        DataError: one is missing.
    """
    for state in (file for file in files if file.name == _STATE):
        try:
            listed = [state.parent / entry["filename"] for entry in read_json(state)["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError):  # of another program
            continue
        if missing := sorted({*listed}.difference(files)):
            raise DataError(
                f"{missing[0]} is missing, which {_STATE} beside it lists; copy the folder again", field=field
            )
