"""A teacher's log-probabilities on disk: `llama-patch evaluate --distill-to` writes, a student reads them.

    STORE/teacher.json   `StoreHeader`
    STORE/rows.bin       of each row: SHA-256 of its content, end in the other files (tokens), CRC-32 (`_ROW`)
    STORE/ids.bin        int32 [T, K]: of each token with a loss, the K most likely tokens, likeliest first
    STORE/logs.bin       float32 [T, K + 1]: their log-probabilities, then that of all other tokens together

The log-probabilities are those of softmax(logits / temperature) over the whole vocabulary. So the K + 1
numbers of a token are a distribution. Rows are found by content, so the student may have any layout,
micro-batches and order. Files are little-endian; reading them executes no code.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from patch.errors import ConfigError, DataError
from patch.storage.atomic import StagedFolder
from patch.storage.places import open_to_read
from patch.storage.text_files import read_json, read_small

_HEADER, _ROWS, _IDS, _LOGS = "teacher.json", "rows.bin", "ids.bin", "logs.bin"
_ROW = struct.Struct("<32sQI")
_NUMBER_BYTES = 4
_MOST_INDEX_BYTES = 1 << 34


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """Facts of a store: its teacher, its size, and the runs for which it was written."""

    teacher: str
    """Its folder, for messages."""
    vocab_size: int
    tokenizer: str
    """Hash of the tokenizer's tokens and ids."""
    sequence_length: int
    packing: bool
    seed: int
    temperature: float
    top_k: int
    rows: int
    tokens: int
    """Tokens with a loss, of all rows."""
    index: str
    """SHA-256 of rows.bin, and so of all that the store says."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: K ids, K + 1 log-probabilities."""
        return (2 * self.top_k + 1) * _NUMBER_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes of the store, without this header."""
        return self.rows * _ROW.size + self.tokens * self.token_bytes


def read_header(folder: str) -> StoreHeader:
    """Return the header of a store.

    Raises:
        ConfigError: the folder is no store, or its header is damaged.
    """
    try:
        values = read_json(Path(folder) / _HEADER)
        kinds = {field.name: field.type for field in fields(StoreHeader)}
        if {name: type(value).__name__ for name, value in values.items()} != kinds:
            raise ValueError(f"{_HEADER} has other values than this release writes")
        header = StoreHeader(**values)
        if min(header.top_k, header.rows, header.tokens) < 1:
            raise ValueError(f"{_HEADER} says that it is empty")
        return header
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder} has no log-probabilities of a teacher ({error!s:.200}); expected a folder that "
            "llama-patch evaluate --distill-to has written",
            field="distill_from",
        ) from error


@lru_cache
def known_header(folder: str) -> StoreHeader | None:
    """Return the header of a store, or None if it is not on this machine: a plan may be for another one."""
    try:
        return read_header(folder)
    except ConfigError:
        return None


class TeacherRows:
    """The rows of a store, memory-mapped.

    Raises:
        ConfigError: the folder is no store.
        DataError: its files do not belong together.
    """

    def __init__(self, folder: str) -> None:
        self.header, self.folder = read_header(folder), folder
        count, width = self.header.rows, self.header.top_k * _NUMBER_BYTES
        self._widths = width, width + _NUMBER_BYTES
        try:
            index = read_small(Path(folder) / _ROWS, _MOST_INDEX_BYTES)
            if len(index) != count * _ROW.size or sha256(index).hexdigest() != self.header.index:
                raise ValueError(f"{_ROWS} is not that of {_HEADER}")
            self._maps = [self._mapped(name, w) for name, w in zip((_IDS, _LOGS), self._widths, strict=True)]
        except (OSError, ValueError) as error:
            raise self._damaged(str(error)) from error
        self._places: dict[bytes, tuple[int, int, int]] = {}
        begin = 0
        for digest, end, checksum in _ROW.iter_unpack(index):
            self._places[digest] = begin, end, checksum
            begin = end

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places

    def find(self, digest: bytes) -> tuple[bytes, bytes]:
        """Return ids and log-probabilities of a row's tokens with a loss; the store must have the row.

        Raises:
            DataError: the row is damaged.
        """
        begin, end, checksum = self._places[digest]
        ids, logs = (own[begin * w : end * w] for own, w in zip(self._maps, self._widths, strict=True))
        if crc32(logs, crc32(ids)) != checksum:
            raise self._damaged("a row has another checksum")
        return ids, logs

    def _mapped(self, name: str, width: int) -> mmap.mmap:
        with open_to_read(Path(self.folder) / name) as file:
            found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(found) != self.header.tokens * width:
            raise ValueError(f"{name} has {len(found)} bytes, expected {self.header.tokens * width}")
        return found

    def _damaged(self, why: str) -> DataError:
        return DataError(
            f"{self.folder} is damaged: {why}; write it again (llama-patch evaluate --distill-to)",
            field="distill_from",
        )


class TeacherWriter:
    """Writes a store under a temporary name; `publish` gives it its name. It closes like a file."""

    def __init__(self, folder: Path) -> None:
        self._staged = StagedFolder(
            folder, folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old.tmp")
        )
        self._staged.open()
        self._files: dict[str, BinaryIO] = {
            name: (self._staged.partial / name).open("wb") for name in (_ROWS, _IDS, _LOGS)
        }
        self._index, self._known, self.num_tokens = sha256(), set[bytes](), 0

    def add(self, digest: bytes, ids: bytes, logs: bytes, num_tokens: int) -> None:
        """Add a row, unless a row of the same content is there.

        Raises:
            OSError: it cannot be written.
        """
        if digest in self._known:
            return
        self._known.add(digest)
        self.num_tokens += num_tokens
        row = _ROW.pack(digest, self.num_tokens, crc32(logs, crc32(ids)))
        self._index.update(row)
        for name, content in ((_ROWS, row), (_IDS, ids), (_LOGS, logs)):
            self._files[name].write(content)

    def publish(self, facts: Mapping[str, Any]) -> StoreHeader:
        """Write the header from the facts that `add` does not know, and give the folder its name.

        Raises:
            DataError: no row has a token with a loss.
            OSError: the folder cannot be written.
        """
        if not self._known:
            raise DataError("no token of the data has a loss; a teacher has nothing to say")
        header = StoreHeader(
            **facts, rows=len(self._known), tokens=self.num_tokens, index=self._index.hexdigest()
        )
        self._close_files()
        (self._staged.partial / _HEADER).write_text(json.dumps(asdict(header), indent=1) + "\n")
        self._staged.publish()
        return header

    def close(self) -> None:
        """Close the files; remove them if they are not published."""
        self._close_files()
        self._staged.discard()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
