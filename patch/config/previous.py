"""The resume guard: what may change between two runs in one OUTPUT_BASEPATH."""

from __future__ import annotations

import os
from typing import Any

from patch.config.fields import FIELDS
from patch.config.positions import where
from patch.config.presets import SHAPE_FIELDS
from patch.config.schema import RunConfig
from patch.config.yaml_io import parse_yaml, to_yaml
from patch.errors import ConfigError

_SHAPE = SHAPE_FIELDS | {"make_vocab_size_divisible_by", "seq_length"}
_DATA = {"sft", "dataset_type", "train_data_path", "max_padding_length", "packing"}


def compare_with_previous(config: RunConfig, previous_yaml_text: str) -> list[str]:
    """Compare the run with the config.yaml that its folder already holds.

    Returns:
        One line for each change that is taken.

    Raises:
        ConfigError: another model shape, tokenizer or data set: the checkpoints would not fit it.
    """
    origin = f"{config.checkpoint.output_path}/config.yaml"
    before = parse_yaml(previous_yaml_text, origin)
    now = parse_yaml(to_yaml(config), origin)
    for field in FIELDS:
        if field in _SHAPE and field in before and before[field] != now[field]:
            _refuse(config, "model shape", where(field), before[field], now[field])
    for field in FIELDS:
        if field in _DATA and field in before and not _same(before[field], now[field]):
            _refuse(config, "data", where(field), before[field], now[field])
    tokenizer = before.get("tokenizer_name_or_path", "none")
    tokenizer = before.get("load", "none") if tokenizer == "none" else tokenizer
    if not _same(tokenizer, config.tokenizer_folder):
        _refuse(config, "tokenizer", where("tokenizer_name_or_path"), tokenizer, config.tokenizer_folder)
    return [
        f"{where(field)}: {before[field]} before, {now[field]} from here on"
        for field in FIELDS
        if field in before and not _same(before[field], now[field])
    ]


def _same(before: Any, now: Any) -> bool:
    """Equal values, or two spellings of one path."""
    if isinstance(before, str) and isinstance(now, str):
        return before == now or os.path.realpath(before) == os.path.realpath(now)
    return bool(before == now)


def _refuse(config: RunConfig, what: str, place: str, before: Any, now: Any) -> None:
    raise ConfigError(
        f"{place}: got {now}, expected {before}: {config.checkpoint.output_path} holds a run of "
        f"another {what}; give another {where('output_path')}, or the same command as before"
    )
