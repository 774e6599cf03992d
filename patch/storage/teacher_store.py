"""A teacher's log-probabilities on disk: `llama-patch evaluate --distill-to` writes, a student reads them.

    STORE/teacher.json   `StoreHeader`
    STORE/rows.bin       of each row: SHA-256 of its content, end in the other file (tokens), CRC-32 (`_ROW`)
    STORE/tokens.bin     float32 [T, 2 K + 1]: of each token with a loss, the K most likely tokens, likeliest
                         first (ids below 2**24 are exact), their log-probabilities, that of all other tokens

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
from typing import Any
from zlib import crc32

from patch.errors import ConfigError, DataError
from patch.storage.atomic import StagedFolder
from patch.storage.places import open_to_read
from patch.storage.text_files import read_json, read_small

_HEADER, _ROWS, _TOKENS = "teacher.json", "rows.bin", "tokens.bin"
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
        """Bytes of a token's numbers."""
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
        try:
            index = read_small(Path(folder) / _ROWS, _MOST_INDEX_BYTES)
            with open_to_read(Path(folder) / _TOKENS) as file:
                self._tokens = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            expected = self.header.num_bytes - len(index)
            if sha256(index).hexdigest() != self.header.index or len(self._tokens) != expected:
                raise ValueError(f"{_ROWS} or {_TOKENS} is not that of {_HEADER}")
        except (OSError, ValueError) as error:
            raise self._damaged(str(error)) from error
        ends = [end for _, end, _ in _ROW.iter_unpack(index)]
        rows = zip(_ROW.iter_unpack(index), [0, *ends], strict=False)
        self._places = {digest: (begin, end, checksum) for (digest, end, checksum), begin in rows}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places

    def find(self, digest: bytes) -> bytes:
        """Return the numbers of a row's tokens with a loss; the store must have the row.

        Raises:
            DataError: the row is damaged.
        """
        (begin, end, checksum), size = self._places[digest], self.header.token_bytes
        found = self._tokens[begin * size : end * size]
        if crc32(found) != checksum:
            raise self._damaged("a row has another checksum")
        return found

    def _damaged(self, why: str) -> DataError:
        return DataError(
            f"{self.folder} is damaged: {why}; write it again (llama-patch evaluate --distill-to)",
            field="distill_from",
        )


class TeacherWriter:
    """Writes a store under a temporary name; `publish` gives it its name. It closes like a file."""

    def __init__(self, folder: Path) -> None:
        names = (folder.with_name(f".{folder.name}{ending}") for ending in (".tmp", ".old.tmp"))
        self._staged = StagedFolder(folder, *names)
        self._staged.open()
        self._file = (self._staged.partial / _TOKENS).open("wb")
        self._rows, self._num_tokens = dict[bytes, bytes](), 0

    def add(self, digest: bytes, found: bytes, num_tokens: int) -> None:
        """Add a row, unless a row of the same content is there.

        Raises:
            OSError: it cannot be written.
        """
        if digest not in self._rows:
            self._num_tokens += num_tokens
            self._rows[digest] = _ROW.pack(digest, self._num_tokens, crc32(found))
            self._file.write(found)

    def publish(self, facts: Mapping[str, Any]) -> StoreHeader:
        """Write the header from the facts that `add` does not know, and give the folder its name.

        Raises:
            DataError: no row has a token with a loss.
            OSError: the folder cannot be written.
        """
        if not self._rows:
            raise DataError("no token of the data has a loss; a teacher has nothing to say")
        index = b"".join(self._rows.values())
        checksum = sha256(index).hexdigest()
        header = StoreHeader(**facts, rows=len(self._rows), tokens=self._num_tokens, index=checksum)
        self._file.close()
        (self._staged.partial / _ROWS).write_bytes(index)
        (self._staged.partial / _HEADER).write_text(json.dumps(asdict(header), indent=1) + "\n")
        self._staged.publish()
        return header

    def close(self) -> None:
        """Close the file; remove it if it is not published."""
        self._file.close()
        self._staged.discard()
