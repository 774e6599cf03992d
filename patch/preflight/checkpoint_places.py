"""Places of a run's checkpoints: the run's folder, or the store that --save names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from patch.config.schema import RunConfig
from patch.config.yaml_io import read_run
from patch.errors import ConfigError
from patch.logger import get_logger
from patch.storage.names import (
    CHECKPOINT_FOLDER,
    CHECKSUMS_FILE,
    CONFIG_FILE,
    TRACKER,
    all_iterations,
    complete_iterations,
    iteration_name,
    newest_of,
)
from patch.storage.places import AnyPath
from patch.storage.remote import RemotePath

_logger = get_logger(__name__)


def checkpoint_root(config: RunConfig) -> AnyPath:
    """Return the folder of this run's checkpoints.

    Raises:
        OSError: --save is malformed, or there is no driver for it.
    """
    save = config.checkpoint.save
    return disk_root(config) if save is None else RemotePath(save)


def disk_root(config: RunConfig) -> Path:
    """Return the checkpoint folder in the run's folder; with --save, for checkpoints from before --save."""
    return Path(config.checkpoint.output_path) / CHECKPOINT_FOLDER


def _roots(config: RunConfig) -> Iterable[AnyPath]:
    return dict.fromkeys((checkpoint_root(config), disk_root(config)))


def has_checkpoints(root: AnyPath) -> bool:
    """Return whether a run has saved checkpoints in this place."""
    return (root / TRACKER).is_file() or bool(complete_iterations(root))


def existing_checkpoint_root(config: RunConfig) -> AnyPath | None:
    """Return the place where this run has checkpoints, the store first, or None if it has none.

    Raises:
        ConfigError: the store does not answer.
    """
    with store_errors("save"):
        return next((root for root in _roots(config) if has_checkpoints(root)), None)


def newest_saved(config: RunConfig) -> tuple[AnyPath, int] | None:
    """Return place and iteration of the newest checkpoint, or None; whether it is whole is not checked here.

    Raises:
        ConfigError: the store does not answer.
    """
    with store_errors("save"):
        newest = [(root, newest_of(root, complete_iterations(root))) for root in _roots(config)]
    found = [(root, iteration) for root, iteration in newest if iteration is not None]
    return max(found, key=lambda one: one[1], default=None)


def resumed_run_folder(config: RunConfig) -> AnyPath:
    """Return the folder with config.yaml and data.json of the run that this run resumes.

    Raises:
        ConfigError: the store does not answer.
    """
    root, output = existing_checkpoint_root(config), Path(config.checkpoint.output_path)
    with store_errors("save"):
        if isinstance(root, RemotePath) and (root / CONFIG_FILE).is_file():
            return root
    return output


def refuse_left_checkpoints(config: RunConfig) -> None:
    """Refuse to start over, or to resume from an older checkpoint, if the run in this folder saved elsewhere.

    Raises:
        ConfigError: the run in this folder has saved to another store, which has a later checkpoint than this
            run's places. Or this run's places have none, and the other store does not answer.
    """
    file = Path(config.checkpoint.output_path) / CONFIG_FILE
    before = None
    with suppress(ConfigError):
        before = read_run(file).checkpoint.save if file.is_file() else None
    if before is None or before == config.checkpoint.save:
        return
    newest = newest_saved(config)
    if newest is None:
        with store_errors("save"):
            is_left = has_checkpoints(RemotePath(before))
        if is_left:
            raise _left(config, before, "has its checkpoints")
        return
    try:
        left = _newest_whole(RemotePath(before))
    except OSError as error:
        _logger.warning("%s does not answer: %s; whether it has a later checkpoint is unknown", before, error)
        return
    if left is not None and left > newest[1]:
        here = f"after step {newest[1]}, the newest one in {newest[0]}"
        raise _left(config, before, f"has a checkpoint of step {left}, and this command would go on {here}")


def _left(config: RunConfig, before: str, what: str) -> ConfigError:
    return ConfigError(
        f"got {config.checkpoint.save or 'none'}, expected {before}: there the run in "
        f"{config.checkpoint.output_path} {what}; give that again, or another OUTPUT_BASEPATH (position 25)",
        field="save",
    )


def _newest_whole(root: RemotePath) -> int | None:
    """Return the newest checkpoint whose save was not interrupted."""
    found = [i for i in all_iterations(root) if (root / iteration_name(i) / CHECKSUMS_FILE).is_file()]
    return newest_of(root, found)


def hint_of_store(folder: AnyPath) -> str:
    """Return the store of the run in a folder, as the end of an error, or "" if it is unknown."""
    file = folder / CONFIG_FILE
    with suppress(ConfigError):
        if isinstance(file, Path) and file.is_file() and (url := read_run(file).checkpoint.save):
            return f"; the run there saved to {url}: give that instead"
    return ""


@contextmanager
def store_errors(field: str) -> Iterator[None]:
    """Convert a store's OSError in the block to a ConfigError about this field."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
        raise ConfigError(text, field=field) from error
