"""The data settings of a run, for programs that look at its data and train nothing."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import isfile
from typing import Any, NamedTuple

from patch.checks.rules import check_range
from patch.config.data_spec import parse_data
from patch.config.fields import FIELDS
from patch.config.positions import read_variables
from patch.config.schema import DataConfig
from patch.config.yaml_io import read_yaml
from patch.errors import ConfigError
from patch.preflight.hub_names import fetch_sets, take_models
from patch.preflight.stored_shape import refuse_other_forms

DATA_FLAGS = (
    "tokenizer_name_or_path",
    "seq_length",
    "max_padding_length",
    "columns",
    "alpaca_input_join",
    "chat_template",
    "train_on",
    "allow_special_tokens",
    "long_samples",
    "max_dropped_share",
    "cache_dir",
    "data_workers",
)
"""The fields that decide what becomes of raw rows."""
DEFAULT_LENGTH = 4096
"""Tokens of a sample if neither a flag nor a run says it."""


class DataSettings(NamedTuple):
    """What is needed to read a run's training data. `data.max_padding_length` of .bin/.idx is SEQ_LEN."""

    data: DataConfig
    tokenizer: str | None
    """Folder or name of the tokenizer; None if none is given."""


def read_data_settings(
    text: str | None, flags: Mapping[str, Any], run: str | None, environ: Mapping[str, str]
) -> DataSettings:
    """The settings: those of a run, if there is one, with environment variables and flags over them.

    Args:
        text: what DATASET_PATH would be, also with names of the hub; None: the run's.
        flags: some fields of `DATA_FLAGS` and their values.
        run: a YAML file, such as the config.yaml of a run.
        environ: the environment variables, of which a run's (TOKENIZER_PATH) count.

    Raises:
        ConfigError: no data is named, a value is out of range, or the file cannot be used.
        DataError: a name of the hub cannot be had.
    """
    values = {**(read_yaml(run) if run is not None else {}), **read_variables(environ), **flags}
    take_models(values)
    refuse_other_forms(values)
    if text is not None:
        text = fetch_sets(text, "train_data_path")
        values |= {"train_data_path": text, "dataset_type": "idxmap" if _is_indexed(text) else "raw"}
    if "train_data_path" not in values:
        raise ConfigError(
            "no data is named, expected what DATASET_PATH of the run would be, or --config FILE"
        )
    length = values.get("seq_length", DEFAULT_LENGTH)
    if values.get("dataset_type", "idxmap") == "idxmap" and "max_padding_length" not in flags:
        values["max_padding_length"] = length
    values.setdefault("max_padding_length", length)
    for name in DATA_FLAGS:
        if name in values:
            check_range(FIELDS[name], values[name])
    of_data = {name: value for name, value in values.items() if FIELDS[name].section == "data"}
    return DataSettings(DataConfig(**of_data), values.get("tokenizer_name_or_path") or values.get("load"))


def _is_indexed(text: str) -> bool:
    parts = parse_data(text, "train_data_path")
    for path in (part.path for part in parts):
        if path.endswith((".bin", ".idx")) and isfile(f"{path[:-4]}.idx"):
            raise ConfigError(
                f"got {path}, expected the path of .bin and .idx without the ending, that is {path[:-4]}",
                field="train_data_path",
            )
    return all(isfile(f"{part.path}.idx") for part in parts)
