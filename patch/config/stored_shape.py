"""The model's shape as the folder at position 22 states it: config.json, or the config.yaml of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from patch.config.hf_config import has_hf_config, read_hf_config
from patch.config.presets import SHAPE_FIELDS
from patch.config.schema import RunConfig
from patch.config.yaml_io import read_run
from patch.storage.names import CONFIG_FILE, TRACKER, complete_iterations, find_checkpoint_root

STORED_SHAPE = SHAPE_FIELDS | {"make_vocab_size_divisible_by"}
"""A preset's fields, and the padding of the vocabulary that checkpoints are stored with."""


class FoundShape(NamedTuple):
    """Fields of ModelConfig, and the file that says so."""

    file: Path
    fields: dict[str, Any]


def run_behind(load: str | Path) -> RunConfig | None:
    """The run that wrote the checkpoints at `load`, its folder or the checkpoint/ in it.

    None where there is no config.yaml beside them.

    Raises:
        ConfigError: a config.yaml that cannot be read.
    """
    root = find_checkpoint_root(load)
    file = root.absolute().parent / CONFIG_FILE
    is_run = (root / TRACKER).is_file() or complete_iterations(root)
    return read_run(file) if is_run and file.is_file() else None


def shape_at(load: str | Path | None) -> FoundShape | None:
    """The shape of the weights at `load`; None where no file there tells it.

    Raises:
        ConfigError: the file cannot be read, or its model is not supported.
    """
    if load is None:
        return None
    if has_hf_config(load):
        return FoundShape(Path(load) / "config.json", read_hf_config(load))
    run = run_behind(load)
    if run is None:
        return None
    file = find_checkpoint_root(load).absolute().parent / CONFIG_FILE
    return FoundShape(file, {name: getattr(run.model, name) for name in sorted(STORED_SHAPE)})
