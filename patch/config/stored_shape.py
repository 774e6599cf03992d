"""The model's shape from the folder at position 22: from its config.json, or from a run's config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from patch.config.checkpoint_places import store_errors, was_begun
from patch.config.hf_config import has_hf_config, read_hf_config
from patch.config.presets import SHAPE_FIELDS
from patch.config.schema import RunConfig
from patch.config.yaml_io import read_run
from patch.storage.names import CONFIG_FILE, find_checkpoint_root, is_complete
from patch.storage.places import AnyPath, any_path
from patch.storage.remote import RemotePath

STORED_SHAPE = SHAPE_FIELDS | {"make_vocab_size_divisible_by"}
"""The fields of a preset, and the field that decides how the stored vocabulary is padded."""


class FoundShape(NamedTuple):
    """Fields of ModelConfig, and the file they were read from."""

    file: AnyPath
    fields: dict[str, Any]


def run_behind(load: str | Path) -> RunConfig | None:
    """The run that wrote the checkpoints at `load`; None if there is no config.yaml beside them.

    Args:
        load: the run's folder, the checkpoint/ in it, or a checkpoint or a link to one in that.

    Raises:
        ConfigError: the config.yaml cannot be read.
    """
    file = _run_file(load)
    return read_run(file) if file is not None else None


def _run_file(load: str | Path) -> AnyPath | None:
    """The config.yaml of the run that wrote the checkpoints at `load`; None if there is none.

    In a store it lies beside the checkpoints, or above them if a whole run's folder was copied there.
    """
    with store_errors("load"):
        folder = any_path(str(load))
        if isinstance(folder, Path):
            folder = folder.absolute()
        root = folder.parent if is_complete(folder) else find_checkpoint_root(folder)
        if not was_begun(root):
            return None
        homes = (root, root.parent) if isinstance(root, RemotePath) else (root.parent,)
        return next((home / CONFIG_FILE for home in homes if (home / CONFIG_FILE).is_file()), None)


def shape_at(load: str | Path | None) -> FoundShape | None:
    """The shape of the weights at `load`; None if no file there describes it.

    Raises:
        ConfigError: the file cannot be read, or its model is not supported.
    """
    if load is None:
        return None
    if has_hf_config(load):
        return FoundShape(Path(load) / "config.json", read_hf_config(load))
    file = _run_file(load)
    if file is None:
        return None
    run = read_run(file)
    return FoundShape(file, {name: getattr(run.model, name) for name in sorted(STORED_SHAPE)})
