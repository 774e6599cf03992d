"""The rules of a run that look at files: folders that make a configuration wrong, and data that is missing.

Whether OUTPUT_BASEPATH can be written is asked of the nearest folder that exists; nothing is left there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from filecmp import cmp
from pathlib import Path
from tempfile import TemporaryDirectory

from patch.config.fields import FIELDS
from patch.config.hf_config import has_hf_config, is_hf_folder
from patch.config.positions import where
from patch.config.rules import Rule, refuse
from patch.config.schema import DataConfig, RunConfig
from patch.config.stored_shape import run_behind, shape_at
from patch.device import MachineFacts
from patch.errors import DataError
from patch.families import WEIGHT_FIELDS
from patch.storage.names import (
    RELEASE,
    TOKENIZER_FILES,
    TRACKER,
    complete_iterations,
    find_checkpoint_root,
    is_complete,
    is_legacy,
    is_released,
)

_STRUCTURE = WEIGHT_FIELDS | {"make_vocab_size_divisible_by"}
"""Fields that decide the tensors' shapes; the rest of a shape only changes what is computed with them."""


def weights_are_there(config: RunConfig, machine: MachineFacts) -> None:
    """Position 22 is a Hugging Face folder, a converted one, a run's folder or its checkpoint/, or none."""
    load = config.checkpoint.load
    if load is None or is_hf_folder(load):
        return
    root = find_checkpoint_root(load)
    released = is_released(root) and is_complete(root / RELEASE)
    if complete_iterations(root) or released or is_complete(Path(load)):
        return
    found = "a folder without either" if Path(load).is_dir() else "no such folder"
    if is_legacy(root):
        found = (
            "a checkpoint of Megatron-LM's old format (mp_rank_*), which the converter reads: "
            "python -m toolkits.convert mcore2hf"
        )
    elif (root / TRACKER).is_file():
        found = f"{root / TRACKER} is there, but no complete checkpoint (iter_*, release) beside it"
    expected = "none, a Hugging Face folder (config.json), a converted one, or a run's folder or checkpoint/"
    refuse("load", load, expected, found)


def weights_have_this_shape(config: RunConfig, machine: MachineFacts) -> None:
    """The weights at position 22 are of the run's shape."""
    for file, field, theirs, ours in _differences(config):
        if field in _STRUCTURE:
            refuse(field, ours, theirs, f"{file} says so (MODEL_SIZE=auto reads the shape from there)")


def _differences(config: RunConfig) -> Iterator[tuple[Path, str, str, str]]:
    """(file, field, theirs, ours) wherever the loaded model's description and the run disagree, as text."""
    found = shape_at(config.checkpoint.load)
    if found is None:
        return
    for field, theirs in found.fields.items():
        ours = getattr(config.model, field)
        if theirs != ours:
            to_text = FIELDS[field].to_scalar
            yield found.file, field, str(to_text(theirs)), str(to_text(ours))


def numerics_notes(config: RunConfig) -> Iterator[str]:
    """One line for each value that differs from the loaded model's though its weights fit."""
    for file, field, theirs, ours in _differences(config):
        yield f"{where(field)}: {ours} here, {theirs} in {file}"


def tokenizer_is_there(config: RunConfig, machine: MachineFacts) -> None:
    """A tokenizer is named, or lies beside the weights."""
    folder = config.tokenizer_folder
    if folder is None:
        why = "without PRETRAIN_CHECKPOINT_PATH there is none to take it from"
        refuse("tokenizer_name_or_path", "none", "a folder of a Hugging Face tokenizer", why)
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        expected = f"a folder with one of {', '.join(TOKENIZER_FILES)}"
        found = "none of them is there" if Path(folder).is_dir() else "no such folder"
        refuse("tokenizer_name_or_path", folder, expected, found)


def _differing_files(config: RunConfig) -> tuple[str, list[str]] | None:
    """The tokenizer folder of position 22 where another is used, and the tokenizer files that differ."""
    load, used = config.checkpoint.load, config.tokenizer_folder
    if load is None or used is None:
        return None
    run = None if has_hf_config(load) else run_behind(load)
    own = load if run is None else run.tokenizer_folder
    if own is None:
        return None
    theirs, ours = ([Path(folder) / name for name in TOKENIZER_FILES] for folder in (own, used))
    if not any(file.is_file() for file in theirs) or os.path.realpath(own) == os.path.realpath(used):
        return None
    differing = [
        one.name
        for one, other in zip(theirs, ours, strict=True)
        if one.is_file() != other.is_file() or (one.is_file() and not cmp(one, other, shallow=False))
    ]
    return own, differing


def tokenizer_notes(config: RunConfig) -> Iterator[str]:
    """One line where the tokenizer is not the one of position 22, but the same in another place."""
    found = _differing_files(config)
    if found and not found[1]:
        yield f"{_other_tokenizer(config, found[0])}, which has the same files"


def run_warnings(config: RunConfig) -> list[str]:
    """One line where the tokenizer is another one than that of position 22."""
    found = _differing_files(config)
    if not found or not found[1]:
        return []
    files = " and ".join(found[1])
    return [
        f"{_other_tokenizer(config, found[0])}, whose {files} differs: the weights were trained with that one"
    ]


def _other_tokenizer(config: RunConfig, own: str) -> str:
    return f"{where('tokenizer_name_or_path')}: {config.tokenizer_folder} is used, not the tokenizer in {own}"


def output_is_writable(config: RunConfig, machine: MachineFacts) -> None:
    """OUTPUT_BASEPATH is a folder that can be written, or can be made."""
    path = Path(config.checkpoint.output_path).absolute()
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest.is_dir():
        refuse("output_path", path, "a folder", f"{nearest} is a file")
    if not _can_hold_files(nearest):
        refuse("output_path", path, "a folder that can be written", f"{nearest} is not writable")


def _can_hold_files(folder: Path) -> bool:
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    if os.statvfs(folder).f_blocks:
        return True
    try:  # no size: /proc, where root may write by the mode and yet cannot, or one that does not tell it
        with TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


FILE_RULES: tuple[Rule, ...] = (
    weights_are_there,
    weights_have_this_shape,
    tokenizer_is_there,
    output_is_writable,
)


def data_files(data: DataConfig, path: str) -> list[str]:
    """The files that `train_data_path` or `valid_data_path` names."""
    return [path] if data.dataset_type == "raw" else [f"{path}.bin", f"{path}.idx"]


def check_data(config: RunConfig) -> None:
    """The data set's files are there and readable.

    Raises:
        DataError: names the file and the field.
    """
    data = config.data
    paths = {"train_data_path": data.train_data_path, "valid_data_path": data.valid_data_path}
    for field, path in paths.items():
        if path is not None:
            for file in data_files(data, path):
                _check_file(field, path, file)


def _check_file(field: str, path: str, file: str) -> None:
    if os.path.isdir(file):
        raise DataError(f"{file} is a folder, expected a JSON or JSONL file", field=field)
    if not os.path.exists(file):
        cure = "a file" if file == path else "the path of .bin and .idx without the ending"
        if path.endswith((".bin", ".idx")):
            cure += f", that is {path[:-4]}"
        elif file != path and os.path.isfile(path):
            raise DataError(
                f"got {path}, which is a file itself, expected {cure}, as python -m toolkits."
                "preprocess_pretrain writes them (fine-tuning on rows: SFT=true, MP_DATASET_TYPE=raw)",
                field=field,
            )
        raise DataError(f"got {path}: {file} does not exist, expected {cure}", field=field)
    if not os.path.isfile(file):
        raise DataError(
            f"{file} is a pipe or a device, expected a file: every process reads it, and "
            "again when the run is resumed",
            field=field,
        )
    if not os.access(file, os.R_OK):
        raise DataError(f"{file} cannot be read by this user", field=field)
