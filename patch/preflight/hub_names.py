"""Hub names (org/name) in a run's configuration: at position 22, for the tokenizer, in a data position.

They are replaced in two steps. `take_models` runs while the command line is read, and fetches what planning
needs: config.json and the tokenizer. `fetch_from_hub` runs after all rules, and fetches the rest: weights
(not for --dry-run) and data. The resolved run names the snapshots' folders, which contain the name and the
revision, so its config.yaml repeats the run. If a command line with org/name resumes a run, the revision
comes from that config.yaml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any

from patch.config.data_spec import by_split, format_data, parse_data
from patch.config.fields import with_values
from patch.config.schema import RunConfig
from patch.errors import ConfigError, DataError, about, nearest, shown
from patch.preflight.checkpoint_places import existing_checkpoint_root
from patch.preflight.model_of_folder import is_hf_folder
from patch.preflight.validate import check_data
from patch.storage.hub import (
    HubName,
    Wanted,
    data_files,
    fetch,
    hub_name,
    lacking_weights,
    shadowed_by,
    snapshot_name,
)
from patch.storage.names import CONFIG_FILE
from patch.storage.remote import is_url
from patch.storage.text_files import read_small

_SPLITS_OF = {"train_data_path": ("training",), "valid_data_path": ("validation", "test")}
"""Splits of a data set that a position accepts; the first split that exists is taken."""
_LONGEST_PATH = 3800
"""Longest path of a folder in bytes; Linux allows 4095, including the files in the folder."""
_SHARD = re.compile(r"([-_.]?\d+(-of-\d+)?(-[0-9a-f]{16})?)?(\.[a-z]+){1,2}$", re.IGNORECASE)
"""Number of a file within its set, and its suffixes."""


def take_models(merged: dict[str, Any]) -> None:
    """Replace hub names of models and tokenizers in `merged` by their snapshots' folders, without weights.

    Raises:
        ConfigError: see `fetch`; or a local folder has the name of the organisation, or the name is no
            legal path.
    """
    _refuse_what_is_no_path(merged)
    output = merged.get("output_path")
    fields: dict[str, Wanted] = {"load": "config.json", "tokenizer_name_or_path": "tokenizer"}
    for field, wanted in fields.items():
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
            merged[field] = str(fetch(_pinned(name, output), wanted, field=field))


def _refuse_what_is_no_path(merged: Mapping[str, Any]) -> None:
    """Refuse names with which every file operation would fail."""
    for field in ("load", "tokenizer_name_or_path", "output_path", "log_dir", "stop_file"):
        text = merged.get(field) or ""
        try:
            path = os.fsencode(text if is_url(text) else os.path.abspath(text))
        except ValueError:  # a lone surrogate
            path = b"\0"
        if b"\0" in path or len(path) > _LONGEST_PATH or any(len(part) > 255 for part in path.split(b"/")):
            expected = f"a path of at most {_LONGEST_PATH} bytes, at most 255 from slash to slash"
            raise ConfigError(f"got {shown(text)}, expected {expected}", field=field)


def fetch_from_hub(config: RunConfig, *, weights: bool) -> RunConfig:
    """Return the run with all its data and, unless it resumes, its first weights on this machine.

    Args:
        config: a run that `validate_run` has accepted.
        weights: whether to download weights that the cache lacks.
    Raises:
        ConfigError: the weights cannot be fetched.
        DataError: a data set cannot be fetched, or its files are several sets.
    """
    if weights and (model := first_weights(config)[1]) is not None:
        config = with_values(config, load=str(fetch(model, "weights", field="load")))
    if config.data.dataset_type != "raw":
        return config
    given = config.data
    for field in _SPLITS_OF:
        if (text := getattr(config.data, field)) is not None:
            config = with_values(config, **{field: fetch_sets(text, field, config.checkpoint.output_path)})
    if config.data != given:
        check_data(config)
    return config


def fetch_sets(text: str, field: str, output: str | None = None) -> str:
    """Replace the hub names in a data position by files of their snapshots.

    Args:
        field: `train_data_path` or `valid_data_path`; decides the split.
        output: the run's folder, whose config.yaml decides the revisions.
    Raises:
        DataError: a data set cannot be fetched, or its files are several sets.
    """
    with about(field):
        parts = parse_data(text)
        names = [hub_name(part.path, "dataset") for part in parts]
        if not any(names):
            return text
        return format_data(
            part if name is None else part._replace(path=_set_of(_pinned(name, output), _SPLITS_OF[field]))
            for part, name in zip(parts, names, strict=True)
        )


def _pinned(name: HubName, output: str | None) -> HubName:
    """Return the name with the revision with which the run in this folder began, if it used this name."""
    file = Path(output or "") / CONFIG_FILE
    if name.revision is not None or output is None or not file.is_file():
        return name
    text = read_small(file).decode(errors="replace")
    match = re.search(rf"{re.escape(name.folder_name)}/snapshots/([0-9a-f]{{40}})", text)
    return name if match is None else name._replace(revision=match[1])


def first_weights(config: RunConfig) -> tuple[Path | None, HubName | None]:
    """Return the Hugging Face folder of the run's first weights, or None if the run has no such folder.

    Also return the hub's model if the folder is in the cache without these weights, else None.
    """
    load = config.checkpoint.load
    if load is None or not is_hf_folder(load) or existing_checkpoint_root(config) is not None:
        return None, None
    folder = Path(load)
    is_whole = not lacking_weights(folder) or any(folder.glob("*.bin"))
    return folder, None if is_whole else snapshot_name(load)


def _set_of(name: HubName, accepted: Sequence[str]) -> str:
    """Return the file, or the glob of files, that this position takes from a data set.
    Raise a DataError if the data set lacks this split or has it several times.
    """
    folder = fetch(name, "rows", error_type=DataError)
    if name.inside:
        return escape(str(folder)) + name.inside
    sets = _sets(str(file.relative_to(folder)) for file in data_files(folder))
    splits = by_split(sets)
    meant = next((splits[split] for split in accepted if split in splits), [] if splits else sets)
    if len(meant) != 1:
        found = "several sets" if meant else f"no {' or '.join(accepted)} set"
        raise DataError(
            f"{name.repo} holds {found}: {', '.join(sorted(sets)[:20])}; expected one of them, such as "
            f"'{folder}/{min(meant or sets)}'"
        )
    return f"{escape(str(folder))}/{meant[0]}"


def _sets(files: Iterable[str]) -> list[str]:
    """Return the sets of a folder's files: a file, or the glob of files that differ only in a number."""
    sets: dict[str, list[str]] = {}
    for file in files:
        sets.setdefault(f"{_SHARD.sub('', file)}*", []).append(file)
    return [glob if len(found) > 1 else found[0] for glob, found in sets.items()]
