"""The resume guard: refuses a resumed run whose configuration or data do not fit the run in its folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from patch.config.data_spec import parse_data
from patch.config.fields import FIELDS, scalar_of, value_of
from patch.config.file_rules import data_files
from patch.config.positions import length_text, where
from patch.config.schema import RunConfig
from patch.config.stored_shape import STORED_SHAPE
from patch.config.yaml_io import read_run
from patch.errors import CheckpointError, ConfigError
from patch.storage.atomic import write_atomically
from patch.storage.names import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    DATA_FINGERPRINT_FILE,
    TOKENIZER_FILES,
    TRACKER,
    complete_iterations,
)

_END_BYTES = 2**20
_PIECE_BYTES = 2**14
_PIECES = 16
_ANEW = "another OUTPUT_BASEPATH (position 25)"
_FROM_WEIGHTS = _ANEW + ", which may start from this one's weights (this folder as position 22)"
_CHANGE = f"--resume-with-changed-data, or {_FROM_WEIGHTS}"


class _Reason(NamedTuple):
    """Why a resumed run must keep a value, and what to do instead."""

    why: str
    instead: str
    may_change: bool = False
    """Whether `--resume-with-changed-data` allows it."""


_SHAPE = _Reason("has a run with another model shape", _ANEW)
_TOKENIZER = _Reason("has a run with another tokenizer", _ANEW)
_TASK = _Reason("has a run on other data", _FROM_WEIGHTS)
_DATA = _Reason("has a run on other data", _CHANGE, may_change=True)
_ORDER = _Reason(
    "has a run that reads its data in another order, so its position in the data would be lost",
    _CHANGE,
    may_change=True,
)
_LENGTH = _Reason(
    "has a pre-training run of another length, which decides the order of its samples",
    _CHANGE,
    may_change=True,
)
_TYPE = _Reason("has a run whose weights and states have another type", _ANEW)
_FIXED: dict[str, _Reason] = {
    **dict.fromkeys([*STORED_SHAPE, "seq_length"], _SHAPE),
    "sft": _TASK,
    **dict.fromkeys(["dataset_type", "max_padding_length", "packing", "split"], _DATA),
    **dict.fromkeys(["columns", "alpaca_input_join", "chat_template", "train_on"], _DATA),
    **dict.fromkeys(["allow_special_tokens", "long_samples"], _DATA),
    **dict.fromkeys(["reset_position_ids", "reset_attention_mask", "eod_mask_loss"], _DATA),
    **dict.fromkeys(["global_batch_size", "seed"], _ORDER),
    "precision": _TYPE,
}
"""Fields that a resumed run must keep; all others may change: the layout (TP, PP, VPP, processes), sharding,
offloading, lengths of SFT. Training data may move, see `_check_data`."""


def resume_notes(config: RunConfig) -> list[str]:
    """Compare the run with the earlier run whose checkpoints are in its folder.

    Returns:
        One line for each value that changes; no lines if nothing will be resumed.

    Raises:
        ConfigError: a value changes that must not: model shape, tokenizer, precision, and, without
            `--resume-with-changed-data`, the data and its order; or there is no config.yaml to compare with.
    """
    output = Path(config.checkpoint.output_path)
    root = output / CHECKPOINT_FOLDER
    if not _was_begun(root):
        return []
    if not (output / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{output / CONFIG_FILE} is missing, while {root} holds checkpoints: expected the run that "
            f"they belong to; put it back, or give {_FROM_WEIGHTS}"
        )
    before = read_run(output / CONFIG_FILE)
    _check_fields(config, before)
    _check_derived(config, before)
    _check_data(config, before)
    return [
        f"{where(field)}: {scalar_of(before, field)} before, {scalar_of(config, field)} from here on"
        for field in FIELDS
        if not _same(value_of(before, field), value_of(config, field)) and not _is_open(config, field)
    ]


def _is_open(config: RunConfig, field: str) -> bool:
    """Whether the field gets its value only when the data has been read."""
    return field == "train_iters" and config.training.train_epochs is not None


def _was_begun(root: Path) -> bool:
    return (root / TRACKER).is_file() or bool(complete_iterations(root))


def _check_fields(config: RunConfig, before: RunConfig) -> None:
    for field in FIELDS:
        then, now = value_of(before, field), value_of(config, field)
        if field in _FIXED and not _same(then, now):
            then, now = scalar_of(before, field), scalar_of(config, field)
            _refuse(config, field, then, now, _FIXED[field])


def _check_derived(config: RunConfig, before: RunConfig) -> None:
    """Check what depends on several fields: the tokenizer and the order of the samples."""
    then, now = before.tokenizer_folder, config.tokenizer_folder
    if not _same(then, now):
        _refuse(config, "tokenizer_name_or_path", then, now, _TOKENIZER)
    in_epochs = config.training.train_epochs is not None
    then, now = (_length(run, in_epochs=in_epochs) for run in (before, config))
    if config.data.dataset_type == "idxmap" and not config.training.sft and then != now:
        # megatron-core shuffles all epochs of a run together, so another number of epochs moves every sample.
        _refuse(config, "train_iters", then, now, _LENGTH)


def _length(run: RunConfig, *, in_epochs: bool) -> str:
    """The length of a run, also in epochs where it was given so."""
    epochs = run.training.train_epochs
    if in_epochs and epochs is not None:
        return f"{epochs:g} epochs"
    return length_text(run, run.training.train_iters)


def _same(before: Any, now: Any) -> bool:
    """Equal values, or two spellings of one path."""
    if isinstance(before, str) and isinstance(now, str):
        return before == now or os.path.realpath(before) == os.path.realpath(now)
    return bool(before == now)


def _refuse(config: RunConfig, field: str, before: Any, now: Any, reason: _Reason) -> None:
    """Raise the error about a value that changed, unless the user allows the change."""
    if reason.may_change and config.checkpoint.resume_with_changed_data:
        return
    raise ConfigError(
        f"got {now}, expected {before}: {config.checkpoint.output_path} {reason.why}; "
        f"give {before} again, or {reason.instead}",
        field=field,
    )


def remember_data(config: RunConfig) -> None:
    """Write hashes of the training data into the run's folder, so that a resume notices changed data.

    The second one is of what encodes raw rows: the tokenizer and the chat template.

    Does nothing if the folder already has checkpoints, unless the user allows changed data. Call it in one
    process of the run, before training.

    Raises:
        CheckpointError: the file cannot be written.
    """
    output = Path(config.checkpoint.output_path)
    if _was_begun(output / CHECKPOINT_FOLDER) and not config.checkpoint.resume_with_changed_data:
        return
    text = f"{_fingerprint(config)}\n{_encoding_fingerprint(config)}\n"
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / DATA_FINGERPRINT_FILE, text)
    except OSError as error:
        raise CheckpointError(
            f"{output / DATA_FINGERPRINT_FILE} cannot be written: {error.strerror}; make room there, or give "
            "another folder",
            field="output_path",
        ) from error


def _check_data(config: RunConfig, before: RunConfig) -> None:
    """Check that the training data is that of the earlier run; equal files may lie at another path."""
    if config.checkpoint.resume_with_changed_data:
        return
    file = Path(config.checkpoint.output_path) / DATA_FINGERPRINT_FILE
    known = file.read_bytes().decode(errors="replace").split() if file.is_file() else []
    if len(known) > 1 and known[1] != _encoding_fingerprint(config):
        chosen = config.data.chat_template
        with_template = "its chat template" if chosen is None else chosen
        raise ConfigError(
            f"the tokenizer in {config.tokenizer_folder} or {with_template} has changed since the run in "
            f"{file.parent} began, expected the same tokens for the same rows; put it back, or give "
            f"{_CHANGE}",
            field="tokenizer_name_or_path" if chosen is None else "chat_template",
        )
    if known[:1] == [_fingerprint(config)]:
        return
    then, now = before.data.train_data_path, config.data.train_data_path
    if not _same(then, now):
        _refuse(config, "train_data_path", then, now, _DATA)
    if file.is_file():
        raise ConfigError(
            f"{now} has changed since the run in {file.parent} began (number of files, or size, first or "
            f"last MiB of one), expected the same data; put it back, or give {_CHANGE}",
            field="train_data_path",
        )


def _fingerprint(config: RunConfig) -> str:
    """A hash of the training sets' shares and of samples of their files, see `_samples`.

    Names are left out, so equal data at another path is the same data: nothing that a run reads depends on
    where its files lie.
    """
    digest = hashlib.sha256()
    parts = parse_data(config.data.train_data_path, "train_data_path")
    total = sum(part.weight or 0 for part in parts)
    for part in parts:
        files = data_files(config.data, part.path, "train_data_path")
        share = "" if part.weight is None else f"{part.weight / total:.6g}"
        digest.update(f"{share} {len(files)}\n".encode())
        for name in files:
            with open(name, "rb") as file:
                for piece in _samples(file):
                    digest.update(piece)
    return digest.hexdigest()


def _encoding_fingerprint(config: RunConfig) -> str:
    """A hash of the tokenizer's files and of the chat template; "none" where no raw rows are encoded.

    Of tokenizer_config.json only the chat template counts: its other values are often written anew.
    """
    if config.data.dataset_type != "raw":
        return "none"
    folder, chosen = Path(config.tokenizer_folder or ""), config.data.chat_template
    digest = hashlib.sha256()
    files = [folder / name for name in TOKENIZER_FILES]
    files.append(folder / "chat_template.jinja" if chosen is None else Path(chosen))
    for file in files:
        content = file.read_bytes() if file.is_file() else b""
        digest.update(f"{len(content)}\n".encode() + content)
    settings = folder / "tokenizer_config.json"
    if chosen is None and settings.is_file():
        with suppress(ValueError, AttributeError):  # damaged: the tokenizer's reader says so
            digest.update(json.dumps(json.loads(settings.read_bytes()).get("chat_template")).encode())
    return digest.hexdigest()


def _samples(file: BinaryIO) -> Iterator[bytes]:
    """The file's size, first and last MiB, and small pieces at equal distances between them.

    This is cheap for files of any size, but may miss a change in the middle that keeps the size.
    """
    size = os.fstat(file.fileno()).st_size
    yield size.to_bytes(8, "little") + file.read(_END_BYTES)
    if size > 2 * _END_BYTES:
        for index in range(1, _PIECES):
            file.seek((size - _END_BYTES) * index // _PIECES)
            yield file.read(_PIECE_BYTES)
    file.seek(max(size - _END_BYTES, 0))
    yield file.read(_END_BYTES)
