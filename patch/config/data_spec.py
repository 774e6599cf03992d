"""Parse DATASET_PATH and VALID_DATASET_PATH: one data set or several, with or without weights.

    rows.json                              one file
    data/english                           a folder: its data files, also in subfolders, are one set
    'data/*.jsonl.gz'                      a glob: the matching files are one set; ** also enters folders
    '0.7 english.json 0.3 data/chinese'    several sets, blended by weight
    'english.json data/chinese'            several sets without weights
    '0.7 /data/text_document 0.3 /b'       several sets as prefixes of .bin and .idx

In a list of several paths, a path with blanks must be quoted. A text that names existing files as a whole is
one path.

A folder with LLaMA-Factory's dataset_info.json (a table of sets: files or hub names) is refused, because the
intended set is unknown. The message has the path and --columns of each set that is supported.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from glob import escape, has_magic, iglob
from pathlib import Path
from typing import Any, NamedTuple

from patch.config.schema import DataConfig
from patch.errors import ConfigError, DataError, about, nearest, shown
from patch.storage.hub import shadowed_by
from patch.storage.names import DATA_SUFFIXES, check_saved, row_files
from patch.storage.text_files import parse_json, read_json
from patch.text import to_float

_TABLE = "dataset_info.json"
_PLACES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_NOT_TRAINED = {"images", "videos", "audios", "chosen", "rejected", "kto_tag"}
"""Columns of unsupported sets: images, video and sound, preferences, judged answers."""
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
"""LLaMA-Factory's column names that differ from ours."""
_TAGS = {"role_tag": "role", "content_tag": "content"}
_USUAL = {"role", "from", "content", "value"}
_SHOWN = 12


def refuse_table(file: Path) -> None:
    """Refuse LLaMA-Factory's dataset_info.json as a file of rows.

    Raises:
        DataError: the file is such a table; the message lists its sets.
    """
    sets = _sets(file)
    if not sets:
        return
    found = [text for name, info in sets.items() if (text := _cure(file.parent, name, info))]
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise DataError(
        f"{file} is LLaMA-Factory's table of {len(sets)} sets, not rows; expected the file of one, or 'FILE "
        f"FILE' of several. Those of text to train on: {'; '.join(found[:_SHOWN]) or 'none'}{more}"
    )


def _sets(file: Path) -> dict[str, dict[str, Any]]:
    """Return the sets of a table, or {} for any other file, such as the dataset_info.json of `datasets`."""
    try:
        table = read_json(file) if file.name == _TABLE else None
    except (OSError, ValueError):
        return {}
    entries = table.items() if isinstance(table, dict) else ()
    return {name: info for name, info in entries if isinstance(info, dict) and any(map(info.get, _PLACES))}


def _cure(folder: Path, name: str, info: dict[str, Any]) -> str:
    """Return a set as a position and --columns, or "" if it is not supported."""
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


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SPLITS = {
    "training": re.compile(r"(?<![a-z])train(ing)?(?![a-z])"),
    "validation": re.compile(r"(?<![a-z])(validation|valid|val|dev)(?![a-z])"),
    "test": re.compile(r"(?<![a-z])(test|testing|eval|evaluation)(?![a-z])"),
}
"""Words for splits in file and folder names. Source: Hugging Face datasets."""


def by_split(names: Collection[str]) -> dict[str, list[str]]:
    """Return the file or folder names of each split (training, validation, test) that has names."""
    found = {
        split: [name for name in names if words.search(name.lower())] for split, words in _SPLITS.items()
    }
    return {split: named for split, named in found.items() if named}


class DataPart(NamedTuple):
    """One data set of a position."""

    weight: float | None
    """Weight in the blend as the user wrote it, or None without weights."""
    path: str
    """A file, a folder, a glob, or the prefix of .bin and .idx."""


def parse_data(text: str) -> tuple[DataPart, ...]:
    """Parse a position into its data sets. Either every path has a weight before it, or no path has a weight.

    A file whose name is a number must be written with its folder (`./7`).

    Raises:
        DataError: there is no path, a weight is missing or not positive, or a quotation mark is not closed.
    """
    if url := _URL.search(text):
        raise DataError(
            f"got a URL ({url[0]}...), expected files on this machine, or a name of the hub (org/name)"
        )
    if _names_files(text):
        return (DataPart(None, text),)
    words = _words(text)
    if not words:
        raise DataError(f"got {text!r}, expected a path")
    if not _is_number(words[0]):
        if late := next((word for word in words if to_float(word) is not None), None):
            raise DataError(
                f"got {text!r}: {late} is a weight, but {words[0]} has none, expected WEIGHT PATH WEIGHT "
                "PATH ..., or paths alone (a path that is a number: ./NUMBER)"
            )
        return tuple(DataPart(None, os.path.expanduser(path)) for path in words)
    weights, paths = words[::2], words[1::2]
    for index, weight in enumerate(weights):
        number = to_float(weight)
        if number is None or number <= 0 or index == len(paths):
            what = f"{weight} has no path" if number is not None and number > 0 else f"{weight} is no weight"
            raise DataError(
                f"got {text!r}: {what}, expected WEIGHT PATH WEIGHT PATH ..., each weight above 0"
            )
    return tuple(
        DataPart(float(weight), os.path.expanduser(path)) for weight, path in zip(weights, paths, strict=True)
    )


def sets_of(data: DataConfig) -> dict[str, tuple[DataPart, ...]]:
    """Return a run's training and validation sets by the name of their field; no entry is left out.

    Raises:
        DataError: see `parse_data`.
    """
    found = {}
    for field in ("train_data_path", "valid_data_path"):
        text = getattr(data, field)
        with about(field):
            found[field] = parse_data(text) if text is not None else ()
    return found


def split_shares(text: str) -> tuple[float, float, float]:
    """Parse `--split` into the shares of training, validation and neither; their sum may be any number.

    Args:
        text: one to three numbers between commas, such as 99,1,0; missing numbers are 0.

    Raises:
        ConfigError: the text is malformed, or the training share is 0.
    """
    words = text.split(",")
    if len(words) <= 3 and all(re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", word) for word in words):
        training, validation, neither = (*map(float, words), 0.0, 0.0)[:3]
        if training > 0:
            return training, validation, neither
    raise ConfigError(
        f"got {text!r}, expected shares for training, validation and neither such as 99,1,0, the first "
        "above 0",
        field="split",
    )


def format_data(parts: Iterable[DataPart]) -> str:
    """Format data sets as `parse_data` reads them. A single path without weight is written unchanged."""
    parts = tuple(parts)
    if parts[0].weight is None and parse_data(parts[0].path) == parts:
        return parts[0].path
    return " ".join(
        shlex.quote(part.path) if part.weight is None else f"{part.weight} {shlex.quote(part.path)}"
        for part in parts
    )


def files_of(path: str, *, with_text: bool = False) -> list[Path]:
    """Return the files of one set of rows: the file itself, or the files of a folder or glob, sorted by path.

    From a folder, `row_files` are taken, but no file whose name or folder begins with a dot or underscore.

    Args:
        with_text: whether to take plain text (.txt) if a folder has no other data.

    Raises:
        DataError: the file is missing, or the folder or glob has no data files; or the folder lacks a file,
            is LLaMA-Factory's, or holds several splits (train, validation, test).
    """
    refuse_table(Path(path))
    if os.path.isdir(path):
        return _files_in(path, with_text)
    if os.path.lexists(path) or not has_magic(path):
        if not os.path.exists(path):
            hint = nearest_set(path) or _nearest_file(path) or _shadow(path)
            commas = " (sets are separated by blanks, not commas)" if "," in path else ""
            raise DataError(
                f"{path} does not exist{hint}{commas}, expected a file, a folder or a glob (several paths: "
                "quote one that has blanks)"
            )
        return [Path(path)]
    files = sorted(name for name in iglob(path, recursive=True) if not os.path.isdir(name))
    if not files:
        raise DataError(f"{path}: no file matches, expected at least one")
    return [Path(name) for name in files]


def nearest_set(prefix: str) -> str:
    """Return a hint with the set of .bin and .idx whose name a prefix begins or misspells.

    `llama-patch preprocess --output-prefix docs` writes docs_text_document.
    """
    folder, name = os.path.split(prefix)
    files = sorted(iglob(os.path.join(escape(folder), "*.idx")))
    sets = [file[:-4] for file in files if os.path.exists(f"{file[:-4]}.bin")]
    longer = [one for one in sets if name and os.path.basename(one).startswith(f"{name}_")]
    if longer:
        return f", did you mean {' or '.join(longer[:3])}?"
    return nearest(name, [os.path.basename(one) for one in sets])


def _is_number(word: str) -> bool:
    """Return whether a word is meant as a weight; this includes nan and inf, which are refused later."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _nearest_file(path: str) -> str:
    folder, name = os.path.split(path)
    try:
        return nearest(name, os.listdir(folder or "."))
    except OSError:
        return ""


def _shadow(path: str) -> str:
    """Return a remark if a local folder hides what may be a hub name."""
    folder = shadowed_by(os.path.relpath(path))
    return f" (a name of the hub is found where no folder is called {folder})" if folder else ""


def _names_files(text: str) -> bool:
    """Return whether the whole text, blanks included, is one path: a file, folder, glob or prefix."""
    if any(os.path.exists(text + ending) for ending in ("", ".bin", ".idx")):
        return True
    return has_magic(text) and next(iglob(text, recursive=True), None) is not None


def _words(text: str) -> list[str]:
    """Split at blanks outside quotation marks. A backslash is part of a name."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
    try:
        return list(lexer)
    except ValueError:
        raise DataError(
            f"got {text!r}: a quotation mark is not closed, expected a path, or WEIGHT PATH WEIGHT PATH ..."
        ) from None


def _files_in(folder: str, with_text: bool) -> list[Path]:
    there = list(_walk(folder))
    for file in there:
        refuse_table(file)
    check_saved(there)
    files = row_files(there, with_text=with_text)
    if not files:
        found = f"it has {', '.join(sorted(file.name for file in there)[:5])}" if there else "it is empty"
        raise DataError(
            f"{folder} is a folder without data: {found}; expected files that end in "
            f"{', '.join(DATA_SUFFIXES)} (other names: give a glob)"
        )
    _refuse_several_splits(folder, files)
    return files


def _walk(folder: str) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}, expected a folder of data files")

    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        yield from (Path(place, name) for name in names if not name.startswith((".", "_")))


def _refuse_several_splits(folder: str, files: list[Path]) -> None:
    """Refuse a folder with several splits: the run would silently train on the test set too."""
    splits = by_split([str(file.relative_to(folder)) for file in files])
    if len(splits) > 1:
        listed = ", ".join(f"{split} ({names[0]})" for split, names in splits.items())
        split, names = next(iter(splits.items()))
        raise DataError(
            f"{folder} holds several splits: {listed}; expected the files of one, by a folder below or a "
            f"glob, such as '{folder}/{_place_of(Path(names[0]), _SPLITS[split])}'"
        )


def _place_of(name: Path, words: re.Pattern[str]) -> str:
    """Return the folder or the glob of the split to which a file belongs."""
    for folder in name.parents[-2::-1]:
        if words.search(folder.name.lower()):
            return str(folder)
    word = words.search(name.name.lower())
    return f"**/*{name.name[slice(*word.span())]}*" if word else str(name)


def set_files(data: DataConfig, path: str) -> list[str]:
    """Return the files of one `DataPart.path`.

    Raises:
        DataError: a set of raw rows has no files.
    """
    if data.dataset_type == "raw":
        return [str(file) for file in files_of(path)]
    return [f"{path}.bin", f"{path}.idx"]


COLUMNS_OF_TURNS = ("role", "content")
"""Keys inside each turn of a list of messages."""
COLUMNS = (
    *("messages", *COLUMNS_OF_TURNS, "instruction", "input", "output", "query", "response"),
    *("prompt", "completion", "history", "text", "system", "tools", "chosen", "rejected", "label"),
)
"""Keys that --columns can rename. `role` and `content` are keys inside the turns."""
_SHAREGPT = {"conversations": "messages", "conversation": "messages", "from": "role", "value": "content"}
"""ShareGPT's keys -> our keys."""


@cache
def parse_columns(text: str | None) -> Mapping[str, str]:
    """Parse --columns, "instruction=question,output=answer", into our key -> the rows' key.

    Raises:
        ConfigError: a part is not NAME=COLUMN, or a name is unknown or given twice.
    """
    columns: dict[str, str] = {}
    for part in text.split(",") if text is not None else ():
        ours, _, theirs = (piece.strip() for piece in part.partition("="))
        if not ours or not theirs:
            example = "expected NAME=COLUMN, such as instruction=question,output=answer"
            raise ConfigError(f"got {part.strip()!r}, {example}", field="columns")
        if ours not in COLUMNS:
            meant = _SHAREGPT.get(ours)
            hint = nearest(ours, list(COLUMNS)) if meant is None else f", did you mean {meant}?"
            raise ConfigError(
                f"got the name {ours!r}, expected one of {', '.join(COLUMNS)}{hint}; the rows' own name "
                "follows the =",
                field="columns",
            )
        if ours in columns:
            raise ConfigError(
                f"got {ours} twice ({columns[ours]}, {theirs}), expected it once", field="columns"
            )
        columns[ours] = theirs
    return columns


def parse_template_kwargs(text: str | None) -> dict[str, Any]:
    """Parse the variables of the chat template from a JSON object.

    Raises:
        ConfigError: the text is not a JSON object whose keys are identifiers.
    """
    try:
        values = {} if text is None else parse_json(text.encode())
        if isinstance(values, dict) and all(map(str.isidentifier, values)):
            return values
    except ValueError:
        pass
    expected = "expected a JSON object of names, such as '{\"enable_thinking\": false}'"
    raise ConfigError(f"got {shown(text)}, {expected}", field="chat_template_kwargs")
