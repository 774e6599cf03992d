"""Names of the hub in a run's configuration: org/name at position 22, for the tokenizer, in a data position.

They are replaced in two steps. `take_models`, while the command line is read, fetches what a run is planned
with: config.json and the tokenizer. `fetch_from_hub`, after all rules have been checked, fetches the rest:
weights (not for --dry-run) and data. The resolved run names the folders of the snapshots, which hold the name
and the revision, so its config.yaml repeats the run. If the same command line, with org/name, resumes a run,
the revision is looked up in that config.yaml.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from patch.config.data_spec import by_split, format_data, parse_data
from patch.config.schema import RunConfig
from patch.errors import ConfigError, DataError, nearest, shown
from patch.preflight.checkpoint_places import begun_root
from patch.preflight.stored_shape import is_hf_folder
from patch.preflight.validate import check_data
from patch.storage.hub import (
    HubName,
    data_files,
    fetch_data,
    fetch_model,
    fetch_tokenizer,
    hub_name,
    lacking_weights,
    shadowed_by,
    snapshot_name,
)
from patch.storage.names import CONFIG_FILE
from patch.storage.remote import is_url
from patch.storage.text_files import read_small

_SPLITS_OF = {"train_data_path": ("training",), "valid_data_path": ("validation", "test")}
"""The splits of a data set that a position means, the first of them that is there."""
_LONGEST_PATH = 3800
"""Bytes of a folder's path; Linux allows 4095 with what is in it."""
_SHARD = re.compile(r"([-_.]?\d+(-of-\d+)?(-[0-9a-f]{16})?)?(\.[a-z]+){1,2}$", re.IGNORECASE)
"""The number of a file among those of one set, and its endings."""


def take_models(merged: dict[str, Any]) -> None:
    """Replace names of models and tokenizers by the folders of their snapshots, without weights.

    Args:
        merged: fields of the configuration; changed in place.
    Raises:
        ConfigError: see `fetch_model`; or a folder here has the name of the organisation, or no file system
            can have a file of such a name.
    """
    _refuse_what_is_no_path(merged)
    output = merged.get("output_path")
    fetchers: dict[str, Callable[..., Path]] = {
        "load": partial(fetch_model, weights=False),
        "tokenizer_name_or_path": fetch_tokenizer,
    }
    for field, fetch in fetchers.items():
        text = merged.get(field)
        if text is None:
            continue
        if (folder := shadowed_by(text)) is not None:
            raise ConfigError(
                f"got {text!r}, no such folder: because {folder} is a folder here, this is a path into it"
                f"{nearest(Path(text).name, os.listdir(folder))}; expected a folder in it; a name of the hub "
                f"is found where no folder is called {folder}",
                field=field,
            )
        if (name := hub_name(text, "model")) is not None:
            merged[field] = str(fetch(_pinned(name, output), field=field))


def _refuse_what_is_no_path(merged: Mapping[str, Any]) -> None:
    """Refuse names that would make every look at a file fail."""
    for field in ("load", "tokenizer_name_or_path", "output_path", "log_dir", "stop_file"):
        text = merged.get(field) or ""
        try:
            path = os.fsencode(text if is_url(text) else os.path.abspath(text))
        except ValueError:  # half a character
            path = b"\0"
        if b"\0" in path or len(path) > _LONGEST_PATH or any(len(part) > 255 for part in path.split(b"/")):
            expected = f"a path of at most {_LONGEST_PATH} bytes, at most 255 from slash to slash"
            raise ConfigError(f"got {shown(text)}, expected {expected}", field=field)


def fetch_from_hub(config: RunConfig, *, weights: bool) -> RunConfig:
    """The run with all its data and, unless it resumes, its first weights on this machine.

    Args:
        config: a run that `validate_run` has accepted.
        weights: whether weights are downloaded, if the cache lacks them.
    Raises:
        ConfigError: the weights cannot be had.
        DataError: a data set cannot be had, or its files are several sets.
    """
    if weights and (model := _model_to_fetch(config)) is not None:
        load = str(fetch_model(model, weights=True, field="load"))
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, load=load))
    if config.data.dataset_type != "raw":
        return config
    texts = {field: getattr(config.data, field) for field in _SPLITS_OF}
    changed: dict[str, Any] = {
        field: fetch_sets(text, field, config.checkpoint.output_path)
        for field, text in texts.items()
        if text is not None
    }
    if changed.items() <= texts.items():
        return config
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **changed))
    check_data(config)
    return config


def fetch_sets(text: str, field: str, output: str | None = None) -> str:
    """A data position with the names of the hub replaced by files of their snapshots.

    Args:
        text: the position, see `parse_data`.
        field: `train_data_path` or `valid_data_path`: which split of a data set is meant.
        output: the run's folder; the revisions that its config.yaml names are taken again.
    Raises:
        DataError: a data set cannot be had, or its files are several sets.
    """
    parts = parse_data(text, field)
    names = [hub_name(part.path, "dataset") for part in parts]
    if not any(names):
        return text
    return format_data(
        part if name is None else part._replace(path=_set_of(_pinned(name, output), field))
        for part, name in zip(parts, names, strict=True)
    )


def _pinned(name: HubName, output: str | None) -> HubName:
    """The revision that the run in this folder began with, if it used this name."""
    file = Path(output or "") / CONFIG_FILE
    if name.revision is not None or output is None or not file.is_file():
        return name
    text = read_small(file).decode(errors="replace")
    match = re.search(rf"{re.escape(name.folder_name)}/snapshots/([0-9a-f]{{40}})", text)
    return name if match is None else name._replace(revision=match[1])


def _model_to_fetch(config: RunConfig) -> HubName | None:
    """The model of the hub whose weights the run begins with, and the cache lacks; None if there is none."""
    folder = _first_weights(config)
    model = snapshot_name(str(folder)) if folder is not None else None
    return model if folder is not None and lacking_weights(folder) and not [*folder.glob("*.bin")] else None


def _first_weights(config: RunConfig) -> Path | None:
    """The Hugging Face folder whose weights the run begins with; None if it resumes or begins otherwise."""
    load = config.checkpoint.load
    is_first = load is not None and is_hf_folder(load) and begun_root(config) is None
    return Path(load) if load is not None and is_first else None


def weights_here(config: RunConfig) -> Path | None:
    """The Hugging Face folder whose weights the run begins with, if they need not be fetched first."""
    return _first_weights(config) if _model_to_fetch(config) is None else None


def _set_of(name: HubName, field: str) -> str:
    """The file, or the glob of files, that this position takes from a data set.

    Raises:
        DataError: the data set lacks this split, or has it several times.
    """
    folder = fetch_data(name, field=field)
    if name.inside:
        return escape(str(folder)) + name.inside
    sets = _sets(folder, data_files(folder))
    splits = by_split(sets)
    meant = next((splits[split] for split in _SPLITS_OF[field] if split in splits), [] if splits else [*sets])
    if len(meant) != 1:
        found = "several sets" if meant else f"no {' or '.join(_SPLITS_OF[field])} set"
        raise DataError(
            f"{name.repo} holds {found}: {', '.join(sorted(sets)[:20])}; expected one of them, such as "
            f"'{folder}/{min(meant or sets)}'",
            field=field,
        )
    return f"{escape(str(folder))}/{meant[0]}"


def _sets(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """The sets in a folder: a file, or the glob of files that differ only in a number."""
    sets: dict[str, list[Path]] = {}
    for file in files:
        relative = str(file.relative_to(folder))
        sets.setdefault(f"{_SHARD.sub('', relative)}*", []).append(file)
    return {
        text if len(found) > 1 else str(found[0].relative_to(folder)): found for text, found in sets.items()
    }
