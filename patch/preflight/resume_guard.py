"""Resume guard: refuse a resumed run whose configuration or data do not fit the run in its folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from patch.config.choices import PRECISIONS
from patch.config.data_spec import parse_columns, parse_template_kwargs
from patch.config.fields import FIELDS, scalar_of, value_of
from patch.config.flags import spellings
from patch.config.positions import length_text, where
from patch.config.schema import RunConfig
from patch.config.yaml_io import read_run
from patch.errors import ConfigError
from patch.families import SHAPE_FIELDS, own_traits
from patch.families.adapters import adapters_of
from patch.families.selection import trained_rows
from patch.preflight.checkpoint_places import (
    existing_checkpoint_root,
    refuse_left_checkpoints,
    resumed_run_folder,
)
from patch.preflight.data_record import DataRecord, SetRecord, changes_of_origin
from patch.preflight.model_of_folder import STORED_SHAPE
from patch.storage.names import CONFIG_FILE
from patch.storage.remote import RemotePath

_ANEW = "another OUTPUT_BASEPATH (position 25)"
_FROM_WEIGHTS = _ANEW + ", which may start from this one's weights (this folder as position 22)"
_CHANGE = f"--resume-with-changed-data, or {_FROM_WEIGHTS}"


class _Reason(NamedTuple):
    """Why a resumed run must keep a value, and what to do instead."""

    why: str
    instead: str
    """_CHANGE if `--resume-with-changed-data` allows another value."""


_SHAPE = _Reason("has a run with another model shape", _ANEW)
_TOKENIZER = _Reason("has a run with another tokenizer", _ANEW)
_TASK = _Reason("has a run of the other kind (pre-training, fine-tuning)", _FROM_WEIGHTS)
_DATA = _Reason("has a run on other data", _CHANGE)
_SAMPLES = _Reason("has a run that makes other samples of its data", _CHANGE)
_ORDER = _Reason(
    "has a run that reads its data in another order, so its position in the data would be lost",
    _CHANGE,
)
_LENGTH = _Reason(
    "has a pre-training run of another length, which decides the order of its samples",
    _CHANGE,
)
_ADAPTERS = _Reason("has a run with other adapters", _ANEW)
_TRAINED = _Reason("has a run that trains other weights, so states of some would be missing", _FROM_WEIGHTS)
_TYPE = _Reason("has a run whose weights and states have another type", _ANEW)
_FIXED: dict[str, _Reason] = {
    **dict.fromkeys([*STORED_SHAPE, "seq_length"], _SHAPE),
    "sft": _TASK,
    **dict.fromkeys(["dataset_type", "split"], _DATA),
    **dict.fromkeys(["max_padding_length", "packing", "columns", "alpaca_input_join"], _SAMPLES),
    **dict.fromkeys(["chat_template_kwargs", "train_on", "allow_special_tokens", "long_samples"], _SAMPLES),
    **dict.fromkeys(["reset_position_ids", "reset_attention_mask", "eod_mask_loss"], _SAMPLES),
    **dict.fromkeys(["global_batch_size", "seed"], _ORDER),
    **dict.fromkeys(["precision", "quantize_base", "exp_avg_dtype", "exp_avg_sq_dtype"], _TYPE),
    **dict.fromkeys(["freeze", "train_only"], _TRAINED),
    "optimizer": _TYPE,
    **dict.fromkeys(["lora_rank", "lora_alpha", "lora_target_modules", "lora_rslora"], _ADAPTERS),
}
"""Fields that a resumed run must keep. Other fields may change: layout (TP, PP, VPP, processes), sharding,
offload. Tokenizer, chat template and training data may be in another place, see `_check_data`."""
_MEANINGS: dict[str, Callable[[RunConfig], Any]] = {
    "columns": lambda run: parse_columns(run.data.columns),
    "chat_template_kwargs": lambda run: parse_template_kwargs(run.data.chat_template_kwargs),
    "lora_alpha": lambda run: run.adapter.alpha,
    "lora_target_modules": lambda run: adapters_of(run.model, run.adapter),
    **dict.fromkeys(["freeze", "train_only"], lambda run: _trained(run)),
    "model_type": lambda run: own_traits(run.model.model_type),
    "precision": lambda run: PRECISIONS[run.training.precision].kept_as,
}
"""Meaning of a field of which several values mean the same."""


def _trained(run: RunConfig) -> list[tuple[Any, ...]]:
    """Return the names of the weights that train, with their layers."""
    return [(row.name, *row.layers) for row in trained_rows(run.model, run.selection)]


def resume_notes(config: RunConfig) -> list[str]:
    """Compare the run with the earlier run that it resumes. Return one line for each changed value.

    Raises:
        ConfigError: a value changes that must not: model shape, tokenizer, precision, and, without
            `--resume-with-changed-data`, the data and its order; or there is no config.yaml to compare with.
    """
    root = existing_checkpoint_root(config)
    refuse_left_checkpoints(config)
    if root is None:
        return []
    file = resumed_run_folder(config) / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(
            f"{file} is missing, while {root} holds checkpoints: expected the run that "
            f"they belong to; put it back, or give {_FROM_WEIGHTS}"
        )
    before = read_run(file)
    _check_fields(config, before)
    _check_derived(config, before)
    _check_data(config, before)
    return [
        f"{where(field)}: {scalar_of(before, field)} before, {_now(config, field)}"
        for field in FIELDS
        if not _same(value_of(before, field), value_of(config, field)) and not _is_open(config, field)
    ]


def _now(config: RunConfig, field: str) -> str:
    now = scalar_of(config, field)
    if field == "lora_load" or (field == "load" and not config.adapter.is_on):
        return f"{now} has no effect on a run with checkpoints; for these weights give {_ANEW}"
    return f"{now} from here on"


def _is_open(config: RunConfig, field: str) -> bool:
    """Return whether the field gets its value after the data is read, or was compared by meaning."""
    is_compared = field in ("lora_alpha", "lora_target_modules")
    return is_compared or (field == "train_iters" and config.training.train_epochs is not None)


def _check_fields(config: RunConfig, before: RunConfig) -> None:
    for field in FIELDS:
        if field not in _FIXED:
            continue
        meaning = _MEANINGS.get(field, partial(value_of, name=field))
        then, now = meaning(before), meaning(config)
        if not _same(then, now):
            cause, reason = field, _FIXED[field]
            if field in SHAPE_FIELDS and before.model.model_size != config.model.model_size:
                cause = "model_size"
            _refuse(config, cause, scalar_of(before, cause), scalar_of(config, cause), reason)


def _check_derived(config: RunConfig, before: RunConfig) -> None:
    in_epochs = config.training.train_epochs is not None
    then, now = (_length(run, in_epochs=in_epochs) for run in (before, config))
    if config.data.dataset_type == "idxmap" and not config.training.sft and then != now:
        # megatron-core shuffles all epochs of a run together, so another number of epochs moves every sample.
        _refuse(config, "train_iters", then, now, _LENGTH)


def _length(run: RunConfig, *, in_epochs: bool) -> str:
    epochs = run.training.train_epochs
    if in_epochs and epochs is not None:
        return f"{epochs:g} epochs"
    return length_text(run, run.training.train_iters)


def _same(before: Any, now: Any) -> bool:
    """Return whether the values are equal, or two spellings of one path."""
    if isinstance(before, str) and isinstance(now, str):
        return before == now or os.path.realpath(before) == os.path.realpath(now)
    return bool(before == now)


def _refuse(config: RunConfig, field: str, before: Any, now: Any, reason: _Reason) -> None:
    if reason.instead == _CHANGE and config.checkpoint.resume_with_changed_data:
        return
    got, expected, again = now, before, f"{before} again"
    if isinstance(before, bool):
        expected, got = spellings(FIELDS[field])[:: 1 if before else -1]
        again = expected
    raise ConfigError(
        f"got {got}, expected {expected}: {_place(config)} {reason.why}; give {again}, or {reason.instead}",
        field=field,
    )


def _place(config: RunConfig) -> str:
    """Return the resumed run's folder, or its URL at --save, for a message."""
    home = resumed_run_folder(config)
    return f"{home} (--save)" if isinstance(home, RemotePath) else str(home)


def _check_data(config: RunConfig, before: RunConfig) -> None:
    """Check that tokenizer, chat template and training data are unchanged since the run began."""
    output = resumed_run_folder(config)
    known, found = DataRecord.read(output), DataRecord.of(config)
    _check_tokenizer(config, before, known, found)
    if config.checkpoint.resume_with_changed_data:
        return
    if known is not None:
        _check_chat_template(config, before, known, found)
    if known is not None and known.files == found.files:
        return
    then, now = before.data.train_data_path, config.data.train_data_path
    if not _same(then, now):
        _refuse(config, "train_data_path", then, now, _DATA)
    if known is not None:
        raise ConfigError(
            f"{now} has changed since the run in {output} began (number of files, size, first or last "
            f"MiB of one, or the rule by which sets with weights take turns), expected the same data; put it "
            f"back, or give {_CHANGE}",
            field="train_data_path",
        )


def _check_tokenizer(
    config: RunConfig, before: RunConfig, known: DataRecord | None, found: DataRecord
) -> None:
    if known is not None and found.tokenizer is not None and known.tokenizer == found.tokenizer:
        return
    then, now = before.tokenizer_folder, config.tokenizer_folder
    if not _same(then, now):
        _refuse(config, "tokenizer_name_or_path", then, now, _TOKENIZER)
    if known is not None and known.tokenizer != found.tokenizer:
        raise ConfigError(
            f"the tokenizer in {now} has changed since the run in {config.checkpoint.output_path} began, "
            f"expected the same one; put it back, or give {_FROM_WEIGHTS}",
            field="tokenizer_name_or_path",
        )


def _check_chat_template(config: RunConfig, before: RunConfig, known: DataRecord, found: DataRecord) -> None:
    """Refuse another name or another text. If only one run has a name, `check_tokens` compares."""
    if config.data.dataset_type != "raw" or known.chat_template == found.chat_template:
        return
    if known.chat_template[0] != found.chat_template[0]:
        return
    then, now = before.data.chat_template, config.data.chat_template
    if then is not None and now is not None and not _same(then, now):
        _refuse(config, "chat_template", then, now, _SAMPLES)
    chosen = f"the chat template in {config.tokenizer_folder}" if now is None else now
    raise ConfigError(
        f"{chosen} is not the chat template with which the run in {config.checkpoint.output_path} began, "
        f"expected the same tokens for the same rows; put it back, or give {_CHANGE}",
        field="tokenizer_name_or_path" if now is None else "chat_template",
    )


def remember_data(config: RunConfig, sets: Sequence[SetRecord]) -> None:
    """Record the training data in the run's folder, so that a resume detects changed data.

    Does nothing if the folder already has checkpoints, unless the user allows changed data. Call it in one
    process of the run, before training, with the tokenized training sets of rows.

    Raises:
        CheckpointError: the file cannot be written.
    """
    output = Path(config.checkpoint.output_path)
    if config.checkpoint.resume_with_changed_data or existing_checkpoint_root(config) is None:
        DataRecord.of(config, sets).write(output)


def check_tokens(config: RunConfig, sets: Sequence[SetRecord]) -> list[str]:
    """Compare the tokens of the training sets with the tokens with which the run in the folder began.

    Returns:
        warnings: a template that writes the date makes other tokens each day.

    Raises:
        ConfigError: the tokens of a set have changed; the message says what changed them.
    """
    output = Path(config.checkpoint.output_path)
    known = DataRecord.read(output)
    warnings = []
    for before, now in zip(known.sets if known is not None else (), sets, strict=False):
        if before.tokens == now.tokens:
            continue
        changes = changes_of_origin(before, now)
        if not changes and now.reads_clock and before.sizes == now.sizes:
            warnings.append(
                f"{now.path}: its tokens are not those with which the run in {output} began: the chat "
                "template writes the date, and the token cache of that day is gone"
            )
            continue
        what = ", ".join(changes) or "something that is not recorded"
        raise ConfigError(
            f"{now.path}: its tokens are not those with which the run in {output} began; what has changed: "
            f"{what}; expected the same samples: put that back, or give "
            f"{_CHANGE}",
            field="train_data_path",
        )
    return warnings
