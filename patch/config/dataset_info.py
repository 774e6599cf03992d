"""LLaMA-Factory's dataset_info.json: a table of sets, each a file beside it or a name of the hub.

A folder with such a table holds several sets. Which one is meant is not known, so it is refused, with the
path and the --columns of each set that can be taken.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from patch.errors import DataError
from patch.storage.text_files import read_json

_TABLE = "dataset_info.json"
_PLACES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_NOT_TRAINED = {"images", "videos", "audios", "chosen", "rejected", "kto_tag"}
"""Columns of sets that are not read: images and sound, preferences, judged answers."""
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
"""Its names of columns where ours differ."""
_TAGS = {"role_tag": "role", "content_tag": "content"}
_USUAL = {"role", "from", "content", "value"}
_SHOWN = 12


def refuse_table(file: Path, field: str | None = None) -> None:
    """Refuse LLaMA-Factory's table of sets as a file of rows.

    Raises:
        DataError: the file is one; the message has the sets.
    """
    sets = _sets(file)
    if not sets:
        return
    found = [text for name, info in sets.items() if (text := _cure(file.parent, name, info))]
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise DataError(
        f"{file} is LLaMA-Factory's table of {len(sets)} sets, not rows; expected the file of one, or 'FILE "
        f"FILE' of several. Those of text to train on: {'; '.join(found[:_SHOWN]) or 'none'}{more}",
        field=field,
    )


def _sets(file: Path) -> dict[str, dict[str, Any]]:
    """The sets of a table; none if the file is none, such as the description that datasets writes."""
    try:
        table = read_json(file) if file.name == _TABLE else None
    except (OSError, ValueError):
        return {}
    entries = table.items() if isinstance(table, dict) else ()
    return {name: info for name, info in entries if isinstance(info, dict) and any(map(info.get, _PLACES))}


def _cure(folder: Path, name: str, info: dict[str, Any]) -> str:
    """A set as a position and flag of ours name it; "" if it cannot be taken."""
    columns = info.get("columns") or {}
    place = info.get("hf_hub_url") or (info.get("file_name") and str(folder / info["file_name"]))
    if not place or info.get("ranking") or not _NOT_TRAINED.isdisjoint(columns):
        return ""
    if columns.get("prompt") and not columns.get("response"):  # a set for pre-training
        renamed = {"text": columns["prompt"]}
    else:
        renamed = {_COLUMNS.get(theirs, theirs): column for theirs, column in columns.items() if column}
    tags = {ours: (info.get("tags") or {}).get(tag) for tag, ours in _TAGS.items()}
    renamed |= {ours: key for ours, key in tags.items() if key and key not in _USUAL}
    flag = ",".join(f"{ours}={theirs}" for ours, theirs in renamed.items() if ours != theirs)
    return f"{name}: {shlex.quote(place)}" + (f" --columns {flag}" if flag else "")
