"""data.json: the record of a run's data, by which a resume detects changes.

The launcher compares files: training sets, tokenizer and chat template. Their paths do not count, because
nothing that a run reads depends on them. The worker compares the tokens of the rows, which also depend on the
packages that render and encode.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, get_args

from patch.config.choices import BuiltInTemplate
from patch.config.data_spec import set_files, sets_of
from patch.config.schema import RunConfig
from patch.errors import ConfigError, DataError, about
from patch.storage.atomic import write_record
from patch.storage.names import DATA_RECORD_FILE, TOKENIZER_FILES
from patch.storage.places import AnyPath, open_to_read
from patch.storage.text_files import read_json, read_small

_MIXED = ", largest deficit first"
"""How weighted fine-tuning sets alternate; in the hash, it separates runs that began with another rule."""
_END_BYTES = 2**20
_PIECE_BYTES = 2**14
_PIECES = 16
BUILT_IN, TEXT, NONE = "built-in", "text", "none"
"""Source of a chat template: a built-in name, the text of a file, or none."""


@dataclass(frozen=True, slots=True)
class SetRecord:
    """One tokenized training set of rows."""

    path: str
    tokens: str
    """Hash of the tokens and of the loss mask."""
    sizes: str
    """Hash of the number of tokens of each sample."""
    origin: dict[str, str]
    """Everything that decides the tokens: its name in a message -> its value or the value's hash."""
    reads_clock: bool
    """Whether the chat template writes the date, so that the tokens may change each day."""


@dataclass(frozen=True, slots=True)
class DataRecord:
    """The content of data.json."""

    files: str
    """Hash of the training sets' shares and of samples of their files."""
    tokenizer: str | None
    """Hash of the tokenizer's files, or None if there are none."""
    chat_template: tuple[str, str]
    """Source of the chat template, and its name or the hash of its text."""
    sets: tuple[SetRecord, ...]

    @classmethod
    def of(cls, config: RunConfig, sets: Sequence[SetRecord] = ()) -> DataRecord:
        """Build the record of a run, which reads the run's files; `sets` are known after tokenization."""
        return cls(_files_hash(config), _tokenizer_hash(config), _chat_template(config), tuple(sets))

    @classmethod
    def read(cls, output: AnyPath) -> DataRecord | None:
        """Return the record in a run's folder, or None if there is none.

        Raises:
            ConfigError: the record is damaged.
        """
        path = output / DATA_RECORD_FILE
        try:
            values = read_json(path)
            sets = tuple(SetRecord(**one) for one in values.pop("sets"))
            where, value = values.pop("chat_template")
            return cls(chat_template=(where, value), sets=sets, **values)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error!s:.80}), expected what the run there has written; put "
                "it back, or remove it to resume without a check of the data"
            ) from error

    def write(self, output: Path) -> None:
        """Write the record into a run's folder.

        Raises:
            CheckpointError: the record cannot be written.
        """
        write_record(output / DATA_RECORD_FILE, json.dumps(asdict(self), indent=1) + "\n")


def changes_of_origin(before: SetRecord, now: SetRecord) -> list[str]:
    """Return the changed settings that decide a set's tokens, with both values if they are short."""
    changes = []
    for name in sorted(before.origin.keys() | now.origin.keys()):
        then, value = before.origin.get(name, "none"), now.origin.get(name, "none")
        if then != value:
            is_shown = max(len(then), len(value)) < 20
            changes.append(f"{name} ({then} before, {value} now)" if is_shown else name)
    return changes


def _files_hash(config: RunConfig) -> str:
    digest = hashlib.sha256()
    field = "train_data_path"
    parts = sets_of(config.data)[field]
    total = sum(part.weight or 0 for part in parts)
    for part in parts:
        with about(field):
            files = set_files(config.data, part.path)
        share = "" if part.weight is None else f"{part.weight / total:.6g}" + _MIXED * config.training.sft
        digest.update(f"{share} {len(files)}\n".encode())
        for name in files:
            with open_to_read(Path(name)) as file:
                for piece in _samples(file):
                    digest.update(piece)
    return digest.hexdigest()


def _samples(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the file's size, its first and last MiB, and small pieces at equal distances between them.
    This is cheap for files of any size, but may miss a change in the middle that keeps the size.
    """
    size = os.fstat(file.fileno()).st_size
    yield size.to_bytes(8, "little") + file.read(_END_BYTES)
    if size > 2 * _END_BYTES:
        for index in range(1, _PIECES):
            file.seek((size - _END_BYTES) * index // _PIECES)
            yield file.read(_PIECE_BYTES)
    file.seek(max(size - _END_BYTES, 0))
    yield file.read(_END_BYTES)


def _tokenizer_hash(config: RunConfig) -> str | None:
    """Leave out tokenizer_config.json, which is often rewritten; its changes show in the tokens."""
    files = [Path(config.tokenizer_folder or "") / name for name in TOKENIZER_FILES]
    there = [file for file in files if file.is_file()]
    try:
        found = [(file.name, hashlib.sha256(read_small(file, 1 << 29)).digest()) for file in there]
    except OSError as error:
        raise DataError(f"tokenizer: {error}", field="tokenizer_name_or_path") from error
    return _hash(found) if there else None


def _chat_template(config: RunConfig) -> tuple[str, str]:
    """Return the same for equal texts, whether a file is named or the tokenizer has the template."""
    chosen, folder = config.data.chat_template, Path(config.tokenizer_folder or "")
    if chosen in get_args(BuiltInTemplate):
        return BUILT_IN, str(chosen)
    file = folder / "chat_template.jinja" if chosen is None else Path(chosen)
    with suppress(OSError, ValueError, AttributeError):  # the tokenizer's reader reports damaged files
        if file.is_file():
            return TEXT, _hash(read_small(file).decode(errors="replace"))
        text = read_json(folder / "tokenizer_config.json").get("chat_template")
        if text is not None:
            return TEXT, _hash(text)
    return NONE, ""


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
