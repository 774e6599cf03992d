"""The model's shape from the folder at position 22: from its config.json, or from a run's config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from patch.config.hf_config import has_hf_config, read_hf_config
from patch.config.presets import SHAPE_FIELDS
from patch.config.schema import RunConfig
from patch.config.yaml_io import read_run
from patch.storage.names import (
    CONFIG_FILE,
    TRACKER,
    complete_iterations,
    find_checkpoint_root,
    is_complete,
)

STORED_SHAPE = SHAPE_FIELDS | {"make_vocab_size_divisible_by"}
"""The fields of a preset, and the field that decides how the stored vocabulary is padded."""


class FoundShape(NamedTuple):
    """Fields of ModelConfig, and the file they were read from."""

    file: Path
    fields: dict[str, Any]


def run_behind(load: str | Path) -> RunConfig | None:
    """The run that wrote the checkpoints at `load`; None if there is no config.yaml beside them.

    Args:
        load: the run's folder, the checkpoint/ in it, or a checkpoint or a link to one in that.

    Raises:
        ConfigError: the config.yaml cannot be read.
    """
    root = _checkpoint_root(load)
    file = root.parent / CONFIG_FILE
    is_run = (root / TRACKER).is_file() or complete_iterations(root)
    return read_run(file) if is_run and file.is_file() else None


def _checkpoint_root(load: str | Path) -> Path:
    """The folder of checkpoints that `load` is, contains, or lies in; absolute."""
    folder = Path(load).absolute()
    return folder.parent if is_complete(folder) else find_checkpoint_root(folder)


def shape_at(load: str | Path | None) -> FoundShape | None:
    """The shape of the weights at `load`; None if no file there describes it.

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
    file = _checkpoint_root(load).parent / CONFIG_FILE
    return FoundShape(file, {name: getattr(run.model, name) for name in sorted(STORED_SHAPE)})
