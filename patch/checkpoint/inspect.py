"""What a stored checkpoint is: its files, tensors, origin, and what can load it; no model is built."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from patch.checkpoint.folder import unverified_weights
from patch.checkpoint.manifest import read_manifest
from patch.checkpoint.stored import Reader, StoredTensor, is_legacy_checkpoint, open_stored
from patch.config.fields import FIELDS, coerce
from patch.errors import CheckpointError, ConfigError
from patch.families import ModelConfig, expert_layers, tensor_parallel_units
from patch.families.weights import EMBEDDING_PARAMETER
from patch.plan.parameters import total_parameters
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
    is_released,
    iteration_name,
)
from patch.storage.places import AnyPath, file_sizes, file_stats, subfolders
from patch.storage.text_files import parse_yaml

_GROUPS = {"optimizer": "optimizer states", "random": "random states", "rng_state": "random states"}
"""First part of a name -> group; everything else is weights."""
_FIELDS = {field.name for field in fields(ModelConfig)}
_NAME = re.compile(r"iter_\d+")
_LAYER = re.compile(r"layers\.\d+\.")
_NOT_UPSTREAMS = "embedding.norm."
"""A norm that no GPTModel of megatron-core has."""
_PREFIXLESS = re.compile(r"(decoder|embedding|output_layer)\.")
"""The beginning of megatron-core's default names."""
_LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "context_parallel_size", "nnodes", "nproc_per_node", "use_distributed_optimizer",
    "overlapped_distributed_optimizer", "data_parallel_sharding", "num_distributed_optimizer_instances",
)  # fmt: skip


@dataclass(frozen=True)
class FileState:
    """A file of a checkpoint, after its comparison with its checksum."""

    name: str
    num_bytes: int
    complaint: str | None
    """What is wrong with it, in words."""
    is_verified: bool
    """Whether it has a checksum."""


@dataclass(frozen=True)
class Neighbour:
    """A checkpoint in the same folder of checkpoints."""

    name: str
    num_bytes: int
    note: str
    """Such as "best", or "incomplete"."""


@dataclass(frozen=True)
class AlikeTensors:
    """Tensors that differ only in the number of their layer."""

    name: str
    group: str
    """weights, optimizer states, random states"""
    num_tensors: int
    num_bytes: int
    """Bytes of all of them."""
    shape: list[int]
    dtype: str


@dataclass(frozen=True)
class Inspection:
    """All that is known of a checkpoint, as plain values."""

    folder: str
    format: str
    """torch_dist, or mp_rank: Megatron-LM's old one."""
    saved: str
    """Time of the newest of its files."""
    files: list[FileState]
    complaints: list[str]
    """What is wrong with it, damaged files included."""
    facts: dict[str, Any]
    """Iteration, versions, layout, vocabulary: those that are known."""
    tensors: list[AlikeTensors]
    num_objects: int
    loads_into: list[str]
    neighbours: list[Neighbour]


def find_stored(load: AnyPath) -> AnyPath:
    """The checkpoint at `load`, damaged or not: itself, or the one whose weights would be loaded, or remains.

    Args:
        load: a run's folder, a folder of checkpoints, or one checkpoint.

    Raises:
        CheckpointError: there is none.
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
        if not any(file.complaint and str(folder / file.name) in str(error) for file in files):
            complaints.append(str(error))
    tensors = _grouped(reader.tensors) if reader else []
    config = _config_of(folder, common)
    is_legacy = is_legacy_checkpoint(folder)
    newest = max((stat.st_mtime for stat in file_stats(folder).values()), default=0.0)
    inspection = Inspection(
        folder=str(folder),
        format="mp_rank" if is_legacy else "torch_dist",
        saved=datetime.fromtimestamp(newest).astimezone().isoformat(sep=" ", timespec="seconds"),
        files=files,
        complaints=complaints,
        facts=_facts(folder, common, config, tensors),
        tensors=tensors,
        num_objects=len(reader.objects) if reader else 0,
        loads_into=[] if complaints else _loads_into(tensors, config, common, is_legacy=is_legacy),
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
    """The type of a tensor's values, such as bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def _config_of(folder: AnyPath, common: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the run, or at least the model's fields; empty where they are not known."""
    text = common.get("config")
    try:
        config = parse_yaml(text) if isinstance(text, str) else None
    except ValueError:
        config = None
    if isinstance(config, dict) and isinstance(config.get("model"), dict):
        return config
    for home in (folder, folder.parent) if isinstance(folder, Path) else ():
        if has_hf_config(home):
            with suppress(ConfigError):
                return {"model": read_hf_config(home)}
    return {}


def _facts(
    folder: AnyPath, common: dict[str, Any], config: dict[str, Any], tensors: list[AlikeTensors]
) -> dict[str, Any]:
    facts = {key: value for key, value in plain_values(common).items() if key not in ("config", "args")}
    parallel = config.get("parallel")
    if isinstance(parallel, dict):
        facts["layout"] = {name: parallel[name] for name in _LAYOUT if name in parallel}
    model, _ = _model_of(config)
    if model is not None and model.num_experts:
        facts["experts"] = {"of a layer": model.num_experts, "of a token": model.moe_router_topk}
        with suppress(TypeError, ValueError):  # a file may say anything
            total, active = (int(total_parameters(model, active=active)) for active in (False, True))
            facts["parameters"] = {"all": total, "of a token": active}
    writers = {path.name.split("_")[2] for path in folder.glob("__*_*.distcp")}
    if writers:
        facts["processes that wrote it"] = len(writers)
    for each in tensors:
        if each.group == "weights" and each.name.endswith(EMBEDDING_PARAMETER) and each.shape:
            stored, used = each.shape[0], config.get("model", {}).get("vocab_size")
            vocabulary = {"stored rows": stored}
            if isinstance(used, int) and not each.name.startswith("mp_rank_"):
                vocabulary |= {"used rows": used, "padding": stored - used}
            facts["vocabulary"] = vocabulary
    return facts


def plain_values(common: dict[str, Any]) -> dict[str, Any]:
    """The texts and numbers of common.pt, and dicts of them; in a hostile file dicts may have no end."""
    found = {}
    for name, value in common.items():
        parts = value.items() if isinstance(value, dict) else [(name, value)]
        if isinstance(name, str) and all(isinstance(key, str) and _is_plain(each) for key, each in parts):
            found[name] = value
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**64)


def _loads_into(
    tensors: list[AlikeTensors], config: dict[str, Any], common: dict[str, Any], *, is_legacy: bool
) -> list[str]:
    weights = [each.name for each in tensors if each.group == "weights"]
    if not any(name.endswith(EMBEDDING_PARAMETER) for name in weights):
        return []
    described = "" if config else ", with --hf-config: nothing here describes the model"
    targets = [f"transformers: llama-patch convert mcore2hf{described}"]
    if is_legacy:
        return targets
    model, _ = _model_of(config)
    # Layers are stacked on a leading axis, but where only some have experts.
    is_stacked = model is None or len(expert_layers(model)) in (0, model.num_layers)
    are_stacked = not any("layers.*." in name for name in weights)
    if are_stacked == is_stacked and all(_PREFIXLESS.match(name) for name in weights):
        if not any(_NOT_UPSTREAMS in name for name in weights):
            of_upstream = "a plain GPTModel of megatron-core: dist_checkpointing.load, at any TP, PP and DP"
            targets.insert(0, of_upstream)
        targets.insert(0, f"this project's model, as position 22: weights, {_layouts(config)}")
    if any(each.group == "optimizer states" for each in tensors) and "optimizer_steps" in common:
        targets.insert(0, "a resume of its run: weights, optimizer states and random generators")
    return targets


def _model_of(config: dict[str, Any]) -> tuple[ModelConfig | None, int]:
    """The model that a file describes, and what TP divides; None and 0 if it says something else."""
    stored = config.get("model", {}).items()
    try:
        # A run writes words for what is off, a converted folder leaves it out or has null.
        given = [(name, value) for name, value in stored if name in _FIELDS and value is not None]
        known = {name: coerce(FIELDS[name], value, name) for name, value in given}
        model = ModelConfig(**{"seq_length": 1} | known)
        divisor = math.gcd(*tensor_parallel_units(model).values())
        return (model, divisor) if divisor else (None, 0)
    except (TypeError, ConfigError):
        return None, 0


def _layouts(config: dict[str, Any]) -> str:
    model, divisor = _model_of(config)
    if model is None:
        return "at any TP that divides the model, any PP and DP"
    legal, of_experts = (
        ", ".join(str(n) for n in range(1, min(number, 1024) + 1) if number % n == 0)
        for number in (divisor, model.num_experts or 0)
    )
    ending = f", EP {of_experts}" if of_experts else ""
    return f"at TP {legal}, PP up to {model.num_layers}, any DP{ending}"


def _neighbours(folder: AnyPath) -> list[Neighbour]:
    """All checkpoints in its folder, from old to new."""
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
