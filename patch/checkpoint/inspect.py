"""The files, tensors and origin of a stored checkpoint; no model is built."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from patch.checkpoint.folder import unverified_weights
from patch.checkpoint.manifest import read_manifest
from patch.checkpoint.stored import Reader, StoredTensor, is_legacy_checkpoint, open_stored
from patch.errors import CheckpointError
from patch.storage.checksums import difference
from patch.storage.names import (
    BEST_LINK,
    CHECKSUMS_FILE,
    COMMON_FILE,
    LAST_LINK,
    METADATA_FILE,
    METADATA_JSON_FILE,
    RELEASE,
    all_iterations,
    complete_iterations,
    find_checkpoint_root,
    is_released,
    iteration_name,
)
from patch.storage.places import AnyPath, file_sizes, file_stats, subfolders
from patch.storage.text_files import parse_yaml

_GROUPS = {"optimizer": "optimizer states", "random": "random states", "rng_state": "random states"}
"""First part of a name -> group; other names are weights."""
_NAME = re.compile(r"iter_\d+")
_LAYER = re.compile(r"layers\.\d+\.")
_LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "context_parallel_size", "nnodes", "nproc_per_node", "use_distributed_optimizer",
    "overlapped_distributed_optimizer", "data_parallel_sharding", "num_distributed_optimizer_instances",
)  # fmt: skip


@dataclass(frozen=True)
class FileState:
    """A checkpoint's file, compared with its checksum."""

    name: str
    num_bytes: int
    complaint: str | None
    """The fault, or None."""
    is_verified: bool
    """Whether it has a checksum."""


@dataclass(frozen=True)
class Neighbour:
    """A checkpoint in the same folder of checkpoints."""

    name: str
    num_bytes: int
    note: str
    """Such as "best" or "incomplete"."""


@dataclass(frozen=True)
class AlikeTensors:
    """Tensors that differ only in their layer number."""

    name: str
    group: str
    """weights, optimizer states or random states"""
    num_tensors: int
    num_bytes: int
    shape: list[int]
    dtype: str


@dataclass(frozen=True)
class Inspection:
    """The known facts of a checkpoint, as plain values."""

    folder: str
    format: str
    """torch_dist, or mp_rank for Megatron-LM's old format"""
    saved: str
    """Time of the newest file."""
    files: list[FileState]
    complaints: list[str]
    """All faults, including damaged files."""
    facts: dict[str, Any]
    """Iteration, versions and layout, if known."""
    tensors: list[AlikeTensors]
    num_objects: int
    neighbours: list[Neighbour]


def find_stored(load: AnyPath) -> AnyPath:
    """Return the checkpoint at `load`, damaged or not.

    It is `load` itself, the checkpoint whose weights would be loaded, or a checkpoint's remains.

    Args:
        load: a run's folder, a folder of checkpoints, or one checkpoint.
    Raises:
        CheckpointError: there is no checkpoint.
        OSError: a store does not answer, also in the functions below.
    """
    is_itself = any((load / name).is_file() for name in (METADATA_FILE, COMMON_FILE, METADATA_JSON_FILE))
    try:
        found = load if is_itself or _NAME.fullmatch(load.name) else unverified_weights(load)[0]
    except CheckpointError:
        root = find_checkpoint_root(load)
        name = RELEASE if is_released(root) else iteration_name(max(all_iterations(root), default=0))
        found = root / name
        if not found.is_dir():
            raise
    return found.resolve() if isinstance(found, Path) else found


def num_bytes_of(folder: AnyPath) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file_sizes(folder).values())


def inspect(folder: AnyPath, advance: Callable[[int], None]) -> tuple[Inspection, Reader | None]:
    """Read all facts about a checkpoint except its values, and verify its checksums.

    Args:
        folder: the checkpoint itself, from `find_stored`.
        advance: called with the number of bytes of each file that was read.
    Returns:
        the inspection, and a reader of the values, or None if the checkpoint cannot be read.
    """
    files, complaints = _verify(folder, advance)
    try:
        reader = open_stored(folder)
        common = reader.common()
    except CheckpointError as error:
        reader, common = None, {}
        if not any(file.complaint and str(folder / file.name) in str(error) for file in files):
            complaints.append(str(error))
    tensors = _grouped(reader.tensors) if reader else []
    newest = max((stat.st_mtime for stat in file_stats(folder).values()), default=0.0)
    inspection = Inspection(
        folder=str(folder),
        format="mp_rank" if is_legacy_checkpoint(folder) else "torch_dist",
        saved=datetime.fromtimestamp(newest).astimezone().isoformat(sep=" ", timespec="seconds"),
        files=files,
        complaints=complaints,
        facts=_facts(folder, common),
        tensors=tensors,
        num_objects=len(reader.objects) if reader else 0,
        neighbours=_neighbours(folder),
    )
    return inspection, reader


def _verify(folder: AnyPath, advance: Callable[[int], None]) -> tuple[list[FileState], list[str]]:
    manifest = read_manifest(folder)
    saved = manifest if isinstance(manifest, dict) else {}
    there = file_sizes(folder)
    files = []
    for name in sorted({*there, *saved}):
        num_bytes = there.get(name, 0)
        complaint = difference(folder / name, saved[name]) if name in saved else None
        files.append(FileState(name, num_bytes, complaint, name in saved))
        advance(num_bytes)
    complaints = [manifest] if isinstance(manifest, str) else []
    complaints += [file.complaint for file in files if file.complaint]
    return files, complaints


def _grouped(tensors: dict[str, StoredTensor]) -> list[AlikeTensors]:
    counts = Counter((_LAYER.sub("layers.*.", name), tensor) for name, tensor in tensors.items())
    found = [
        AlikeTensors(name, _group(name), count, count * kind.num_bytes, list(kind.shape), type_name(kind))
        for (name, kind), count in counts.items()
    ]
    order = ["weights", *_GROUPS.values()]
    return sorted(found, key=lambda each: (order.index(each.group), each.name))


def _group(name: str) -> str:
    parts = [part for part in name.split(".") if not part.startswith("mp_rank_")]
    return next((_GROUPS[part] for part in parts[:3] if part in _GROUPS), "weights")


def type_name(tensor: StoredTensor) -> str:
    """Return the dtype's name, such as bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def _facts(folder: AnyPath, common: dict[str, Any]) -> dict[str, Any]:
    facts = {key: value for key, value in plain_values(common).items() if key not in ("config", "args")}
    text = common.get("config")
    with suppress(ValueError, AttributeError, TypeError):  # a file may say anything
        parallel = parse_yaml(text)["parallel"] if isinstance(text, str) else {}
        if layout := {name: parallel[name] for name in _LAYOUT if name in parallel}:
            facts["layout"] = layout
    if writers := {path.name.split("_")[2] for path in folder.glob("__*_*.distcp")}:
        facts["processes that wrote it"] = len(writers)
    return facts


def plain_values(common: dict[str, Any]) -> dict[str, Any]:
    """Return the texts, the numbers and flat dicts of them. Dicts in a hostile file may nest without end."""
    found = {}
    for name, value in common.items():
        parts = value.items() if isinstance(value, dict) else [(name, value)]
        if isinstance(name, str) and all(isinstance(key, str) and _is_plain(each) for key, each in parts):
            found[name] = value
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**64)


def _neighbours(folder: AnyPath) -> list[Neighbour]:
    root = folder.parent
    complete = set(map(iteration_name, complete_iterations(root)))
    links = [root / name for name in (LAST_LINK, BEST_LINK)] if isinstance(root, Path) else []
    found = []
    for name in sorted(name for name in subfolders(root) if name.startswith("iter_")):
        notes = [link.name for link in links if link.is_symlink() and link.readlink().name == name]
        if name not in complete:
            notes.append("incomplete")
        elif not (root / name / CHECKSUMS_FILE).is_file():
            notes.append("no checksums")
        found.append(Neighbour(name, num_bytes_of(root / name), ", ".join(notes)))
    return found
