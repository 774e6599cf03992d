"""What a stored checkpoint is: its files, tensors, origin, and what can load it; no model is built."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from patch.checkpoint.manifest import read_manifest
from patch.checkpoint.stored import Reader, StoredTensor, is_legacy_checkpoint, open_stored
from patch.errors import CheckpointError, ConfigError
from patch.families.weights import EMBEDDING_PARAMETER
from patch.preflight.checkpoint_places import hint_of_store
from patch.preflight.stored_shape import has_hf_config, read_hf_config
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
    iteration_in,
    iteration_name,
    newest_of,
    read_tracker,
)
from patch.storage.places import AnyPath, file_sizes, file_stats, subfolders
from patch.storage.text_files import parse_yaml

_GROUPS = {"optimizer": "optimizer states", "random": "random states", "rng_state": "random states"}
"""First part of a name -> group; everything else is weights."""
_NAME = re.compile(r"iter_\d+")
_LAYER = re.compile(r"layers\.\d+\.")
_STACKED = re.compile(r"(decoder|embedding|output_layer)\.(?!layers\.\d)")
"""The beginning of megatron-core's default names: layers stacked on a leading axis, no prefix."""
_LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "context_parallel_size", "nnodes", "nproc_per_node", "use_distributed_optimizer",
    "overlapped_distributed_optimizer", "data_parallel_sharding", "num_distributed_optimizer_instances",
)  # fmt: skip


class FileState(NamedTuple):
    """A file of a checkpoint, after its comparison with its checksum."""

    name: str
    num_bytes: int
    complaint: str | None
    """What is wrong with it, in words."""
    is_verified: bool
    """Whether it has a checksum."""


class Neighbour(NamedTuple):
    """A checkpoint in the same folder of checkpoints."""

    name: str
    num_bytes: int
    note: str
    """Such as "best", or "incomplete"."""


class TensorGroup(NamedTuple):
    """Tensors that differ only in the number of their layer."""

    name: str
    group: str
    """weights, optimizer states, random states"""
    tensor: StoredTensor
    num_tensors: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return self.num_tensors * self.tensor.num_bytes


class Inspection(NamedTuple):
    """All that is known of a checkpoint."""

    folder: AnyPath
    format: str
    """torch_dist, or mp_rank: Megatron-LM's old one."""
    saved: str
    """Time of the newest of its files."""
    files: list[FileState]
    complaints: list[str]
    """What is wrong with it, damaged files included."""
    facts: dict[str, Any]
    """Iteration, versions, layout, vocabulary: those that are known."""
    tensors: list[TensorGroup]
    num_objects: int
    loads_into: list[str]
    neighbours: list[Neighbour]

    def as_json(self) -> dict[str, Any]:
        """The inspection as plain values."""
        tensors = [
            {
                "name": each.name, "group": each.group, "num_tensors": each.num_tensors,
                "num_bytes": each.num_bytes, "shape": list(each.tensor.shape),
                "dtype": str(each.tensor.dtype).removeprefix("torch."),
            }
            for each in self.tensors
        ]  # fmt: skip
        return {
            **self._asdict(),
            "folder": str(self.folder),
            "files": [file._asdict() for file in self.files],
            "tensors": tensors,
            "neighbours": [each._asdict() for each in self.neighbours],
        }


def find_stored(load: AnyPath) -> AnyPath:
    """The checkpoint at `load`, damaged or not: itself, or the one that the tracker names, or the newest.

    Args:
        load: a run's folder, a folder of checkpoints, or one checkpoint.

    Raises:
        CheckpointError: there is none.
        OSError: a store does not answer, also in the functions below.
    """
    is_itself = any((load / name).is_file() for name in (METADATA_FILE, COMMON_FILE, METADATA_JSON_FILE))
    if is_itself or _NAME.fullmatch(load.name) or is_legacy_checkpoint(load):
        return load.resolve() if isinstance(load, Path) else load
    root = find_checkpoint_root(load)
    tracked = read_tracker(root) or ""
    newest = newest_of(root, all_iterations(root)) if iteration_in(tracked) is not None else None
    named = root / (tracked if newest is None else iteration_name(newest))
    if tracked and named.is_dir():
        return named
    found = sorted((path for path in root.glob("iter_*") if _NAME.fullmatch(path.name)), key=str)
    found = found or sorted({path.parent for path in root.glob("*/mp_rank_*")}, key=str)
    if not found:
        raise CheckpointError(
            f"{load} has no checkpoint, expected a run's folder, a folder of checkpoints (iter_*, {RELEASE}, "
            f"mp_rank_*) or a checkpoint ({METADATA_FILE} and data files){hint_of_store(load)}"
        )
    return found[-1]


def num_bytes_of(folder: AnyPath) -> int:
    """Bytes of all files in a folder."""
    return sum(file_sizes(folder).values())


def inspect(folder: AnyPath, advance: Callable[[int], None]) -> tuple[Inspection, Reader | None]:
    """Read everything about a checkpoint but its values, and compare its files with their checksums.

    Args:
        folder: the checkpoint itself, from `find_stored`.
        advance: called with the number of bytes of each file that was read.

    Returns:
        The inspection, and a reader of the values; None if the checkpoint cannot be read.
    """
    files, complaints = _verify(folder, advance)
    try:
        reader = open_stored(folder)
        common = reader.common()
    except CheckpointError as error:
        reader, common = None, {}
        complaints.append(str(error))
    tensors = _grouped(reader.tensors) if reader else []
    model, config = _model_of(folder, common)
    is_legacy = is_legacy_checkpoint(folder)
    inspection = Inspection(
        folder=folder,
        format="mp_rank" if is_legacy else "torch_dist",
        saved=_saved(folder),
        files=files,
        complaints=complaints,
        facts=_facts(folder, common, model, config, tensors),
        tensors=tensors,
        num_objects=len(reader.objects) if reader else 0,
        loads_into=[] if complaints else _loads_into(tensors, model, common, is_legacy=is_legacy),
        neighbours=_neighbours(folder),
    )
    return inspection, reader


def _verify(folder: AnyPath, advance: Callable[[int], None]) -> tuple[list[FileState], list[str]]:
    """The files, and what is wrong with them; also the files that should be there."""
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


def _grouped(tensors: dict[str, StoredTensor]) -> list[TensorGroup]:
    counts: dict[tuple[str, StoredTensor], int] = {}
    for name, tensor in tensors.items():
        key = _LAYER.sub("layers.*.", name), tensor
        counts[key] = counts.get(key, 0) + 1
    groups = [TensorGroup(name, _group(name), tensor, count) for (name, tensor), count in counts.items()]
    order = ["weights", *_GROUPS.values()]
    return sorted(groups, key=lambda each: (order.index(each.group), each.name))


def _group(name: str) -> str:
    parts = [part for part in name.split(".") if not part.startswith("mp_rank_")]
    return next((_GROUPS[part] for part in parts[:3] if part in _GROUPS), "weights")


def _saved(folder: AnyPath) -> str:
    newest = max((stat.st_mtime for stat in file_stats(folder).values()), default=0.0)
    return datetime.datetime.fromtimestamp(newest).astimezone().isoformat(sep=" ", timespec="seconds")


def _model_of(folder: AnyPath, common: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's fields, and the whole configuration of the run; empty where they are not known."""
    text = common.get("config")
    try:
        config = parse_yaml(text) if isinstance(text, str) else None
    except ValueError:
        config = None
    if isinstance(config, dict) and isinstance(config.get("model"), dict):
        return config["model"], config
    for home in (folder, folder.parent) if isinstance(folder, Path) else ():
        if has_hf_config(home):
            try:
                return read_hf_config(home), {}
            except ConfigError:
                return {}, {}
    return {}, {}


def _facts(
    folder: AnyPath,
    common: dict[str, Any],
    model: dict[str, Any],
    config: dict[str, Any],
    tensors: list[TensorGroup],
) -> dict[str, Any]:
    facts = {
        key: value
        for key, value in common.items()
        if isinstance(key, str) and key not in ("config", "args") and _is_readable(value)
    }
    parallel = config.get("parallel")
    if isinstance(parallel, dict):
        facts["layout"] = {name: parallel[name] for name in _LAYOUT if name in parallel}
    writers = {path.name.split("_")[2] for path in folder.glob("__*_*.distcp")}
    if writers:
        facts["processes that wrote it"] = len(writers)
    for each in tensors:
        if each.group == "weights" and each.name.endswith(EMBEDDING_PARAMETER) and each.tensor.shape:
            stored, used = each.tensor.shape[0], model.get("vocab_size")
            vocabulary = {"stored rows": stored}
            if isinstance(used, int) and not each.name.startswith("mp_rank_"):
                vocabulary |= {"used rows": used, "padding": stored - used}
            facts["vocabulary"] = vocabulary
    return facts


def _is_readable(value: Any) -> bool:
    """Whether it is a plain value, or a dict of them; in a hostile file dicts may have no end."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**64)


def _loads_into(
    tensors: list[TensorGroup], model: dict[str, Any], common: dict[str, Any], *, is_legacy: bool
) -> list[str]:
    weights = [each.name for each in tensors if each.group == "weights"]
    if not any(name.endswith(EMBEDDING_PARAMETER) for name in weights):
        return []
    described = "" if model else ", with --hf-config: nothing here describes the model"
    targets = [f"transformers: llama-patch convert mcore2hf{described}"]
    if is_legacy:
        return targets
    if all(_STACKED.match(name) for name in weights):
        targets.insert(0, "a plain GPTModel of megatron-core: dist_checkpointing.load, at any TP, PP and DP")
        targets.insert(0, f"this project's model, as position 22: weights, {_layouts(model)}")
    if any(each.group == "optimizer states" for each in tensors) and "optimizer_steps" in common:
        targets.insert(0, "a resume of its run: weights, optimizer states and random generators")
    return targets


def _layouts(model: dict[str, Any]) -> str:
    sizes = [model.get(name) for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size")]
    layers = model.get("num_layers")
    if not (layers and all(isinstance(size, int) and size for size in sizes)):
        return "at any TP that divides the model, any PP and DP"
    common = math.gcd(*(int(size) for size in sizes if size))
    legal = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    return f"at TP {legal}, PP up to {layers}, any DP"


def _neighbours(folder: AnyPath) -> list[Neighbour]:
    """All checkpoints in its folder, from old to new."""
    root = folder.parent
    complete = set(map(iteration_name, complete_iterations(root)))
    links: dict[str, list[str]] = {}
    for link in (LAST_LINK, BEST_LINK):
        path = root / link
        if isinstance(path, Path) and path.is_symlink():
            links.setdefault(path.readlink().name, []).append(link)
    found = []
    for name in sorted(name for name in subfolders(root) if name.startswith("iter_")):
        notes = list(links.get(name, []))
        if name not in complete:
            notes.append("incomplete")
        elif not (root / name / CHECKSUMS_FILE).is_file():
            notes.append("no checksums")
        found.append(Neighbour(name, num_bytes_of(root / name), ", ".join(notes)))
    return found
