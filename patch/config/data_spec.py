"""Reads DATASET_PATH and VALID_DATASET_PATH: one data set or several, with or without weights.

    rows.json                              one file
    data/english                           a folder: its data files, also those in folders below, are one set
    'data/*.jsonl.gz'                      a glob: the files that match are one set; ** also enters folders
    '0.7 english.json 0.3 data/chinese'    several sets, blended by weight
    'english.json data/chinese'            several sets without weights
    '0.7 /data/text_document 0.3 /b'       the same with prefixes of .bin and .idx

A path with blanks is quoted inside a list of several paths. A text that names existing files as a whole is
one path.

A folder with LLaMA-Factory's dataset_info.json, a table of sets (each a file beside it or a name of the hub),
is refused, because which set is meant is not known, with the path and --columns of each that can be taken.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from glob import escape, has_magic, iglob
from pathlib import Path
from typing import Any, NamedTuple

from patch.config.schema import DataConfig
from patch.errors import ConfigError, DataError, nearest, shown
from patch.numbers import to_float
from patch.storage.hub import shadowed_by
from patch.storage.names import DATA_SUFFIXES, check_saved, row_files
from patch.storage.text_files import parse_json, read_json

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


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SPLITS = {
    "training": re.compile(r"(?<![a-z])train(ing)?(?![a-z])"),
    "validation": re.compile(r"(?<![a-z])(validation|valid|val|dev)(?![a-z])"),
    "test": re.compile(r"(?<![a-z])(test|testing|eval|evaluation)(?![a-z])"),
}
"""The words for splits of a set in names of files and folders. Source: Hugging Face datasets."""


def by_split(names: Collection[str]) -> dict[str, list[str]]:
    """The splits (training, validation, test) that are among these files or folders, and their names."""
    found = {
        split: [name for name in names if words.search(name.lower())] for split, words in _SPLITS.items()
    }
    return {split: named for split, named in found.items() if named}


class DataPart(NamedTuple):
    """One set of a position."""

    weight: float | None
    """Its weight in the blend, as it was written; None without weights."""
    path: str
    """A file, a folder, a glob, or the prefix of .bin and .idx."""


def parse_data(text: str, field: str | None = None) -> tuple[DataPart, ...]:
    """The sets that a position names: either each has a weight before its path, or none has.

    A file whose name is a number is written with its folder (`./7`).

    Args:
        text: the position.
        field: the field of the configuration that holds it, for messages.

    Raises:
        DataError: there is no path, a weight is missing or not positive, or a quotation mark is not closed.
    """
    if url := _URL.search(text):
        raise DataError(
            f"got a URL ({url[0]}...), expected files on this machine, or a name of the hub (org/name)",
            field=field,
        )
    if _names_files(text):
        return (DataPart(None, text),)
    words = _words(text, field)
    if not words:
        raise DataError(f"got {text!r}, expected a path", field=field)
    if not _is_number(words[0]):
        if late := next((word for word in words if to_float(word) is not None), None):
            raise DataError(
                f"got {text!r}: {late} is a weight, but {words[0]} has none, expected WEIGHT PATH WEIGHT "
                "PATH ..., or paths alone (a path that is a number: ./NUMBER)",
                field=field,
            )
        return tuple(DataPart(None, os.path.expanduser(path)) for path in words)
    weights, paths = words[::2], words[1::2]
    for index, weight in enumerate(weights):
        number = to_float(weight)
        if number is None or number <= 0 or index == len(paths):
            what = f"{weight} has no path" if number is not None and number > 0 else f"{weight} is no weight"
            raise DataError(
                f"got {text!r}: {what}, expected WEIGHT PATH WEIGHT PATH ..., each weight above 0",
                field=field,
            )
    return tuple(
        DataPart(float(weight), os.path.expanduser(path)) for weight, path in zip(weights, paths, strict=True)
    )


def split_shares(text: str) -> tuple[float, float, float]:
    """The shares of training, validation and neither that `--split` names; their sum may be any number.

    Args:
        text: one to three numbers between commas, such as 99,1,0; those that are missing are 0.

    Raises:
        ConfigError: it names no such shares, or none for training.
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
    """The text that `parse_data` reads as these sets. A single path without weight is written as it is."""
    parts = tuple(parts)
    if parts[0].weight is None and parse_data(parts[0].path) == parts:
        return parts[0].path
    return " ".join(
        shlex.quote(part.path) if part.weight is None else f"{part.weight} {shlex.quote(part.path)}"
        for part in parts
    )


def files_of(path: str, field: str | None = None, *, with_text: bool = False) -> list[Path]:
    """The files of one set of rows: a file itself, or the files of a folder or a glob, sorted by path.

    From a folder, `row_files` are taken, but none whose name or folder begins with a dot or an underscore.

    Args:
        path: the `path` of a `DataPart`.
        field: the field of the configuration that holds it, for messages.
        with_text: files of plain text (.txt) count where a folder has no others.

    Raises:
        DataError: there is no such file, the folder or glob has no data files, or the folder holds several
            splits (train, validation, test) or a table of sets, which are not one set, or lacks a file.
    """
    refuse_table(Path(path), field)
    if os.path.isdir(path):
        return _files_in(path, field, with_text)
    if os.path.lexists(path) or not has_magic(path):
        if not os.path.exists(path):
            hint = nearest_set(path) or _nearest_file(path) or _shadow(path)
            commas = " (sets are separated by blanks, not commas)" if "," in path else ""
            raise DataError(
                f"{path} does not exist{hint}{commas}, expected a file, a folder or a glob (several paths: "
                "quote one that has blanks)",
                field=field,
            )
        return [Path(path)]
    files = sorted(name for name in iglob(path, recursive=True) if not os.path.isdir(name))
    if not files:
        raise DataError(f"{path}: no file matches, expected at least one", field=field)
    return [Path(name) for name in files]


def nearest_set(prefix: str) -> str:
    """A hint with the set of .bin and .idx whose name a prefix begins or misspells.

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
    """Whether a word is meant as a weight: also nan and inf, which are none."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _nearest_file(path: str) -> str:
    """A hint with the file beside a path that is called almost like it."""
    folder, name = os.path.split(path)
    try:
        return nearest(name, os.listdir(folder or "."))
    except OSError:
        return ""


def _shadow(path: str) -> str:
    """A remark if a folder here makes a path of what may be meant as a name of the hub."""
    folder = shadowed_by(os.path.relpath(path))
    return f" (a name of the hub is found where no folder is called {folder})" if folder else ""


def _names_files(text: str) -> bool:
    """Whether the whole text is one path, blanks included: of a file, folder, glob or prefix."""
    if any(os.path.exists(text + ending) for ending in ("", ".bin", ".idx")):
        return True
    return has_magic(text) and next(iglob(text, recursive=True), None) is not None


def _words(text: str, field: str | None) -> list[str]:
    """Split at blanks outside of quotation marks. A backslash is part of a name."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
    try:
        return list(lexer)
    except ValueError:
        raise DataError(
            f"got {text!r}: a quotation mark is not closed, expected a path, or WEIGHT PATH WEIGHT PATH ...",
            field=field,
        ) from None


def _files_in(folder: str, field: str | None, with_text: bool) -> list[Path]:
    there = list(_walk(folder, field))
    for file in there:
        refuse_table(file, field)
    check_saved(there, field)
    files = row_files(there, with_text=with_text)
    if not files:
        found = f"it has {', '.join(sorted(file.name for file in there)[:5])}" if there else "it is empty"
        raise DataError(
            f"{folder} is a folder without data: {found}; expected files that end in "
            f"{', '.join(DATA_SUFFIXES)} (other names: give a glob)",
            field=field,
        )
    _refuse_several_splits(folder, files, field)
    return files


def _walk(folder: str, field: str | None) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}, expected a folder of data files", field=field
        )

    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        yield from (Path(place, name) for name in names if not name.startswith((".", "_")))


def _refuse_several_splits(folder: str, files: list[Path], field: str | None) -> None:
    """Refuse a folder that holds a training and a test set: it would be trained on both, silently."""
    splits = by_split([str(file.relative_to(folder)) for file in files])
    if len(splits) > 1:
        listed = ", ".join(f"{split} ({names[0]})" for split, names in splits.items())
        split, names = next(iter(splits.items()))
        raise DataError(
            f"{folder} holds several splits: {listed}; expected the files of one, by a folder below or a "
            f"glob, such as '{folder}/{_place_of(Path(names[0]), _SPLITS[split])}'",
            field=field,
        )


def _place_of(name: Path, words: re.Pattern[str]) -> str:
    """The folder or the glob of a split, of which this is a file."""
    for folder in name.parents[-2::-1]:
        if words.search(folder.name.lower()):
            return str(folder)
    word = words.search(name.name.lower())
    return f"**/*{name.name[slice(*word.span())]}*" if word else str(name)


def set_files(data: DataConfig, path: str, field: str | None = None) -> list[str]:
    """The files of one set: of one `DataPart` of `train_data_path` or `valid_data_path`.

    Raises:
        DataError: there are none (raw rows).
    """
    if data.dataset_type == "raw":
        return [str(file) for file in files_of(path, field)]
    return [f"{path}.bin", f"{path}.idx"]


COLUMNS_OF_TURNS = ("role", "content")
"""Keys inside each turn of a list of messages."""
COLUMNS = (
    *("messages", *COLUMNS_OF_TURNS, "instruction", "input", "output", "query", "response"),
    *("prompt", "completion", "history", "text", "system", "tools", "chosen", "rejected"),
)
"""Every key that can be given another name. `role` and `content` are those inside the turns."""
_SHAREGPT = {"conversations": "messages", "conversation": "messages", "from": "role", "value": "content"}
"""ShareGPT's keys, and ours for the same."""


def parse_columns(text: str | None) -> dict[str, str]:
    """Our name of a key to the name that the rows have: "instruction=question,output=answer".

    Raises:
        ConfigError: a part is not NAME=COLUMN, a name is unknown or given twice.
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
    """The variables of the chat template: the names and values of a JSON object.

    Raises:
        ConfigError: it is no JSON object of names.
    """
    try:
        values = {} if text is None else parse_json(text.encode())
        if isinstance(values, dict) and all(map(str.isidentifier, values)):
            return values
    except ValueError:
        pass
    expected = "expected a JSON object of names, such as '{\"enable_thinking\": false}'"
    raise ConfigError(f"got {shown(text)}, {expected}", field="chat_template_kwargs")
