"""`validate_run`: check every rule of a run before a process starts. The rules in this module look at files.

The rules that need arithmetic only are in `patch.checks`. Nothing is created: whether OUTPUT_BASEPATH can be
written is tested on the nearest folder that exists.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from filecmp import cmp
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from patch.checks.layout import fewer_machines_suffice
from patch.checks.notes import notes
from patch.checks.rules import RULES, Rule
from patch.checks.run_length import profile_names_steps
from patch.config.choices import BuiltInTemplate, Service
from patch.config.data_spec import nearest_set, set_files, sets_of
from patch.config.fields import FIELDS, check_choice, scalar_of, value_of
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError, DataError, about, nearest
from patch.families import PRESETS, SHAPE_FIELDS, differences
from patch.families.adapters import adapters_of
from patch.preflight.checkpoint_places import checkpoint_root, store_errors
from patch.preflight.eval_tasks import tasks_are_there
from patch.preflight.model_of_folder import adapter_loaded, has_hf_config, is_hf_folder, run_behind, shape_at
from patch.storage.hub import hub_name, lack_of_repository
from patch.storage.names import (
    PUSHED_FILE,
    RELEASE,
    TOKENIZER_FILES,
    TRACKER,
    complete_iterations,
    find_checkpoint_root,
    is_complete,
    is_legacy,
    is_released,
)
from patch.storage.places import IN_MEMORY, AnyPath, any_path, file_system_of, nearest_folder
from patch.storage.remote import RemotePath, is_url
from patch.storage.teacher_store import read_header
from patch.text import size_text

_HIGHEST_RATE = 0.1
"""Learning rate of Adam above which there is a warning."""
_PACKAGES = {"mlflow": "mlflow-skinny"}
"""Packages of services whose name differs from their module; mlflow-skinny has no server."""


def weights_are_there(config: RunConfig, machine: MachineFacts) -> None:
    """Require none, a Hugging Face or converted folder, or a run's folder or checkpoint/ at position 22."""
    load = config.checkpoint.load
    if config.adapter.quantize_base and not (load and is_hf_folder(load)):
        why = f"matrices are quantized to nf4 ({where('quantize_base')}) while such a folder is read"
        refuse("load", load or "none", "a Hugging Face folder (config.json)", why)
    if load is None or is_hf_folder(load):
        return
    with store_errors("load"):
        found = _lack_of_weights(load)
    run = None if found else run_behind(load)
    if run is not None and run.adapter.is_on:
        found = (
            f"checkpoints of adapters of {run.checkpoint.load or 'random weights'}; give hf/ beside them "
            "(--export-hf), or merge adapter/ there into these weights (llama-patch merge)"
        )
    if found:
        either = "a Hugging Face folder (config.json), a converted one, or a run's folder or checkpoint/"
        refuse("load", load, f"none, {either}", found)


def _lack_of_weights(load: str) -> str:
    """Return a message on what is there instead of a checkpoint, or "" if there is a checkpoint."""
    folder = any_path(load)
    root = find_checkpoint_root(folder)
    released = is_released(root) and is_complete(root / RELEASE)
    if complete_iterations(root) or released or is_complete(folder):
        return ""
    if is_legacy(root):
        return (
            "a checkpoint of Megatron-LM's old format (mp_rank_*), which the converter reads: "
            "llama-patch convert mcore2hf"
        )
    if (root / TRACKER).is_file():
        return f"{root / TRACKER} is there, but no complete checkpoint (iter_*, release) beside it"
    if isinstance(folder, RemotePath) and (folder / "config.json").is_file():
        return "a Hugging Face folder in a store: copy it to a disk, or give its name on the hub (org/name)"
    return "a folder without either" if folder.is_dir() else "no such folder"


def weights_have_this_shape(config: RunConfig, machine: MachineFacts) -> None:
    """Require the run's shape of the weights at position 22."""
    size = config.model.model_size
    for file, field, theirs, ours, is_other in _differences(config):
        if not is_other:
            continue
        is_of_size = field in SHAPE_FIELDS and size in PRESETS
        if is_of_size and PRESETS[size].get(field, FIELDS[field].default) == getattr(config.model, field):
            why = f"{file} has {FIELDS[field].flag} {theirs}, {size} has {ours}"
            refuse("model_size", size, "auto, or the size of these weights", why)
        refuse(field, ours, theirs, f"{file} says so (MODEL_SIZE=auto reads the shape from there)")


def _differences(config: RunConfig) -> Iterator[tuple[AnyPath, str, str, str, bool]]:
    """Yield fields in which the loaded model differs: (file, field, its value, ours, do weights differ)."""
    stored = shape_at(config.checkpoint.load)
    if stored is None:
        return
    for field, theirs, is_other in differences(config.model, stored.fields):
        their = str(FIELDS[field].to_scalar(theirs))
        yield stored.file, field, their, str(scalar_of(config, field)), is_other


def numerics_notes(config: RunConfig) -> Iterator[str]:
    """Yield one line for each value that differs from the loaded model's although the weights fit."""
    for file, field, theirs, ours, _ in _differences(config):
        yield f"{where(field)}: {ours} here, {theirs} in {file}"


def adapters_are_those_loaded(config: RunConfig, machine: MachineFacts) -> None:
    """Require the run's adapters in the PEFT folder of --lora-load; only their dropout may differ."""
    theirs, ours = adapter_loaded(config), config.adapter
    for name in ("lora_rank", "alpha", "lora_rslora"):
        got, expected = getattr(ours, name), getattr(theirs, name)
        if got != expected:
            refuse("lora_alpha" if name == "alpha" else name, got, expected, f"{ours.lora_load} has it")
    if adapters_of(config.model, theirs) != adapters_of(config.model, ours):
        expected = theirs.lora_target_modules
        refuse("lora_target_modules", ours.lora_target_modules, expected, f"{ours.lora_load} has them")


def tokenizer_is_there(config: RunConfig, machine: MachineFacts) -> None:
    """Require a tokenizer, given by a flag or in the folder of the weights."""
    folder = config.tokenizer_folder
    if folder is None:
        why = "without PRETRAIN_CHECKPOINT_PATH there is none to take it from"
        refuse("tokenizer_name_or_path", "none", "a folder of a Hugging Face tokenizer", why)
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        expected = f"a folder with one of {', '.join(TOKENIZER_FILES)}"
        found = "none of them is there" if Path(folder).is_dir() else "no such folder"
        refuse("tokenizer_name_or_path", folder, expected, found)


def _other_tokenizer(config: RunConfig) -> tuple[str, str]:
    """Return a remark if the tokenizer is not position 22's, and the files in which the two differ."""
    load, used = config.checkpoint.load, config.tokenizer_folder
    if load is None or used is None:
        return "", ""
    run = None if has_hf_config(load) else run_behind(load)
    own = load if run is None else run.tokenizer_folder
    if own is None:
        return "", ""
    theirs, ours = ([Path(folder) / name for name in TOKENIZER_FILES] for folder in (own, used))
    if not any(file.is_file() for file in theirs) or os.path.realpath(own) == os.path.realpath(used):
        return "", ""
    differing = [
        one.name
        for one, other in zip(theirs, ours, strict=True)
        if one.is_file() != other.is_file() or (one.is_file() and not cmp(one, other, shallow=False))
    ]
    remark = f"{where('tokenizer_name_or_path')}: {used} is used, not the tokenizer in {own}"
    return remark, " and ".join(differing)


def chat_template_is_there(config: RunConfig, machine: MachineFacts) -> None:
    """Require --chat-template to be the name of a built-in template or a file."""
    chosen, names = config.data.chat_template, get_args(BuiltInTemplate)
    if chosen is None or chosen in names or os.path.isfile(chosen):
        return
    why = f"there is no file of that name{nearest(chosen, list(names))}"
    refuse("chat_template", chosen, f"{', '.join(names)}, or a .jinja file", why)


def tokenizer_notes(config: RunConfig) -> Iterator[str]:
    """Yield one line if the tokenizer is not in position 22's folder, but has the same files."""
    remark, differing = _other_tokenizer(config)
    if remark and not differing:
        yield f"{remark}, which has the same files"


def run_warnings(config: RunConfig) -> list[str]:
    """Return one line if the tokenizer differs from position 22's, and for each learning rate too high."""
    remark, differing = _other_tokenizer(config)
    text = f"{remark}, whose {differing} differs: the weights were trained with that one"
    lines = [text] if differing else []
    for name in ("lr", "decoupled_lr"):
        if (rate := value_of(config, name) or 0) > _HIGHEST_RATE:
            why = f"Adam moves each weight by about the rate in a step. Expected at most {_HIGHEST_RATE}"
            lines.append(f"{where(name)}: got {rate:g}, at which the loss mostly grows. {why}")
    return lines


def store_is_there(config: RunConfig, machine: MachineFacts) -> None:
    """Require --save to be a store that answers. Its lock shows later whether the store can be written."""
    save = config.checkpoint.save
    if save is None:
        return
    scheme = save.partition("://")[0]
    if not is_url(save) or scheme in ("file", "local"):
        why = (
            "on a disk, checkpoints are in checkpoint/ in OUTPUT_BASEPATH (position 25), which may be a "
            "symbolic link to a folder elsewhere"
        )
        refuse("save", save, "the URL of a store, such as s3://bucket/run", why)
    if scheme == "memory":
        refuse("save", save, "a store that stays", "the memory of a process ends with it")
    with store_errors("save"):
        checkpoint_root(config).exists()
        bucket = RemotePath(f"{scheme}://{save.partition('://')[2].partition('/')[0]}")
        if not bucket.has_folders and not _may_exist(bucket):
            refuse("save", save, "a bucket that exists", f"there is no {bucket}")


def _may_exist(bucket: RemotePath) -> bool:
    try:
        return bucket.exists()
    except PermissionError:  # the user may have access to only a part of the bucket
        return True


def output_is_writable(config: RunConfig, machine: MachineFacts) -> None:
    """Require OUTPUT_BASEPATH to be a folder on a disk that can be written or created."""
    if is_url(config.checkpoint.output_path):
        cure = "a folder on a disk, for logs and the like, and --save URL for the checkpoints"
        raise ConfigError(f"got {config.checkpoint.output_path}, expected {cure}", field="output_path")
    path = Path(config.checkpoint.output_path).absolute()
    nearest = nearest_folder(path)
    if not nearest.is_dir():
        refuse("output_path", path, "a folder", f"{nearest} is a file")
    if not _can_hold_files(nearest):
        refuse("output_path", path, "a folder that can be written", f"{nearest} is not writable")


def offload_folder_is_on_a_disk(config: RunConfig, machine: MachineFacts) -> None:
    """Require --offload-folder to be writable, and not in memory itself."""
    if (folder := config.optimizer.offload_folder) is None:
        return
    nearest, expected = nearest_folder(Path(folder)), "a folder on a disk that can be written"
    if not nearest.is_dir() or not _can_hold_files(nearest):
        refuse("offload_folder", folder, expected, f"{nearest} is not writable, or no folder")
    if (kind := file_system_of(nearest.resolve())) in IN_MEMORY:
        refuse("offload_folder", folder, expected, f"{nearest} is on {kind}, which is host memory")


def check_offload_room(config: RunConfig, num_bytes: int) -> None:
    """Require `num_bytes`, which the processes of this machine need, on the disk of --offload-folder."""
    if (folder := config.optimizer.offload_folder) is None:
        return
    free = shutil.disk_usage(nearest_folder(Path(folder))).free
    if free < num_bytes:
        expected = f"a disk with {size_text(num_bytes)} for optimizer states"
        refuse("offload_folder", folder, expected, f"it has {size_text(free)} free")


def services_are_installed(config: RunConfig, machine: MachineFacts) -> None:
    """Require the libraries of the services that --report-to names."""
    for name in config.checkpoint.services:
        check_choice(name, list(get_args(Service)), "--report-to")
        library = find_spec(name)
        if library is None or library.origin is None:  # without one it is a folder of this name
            why = f"{name} is not installed: pip install {_PACKAGES.get(name, name)}"
            refuse("report_to", name, "services whose libraries are there", why)


def hub_takes_the_export(config: RunConfig, machine: MachineFacts) -> None:
    """Require --push-to-hub to be a repository that the export may create or update."""
    checkpoint = config.checkpoint
    repo, pushed = checkpoint.push_to_hub, Path(checkpoint.output_path) / PUSHED_FILE
    if repo is not None and (lack := lack_of_repository(repo, pushed, checkpoint.push_to_hub_as)):
        refuse("push_to_hub", repo, "ORG/NAME of a repository that the run may create", lack)


def stop_file_is_absent(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse a run whose stop file exists; it would end after its first step."""
    if os.path.exists(config.stop_file):
        why = "it was put there to end this run; remove it when the run may go on"
        refuse("stop_file", config.stop_file, "no file there", why)


def _can_hold_files(folder: Path) -> bool:
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    if os.statvfs(folder).f_blocks:
        return True
    # A file system without a size: either /proc, whose mode allows root to write although it cannot, or one
    # that does not report its size.
    try:
        with TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def teacher_is_of_this_run(config: RunConfig, machine: MachineFacts) -> None:
    """Require a store of a teacher (--distill-from) of the run's vocabulary and temperature."""
    data = config.data
    if data.distill_from is None:
        return
    header = read_header(data.distill_from)
    for field, theirs in (("vocab_size", header.vocab_size), ("distill_temperature", header.temperature)):
        if (ours := value_of(config, field)) != theirs:
            refuse(field, ours, str(theirs), f"{data.distill_from}, written by {header.teacher}, has it")


FILE_RULES: tuple[Rule, ...] = (
    weights_are_there,
    weights_have_this_shape,
    adapters_are_those_loaded,
    tokenizer_is_there,
    chat_template_is_there,
    tasks_are_there,
    teacher_is_of_this_run,
    output_is_writable,
    offload_folder_is_on_a_disk,
    store_is_there,
    services_are_installed,
    hub_takes_the_export,
    stop_file_is_absent,
)


def check_data(config: RunConfig) -> None:
    """Check that the files of all data sets exist and can be read.

    Raises:
        DataError: a file is missing or cannot be read; the message names it.
    """
    data = config.data
    for field, parts in sets_of(data).items():
        with about(field):
            for part in parts:
                if data.dataset_type == "raw" and hub_name(part.path, "dataset") is not None:
                    continue  # fetched and checked by `fetch_from_hub`
                for file in set_files(data, part.path):
                    _check_file(part.path, file)


def _check_file(path: str, file: str) -> None:
    if not os.path.exists(file):
        cure = "the path of .bin and .idx without the ending"
        if path.endswith((".bin", ".idx")):
            cure += f", that is {path[:-4]}"
        elif os.path.isfile(path):
            raise DataError(
                f"got {path}, which is a file itself, expected {cure}, as llama-patch "
                "preprocess writes them (fine-tuning on rows: SFT=true, MP_DATASET_TYPE=raw)"
            )
        raise DataError(f"got {path}: {file} does not exist, expected {cure}{nearest_set(path)}")
    if not os.path.isfile(file):
        kind = "a folder" if os.path.isdir(file) else "a pipe or a device"
        raise DataError(
            f"{file} is {kind}, expected a file: every process reads it, and again when the run is resumed"
        )
    if not os.access(file, os.R_OK):
        raise DataError(f"{file} cannot be read by this user")


def validate_run(config: RunConfig, machine: MachineFacts) -> list[str]:
    """Check the whole configuration, then that the data files exist.

    Returns:
        One line for each value that has no effect or differs from the loaded model's value. `run_warnings`
        returns the warnings.

    Raises:
        ConfigError: a value cannot work; the message says got, expected and why.
        DataError: a data file is missing; raised only if the configuration itself is right.
    """
    for rule in (*RULES, fewer_machines_suffice, profile_names_steps, *FILE_RULES):
        rule(config, machine)
    check_data(config)
    return [*notes(config, machine), *numerics_notes(config), *tokenizer_notes(config)]
