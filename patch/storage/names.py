"""The names of files and folders on disk: in a run's folder, a checkpoint, a tokenizer's folder, a data set.

OUTPUT_BASEPATH/config.yaml                                        the resolved run
OUTPUT_BASEPATH/data.json                                          hashes of the data and its encoding
OUTPUT_BASEPATH/checkpoint/iter_0000100/                           .metadata  common.pt  metadata.json  ...
OUTPUT_BASEPATH/checkpoint/latest_checkpointed_iteration.txt       "100"
OUTPUT_BASEPATH/checkpoint/best_checkpointed_iteration.txt         "100", the best value
OUTPUT_BASEPATH/checkpoint/last, best                              links to the two that these files name
OUTPUT_BASEPATH/log/metrics.jsonl, log/loss.png, tensorboard/      the run's metrics
OUTPUT_BASEPATH/log/last_saved_iteration.txt                       "100", also of a checkpoint in a store
OUTPUT_BASEPATH/log/stacks/rank_0.txt                              stack traces of a hung run, a file per rank
OUTPUT_BASEPATH/log/traces/rank_0.json.gz                          steps of --profile, a file per rank
OUTPUT_BASEPATH/log/reported/wandb.jsonl                           rows of metrics.jsonl that a service has
OUTPUT_BASEPATH/log/pushed_to_hub.txt                              repositories that this run has created
OUTPUT_BASEPATH/data_index/                                        index files: the document of each sample
OUTPUT_BASEPATH/data_cache/                                        tokenized sets, if the user has no cache
OUTPUT_BASEPATH/hf/                                                the exported model
OUTPUT_BASEPATH/STOP                                               written by users: ends the run

With --save URL, the checkpoints and their .txt files are at URL/, beside config.yaml, data.json,
reference.json and metrics.jsonl. OUTPUT_BASEPATH/checkpoint/ then has only older checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from patch.errors import CheckpointError, DataError
from patch.storage.places import AnyPath, subfolders
from patch.storage.text_files import read_json, read_small
from patch.text import to_int

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
"""Tracker content and folder name of weights without a training state."""
MTP_FILE = "kept_mtp.safetensors"
"""Weights of a converted folder that predict further tokens and do not train."""
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
"""Key of the plain values, which megatron-core stores among the tensors since 0.19, without COMMON_FILE."""
_MOST_INDEX_BYTES = 1 << 32

CHECKSUMS_FILE = "checksums.json"
"""Lengths and checksums of the files in a checkpoint or in data_index/."""
UNFINISHED_FILE = ".unfinished"
REMOVED_FILE = ".removed"
"""Marks in a checkpoint of a store: it is being written, it is being removed."""

SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
WEIGHTS_NAME, WEIGHTS_INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER_WEIGHTS_NAME, ADAPTER_CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"
"""Weight files of Hugging Face and PEFT, as in transformers.utils, whose import takes 0.4 s."""
STEP_FILE = "trainer_state.json"
"""{"global_step": 100}: the step of a model or an adapter; name and key as in transformers' Trainer."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
"""A tokenizer's folder has at least one of these files; tokenizer_config.json alone cannot be loaded."""

# In a data set: a local folder or a snapshot of the hub.
TABLES, TEXT = (".csv", ".tsv"), ".txt"
DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".gz", ".zst", *TABLES)
"""Suffixes of the files that are read from a folder. The format is detected by content."""

_ARROW = ".arrow"
_STATE = "state.json"
_DESCRIPTION = re.compile(r"(dataset_infos?|dataset_dict|\..*)\.json")
"""Files that Hugging Face's datasets writes beside rows; state.json only beside Arrow files."""
_CACHE = re.compile(r"cache-.*\.arrow")
"""Results of `map` and `filter`, which datasets caches in the folder of a loaded set."""


def iteration_name(iteration: int) -> str:
    """Return the name of one checkpoint's folder: iter_0000100."""
    return f"{_ITERATION_PREFIX}{iteration:07d}"


def iteration_of(folder: AnyPath) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None for any other name."""
    match = re.fullmatch(rf"{_ITERATION_PREFIX}(\d{{1,18}})", folder.name)
    return int(match[1]) if match else None


def find_checkpoint_root(folder: AnyPath) -> AnyPath:
    """Return the folder of a run's checkpoints: `folder`/checkpoint if that exists, else `folder` itself."""
    checkpoints = folder / CHECKPOINT_FOLDER
    return checkpoints if checkpoints.is_dir() else folder


def lacking_files(folder: AnyPath) -> list[str]:
    """Return the names of a checkpoint's required files that this folder lacks."""
    lacking = [name for name in _CHECKPOINT_FILES if not (folder / name).is_file()]
    if lacking == [COMMON_FILE]:
        with suppress(OSError):  # the checkpoint's reader reports the error
            # checksums.json is short. Other programs write only the index, which may have 100 MB.
            if (folder / CHECKSUMS_FILE).is_file():
                is_missing = COMMON_FILE.encode() in read_small(folder / CHECKSUMS_FILE)
            else:
                index = read_small(folder / METADATA_FILE, _MOST_INDEX_BYTES)
                is_missing = COMMON_KEY.encode() not in index
            return lacking if is_missing else []
    return lacking


def is_complete(folder: AnyPath) -> bool:
    """Return whether the folder has all files that every checkpoint has."""
    return not lacking_files(folder)


def is_legacy(root: AnyPath) -> bool:
    """Return whether `root`, or a checkpoint in it, has Megatron-LM's old format: one pickle per rank."""
    return any(root.glob("mp_rank_*")) or any(root.glob("*/mp_rank_*"))


def is_released(root: AnyPath) -> bool:
    """Return whether the tracker in `root` names a converted model, with the errors of `read_tracker`."""
    return read_tracker(root) == RELEASE


def read_tracker(root: AnyPath) -> str | None:
    """Return the content of the tracker file in `root`, or None if there is no tracker file.

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
    """Return the iteration in a tracker's content, or None if there is none, as for `release`."""
    return to_int(tracked) if tracked is not None and tracked.isdecimal() else None


def newest_of(root: AnyPath, iterations: Iterable[int]) -> int | None:
    """Return the newest iteration in `root`, or None if there is none; errors as in `read_tracker`.

    The tracker names it, unless a later checkpoint has a marker that is younger than the tracker: then a run
    was killed between writing the two. Users who go back write an older number into the tracker, which is
    then younger than the markers.
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
    """Return a file's mtime in seconds by the clock of its file system, or -1 if it is missing."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return -1.0


def complete_iterations(root: AnyPath) -> list[int]:
    """Return the iterations of all complete checkpoints in `root`, in any order."""
    return [iteration for iteration in all_iterations(root) if is_complete(root / iteration_name(iteration))]


def all_iterations(root: AnyPath) -> list[int]:
    """Return the iterations of all folders in `root` with a checkpoint's name, in any order."""
    found = (iteration_of(root / name) for name in subfolders(root))
    return [iteration for iteration in found if iteration is not None]


def row_files(files: Iterable[Path], *, with_text: bool = False) -> list[Path]:
    """Return the files of a folder that hold rows, sorted; no descriptions of a set and no caches.

    CSV and TSV files count only if no other file has rows: they often list something else. Plain text counts
    only if requested, and if there are no such tables either.
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


def check_saved(files: Sequence[Path]) -> None:
    """Check that a folder has all files that `save_to_disk` wrote.

    Raises:
        DataError: a file is missing.
    """
    for state in (file for file in files if file.name == _STATE):
        try:
            listed = [state.parent / entry["filename"] for entry in read_json(state)["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError):  # written by another program
            continue
        if missing := sorted({*listed}.difference(files)):
            raise DataError(f"{missing[0]} is missing, which {_STATE} beside it lists; copy the folder again")
