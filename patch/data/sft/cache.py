"""Token cache: tokenized sets on disk, shared by all ranks of a machine and by all runs.

    CACHE/README.txt                what this folder is
    CACHE/sets/KEY/                 ids.bin  learned.bin  ends.bin  report.json
    CACHE/file_hashes/              the hashes of data files and entries, so that they are not read again

KEY is a hash of everything that decides the tokens (`origin_of`). An entry is written under a temporary name
and renamed when it is complete, so it exists as a whole or not at all. One process makes the entry. The other
processes wait for its lock, without a collective, while that process lives. Every use compares the entry's
files with their hashes; a damaged entry is made again.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from patch.config.fields import FIELDS
from patch.data.sft.report import SetReport
from patch.errors import DataError
from patch.logger import get_logger
from patch.storage.atomic import StagedFolder, write_atomically
from patch.storage.checksums import FileHashes
from patch.storage.lock import check_held, wait_for_cache
from patch.storage.places import open_to_read
from patch.storage.text_files import read_json

_logger = get_logger(__name__)

_REPORT = "report.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ABANDONED_S = 3600.0
"""Seconds without a change after which a temporary folder of another machine counts as abandoned."""

_README = """\
Tokenized training sets of llama-megatron-patch. Each folder in sets/ is one set for one tokenizer, chat
template and sequence length; the time of its report.json is when it was made. Everything here can be deleted
while no run is starting; it is made again when needed. A folder in sets/ that begins with a dot and ends in
.tmp belongs to a run that is starting, or that was killed.
"""

TYPES: dict[str, type[np.generic]] = {"ids": np.int32, "learned": np.bool_, "ends": np.int64}
"""Arrays of a set, 5 bytes per token. ids int32 [T]: tokens of all samples, concatenated. learned bool [T]:
whether the loss covers the token; the first token of an unpaired answer has its label instead. ends int64
[N]: end of each sample in `ids`."""


class TokenWriter:
    """Writes the arrays to their streams piece by piece, and hashes them."""

    def __init__(self, streams: Mapping[str, BinaryIO]) -> None:
        self._streams = streams
        self.share = 0.0
        """Share of the set that is written, as far as known; the caller sets it."""
        self.num_bytes = 0
        self._hashes = {name: sha256() for name in TYPES}
        self._num_tokens = 0

    def write(self, ids: bytes, learned: bytes, sizes: list[int]) -> None:
        """Append samples, as bytes of int32 [T] and bool [T]; `sizes` are the ids of each sample, T in sum.

        Raises:
            OSError: there is no room for them.
        """
        ends = self._num_tokens + np.cumsum(sizes, dtype=np.int64)
        self._num_tokens += sum(sizes)
        for name, content in (("ids", ids), ("learned", learned), ("ends", ends.tobytes())):
            self._streams[name].write(content)
            self._hashes[name].update(content)
            self.num_bytes += len(content)

    def sha256(self) -> dict[str, str]:
        """Return the hash of each array, in hexadecimal digits."""
        return {name: each.hexdigest() for name, each in self._hashes.items()}


Build = Callable[[TokenWriter], SetReport]


class TokenizedSet(NamedTuple):
    """Tokens of a set, and the report on its rows."""

    arrays: Mapping[str, np.ndarray]
    """Arrays of `TYPES`, by name."""
    report: SetReport
    sha256: dict[str, str]


def tokenized_in_memory(build: Build) -> TokenizedSet:
    """Return the set that `build` writes, without a cache."""
    streams = {name: BytesIO() for name in TYPES}
    writer = TokenWriter(streams)
    report = build(writer)
    arrays = {name: np.frombuffer(streams[name].getbuffer(), kind) for name, kind in TYPES.items()}
    return TokenizedSet(arrays, report, writer.sha256())


class TokenCache:
    """Folder of tokenized sets. It is created when a set is added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sets = folder / "sets"
        self.hashes = FileHashes(folder / "file_hashes")

    def get(self, key: str, name: str, build: Build) -> TokenizedSet:
        """Return the set of this key (see `origin_of`). If the cache lacks it, one process builds it, others
        wait.

        Raises:
            DataError: `build` raised it, in all waiting processes too; or the folder cannot be written.
        """
        entry = self._sets / key[:32]
        if (found := self._read(entry, key)) is None:
            found = self._make(entry, key, name, build)
        else:
            made = datetime.fromtimestamp((entry / _REPORT).stat().st_mtime)
            _logger.info("%s: tokens from %s (%s, made on %s)", name, entry, _size(found), f"{made:%d %b %Y}")
        return found

    def has(self, key: str) -> bool:
        """Return whether the cache has the set of this key."""
        return self._read(self._sets / key[:32], key) is not None

    def _read(self, entry: Path, key: str) -> TokenizedSet | None:
        """Return the set in a folder, or None if it is missing or damaged. Damage is logged."""
        if not entry.is_dir():
            return None
        try:
            values = read_json(entry / _REPORT)
            if values["key"] != key:
                raise ValueError("it belongs to another set")
            report, hashes = SetReport.from_json(values["report"]), values["sha256"]
            found = _mapped(entry, report, hashes)
            ids, learned, ends = (found.arrays[name] for name in TYPES)
            if not len(ids) == len(learned) == ends[-1]:
                raise ValueError("its arrays do not have the same tokens")
            for array in TYPES:
                if self.hashes.sha256(_file(entry, array)) != hashes[array]:
                    raise ValueError(f"{_file(entry, array).name} has another content than was written")
            return found
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = str(error) if isinstance(error, (ValueError, OSError)) else f"{_REPORT} lacks a value"
            _logger.warning("the token cache's %s is damaged: %s; it is made again", entry, reason)
            return None

    def _make(self, entry: Path, key: str, name: str, build: Build) -> TokenizedSet:
        note = entry.with_name(f".{entry.name}.failed.json")
        failed_before = _content(note)
        self._create_folders()
        with wait_for_cache(entry):
            if (found := self._read(entry, key)) is not None:
                return found
            if (failed := _content(note)) not in (failed_before, None):
                raise DataError(failed["message"], field=failed["field"])
            try:
                found = self._build(entry, key, name, build)
            except DataError as error:
                # Waiting processes should not fail one after another at the same row.
                content = {"message": str(error), "field": error.field, "time_ns": time.time_ns()}
                with suppress(OSError):
                    write_atomically(note, json.dumps(content))
                raise
            with suppress(OSError):
                note.unlink(missing_ok=True)
        _logger.info("%s: tokens are kept in %s (%s)", name, entry, _size(found))
        return found

    def _build(self, entry: Path, key: str, name: str, build: Build) -> TokenizedSet:
        own = f".{entry.name}.{socket.gethostname()}.{os.getpid()}"
        draft = StagedFolder(entry, entry.with_name(f"{own}.tmp"), entry.with_name(f"{own}.old.tmp"))
        writer = TokenWriter({})
        try:
            _remove_abandoned(entry)
            draft.open()
            with ExitStack() as stack:
                files = {array: _file(draft.partial, array) for array in TYPES}
                writer = TokenWriter({a: stack.enter_context(file.open("wb")) for a, file in files.items()})
                report = build(writer)
            content = {"key": key, "set": name, "report": report.to_json(), "sha256": writer.sha256()}
            (draft.partial / _REPORT).write_text(json.dumps(content, indent=1) + "\n")
            check_held(entry)
            draft.publish()
        except OSError as error:
            draft.discard()  # frees the space of the partial entry
            raise self._no_room(error, writer) from error
        finally:
            draft.discard()
        for array, digest in writer.sha256().items():
            self.hashes.remember(_file(entry, array), digest)
        return _mapped(entry, report, writer.sha256())

    def _create_folders(self) -> None:
        try:
            self._sets.mkdir(parents=True, exist_ok=True)
            if not (readme := self._folder / "README.txt").exists():
                write_atomically(readme, _README)
        except FileNotFoundError:
            pass  # another process has written the README meanwhile
        except OSError as error:
            raise DataError(
                f"the token cache {self._folder} cannot be written: {error.strerror}; name another folder",
                field="cache_dir",
            ) from error

    def _no_room(self, error: OSError, writer: TokenWriter) -> DataError:
        reason = str(error.strerror or error)
        if error.errno in _FULL:
            needed = writer.num_bytes / writer.share if writer.share else writer.num_bytes
            free = shutil.disk_usage(self._folder).free
            reason += f": this set needs about {needed:.2g} bytes, {free} are free"
        return DataError(
            f"the token cache {self._folder} cannot be written: {reason}; expected a folder with more room",
            field="cache_dir",
        )


def _file(folder: Path, array: str) -> Path:
    return folder / f"{array}.bin"


def _mapped(entry: Path, report: SetReport, hashes: dict[str, str]) -> TokenizedSet:
    """Map the arrays of an entry, read-only, so that all processes of a machine share their memory."""
    arrays = {}
    for name, kind in TYPES.items():
        with open_to_read(_file(entry, name)) as file:
            arrays[name] = np.memmap(file, kind, mode="r")  # type: ignore[call-overload]  # any open file
    return TokenizedSet(arrays, report, hashes)


def _remove_abandoned(entry: Path) -> None:
    """Remove what killed processes left of this entry, whose lock this process holds. Folders of other
    machines must also be old, because a file system may not lock between machines."""
    for folder in entry.parent.glob(f".{entry.name}.*.tmp"):
        is_own = folder.name.startswith(f".{entry.name}.{socket.gethostname()}.")
        with suppress(OSError):
            changed = max((file.stat().st_mtime for file in folder.iterdir()), default=folder.stat().st_mtime)
            if is_own or time.time() - changed > _ABANDONED_S:
                _logger.info("removing %s, which a process left that was killed", folder)
                shutil.rmtree(folder)


def _content(note: Path) -> dict[str, Any] | None:
    try:
        content = read_json(note)
        is_ours = isinstance(content["message"], str) and content["field"] in (None, *FIELDS)
        return content if is_ours else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _size(found: TokenizedSet) -> str:
    return f"{sum(array.nbytes for array in found.arrays.values()) / 1e6:.1f} MB"
