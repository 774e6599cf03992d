"""The tokens of a set in three flat arrays: written as they come, on disk or in memory, and read again."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

TYPES: dict[str, type[np.generic]] = {"ids": np.int32, "learned": np.bool_, "ends": np.int64}
"""The arrays, 5 bytes for each token: ids int32 [T], the tokens of all samples, concatenated; learned bool
[T], whether the loss covers each; ends int64 [N], where each sample ends in `ids`."""


class TokenArrays(NamedTuple):
    """The arrays that `TYPES` describes."""

    ids: np.ndarray
    learned: np.ndarray
    ends: np.ndarray


class TokenWriter:
    """Writes the arrays piece by piece, and hashes them meanwhile; to memory, if `streams` is not set."""

    def __init__(self) -> None:
        self._in_memory = {name: BytesIO() for name in TYPES}
        self.streams: Mapping[str, BinaryIO] = self._in_memory
        """Where each array goes."""
        self.share = 0.0
        """The share of the set that is written, as far as it is known; set by those who write."""
        self.num_bytes = 0
        """Written so far."""
        self._hashes = {name: sha256() for name in TYPES}
        self._num_tokens = 0

    def write(self, ids: bytes, learned: bytes, sizes: list[int]) -> None:
        """Append samples.

        Args:
            ids: of int32 [T].
            learned: of bool [T].
            sizes: ids of each sample; the sum is T.

        Raises:
            OSError: there is no room for them.
        """
        ends = self._num_tokens + np.cumsum(sizes, dtype=np.int64)
        self._num_tokens += sum(sizes)
        for name, content in (("ids", ids), ("learned", learned), ("ends", ends.tobytes())):
            self.streams[name].write(content)
            self._hashes[name].update(content)
            self.num_bytes += len(content)

    def sha256(self) -> dict[str, str]:
        """The hash of each array, in hexadecimal digits."""
        return {name: each.hexdigest() for name, each in self._hashes.items()}

    def arrays_in_memory(self) -> TokenArrays:
        """What was written to memory."""
        arrays = {
            name: np.frombuffer(self._in_memory[name].getbuffer(), kind) for name, kind in TYPES.items()
        }
        return TokenArrays(**arrays)


def file_of(folder: Path, name: str) -> Path:
    """The file of one of the arrays of `TYPES`."""
    return folder / f"{name}.bin"


def map_files(folder: Path) -> TokenArrays:
    """The arrays of a folder, mapped and read-only, so that all processes of a machine share their memory.

    Raises:
        OSError, ValueError: a file is missing or empty.
    """
    arrays = {name: np.memmap(file_of(folder, name), kind, mode="r") for name, kind in TYPES.items()}
    return TokenArrays(**arrays)
