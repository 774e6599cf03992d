"""A torch_dist checkpoint written and read piece by piece, by one process that never holds it whole.

Upstream's writer takes the whole state at once (megatron/core/dist_checkpointing/serialization.py:278). The
format itself asks for no more than a piece: `.distcp` is a row of torch.save records, and the pickled
`.metadata` says for each tensor which piece of it lies where (torch/distributed/checkpoint/metadata.py).
Any tiling of a tensor is legal; readers of another layout take from each piece what they need.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from patch.compat.torch_checkpoint import StorageInfo, create_file_view
from patch.compat.unpickle import load_plain
from patch.errors import CheckpointError
from patch.storage.names import COMMON_FILE, METADATA_FILE

_DATA = "__0_0.distcp"
_WINDOW_BYTES = 2 * 2**20
"""Read at once, unless one row is larger: it fits the processor's cache, so writing it on costs little."""


class Piece(NamedTuple):
    """A rectangle of a stored tensor."""

    key: str
    offsets: tuple[int, ...]
    """Of its first element in the whole tensor."""
    tensor: torch.Tensor


class PieceWriter:
    """Writes the data file of a checkpoint piece by piece; `finish` makes it a checkpoint.

    Args:
        folder: exists and is empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stream = (folder / _DATA).open("wb")
        self._index = Metadata(state_dict_metadata={}, storage_data={})

    def add(self, piece: Piece, shape: tuple[int, ...]) -> None:
        """Append a piece of the tensor `piece.key`, which has this shape as a whole.

        The pieces of one key must tile it and share one dtype.

        Raises:
            OSError: it cannot be written.
        """
        stored = self._index.state_dict_metadata.setdefault(
            piece.key,
            TensorStorageMetadata(TensorProperties(dtype=piece.tensor.dtype), torch.Size(shape), []),
        )
        assert isinstance(stored, TensorStorageMetadata)
        assert stored.properties.dtype == piece.tensor.dtype and tuple(stored.size) == shape
        offsets = torch.Size(piece.offsets)
        index = MetadataIndex(piece.key, offsets, len(stored.chunks))
        stored.chunks.append(ChunkStorageMetadata(offsets, piece.tensor.shape))
        self._append(index, piece.tensor)

    def add_object(self, key: str, value: Any) -> None:
        """Append an opaque object in the form of megatron-core's ShardedObject."""
        self._index.state_dict_metadata[key] = BytesStorageMetadata()
        self._append(MetadataIndex(key), [value])

    def _append(self, index: MetadataIndex, value: Any) -> None:
        begin = self._stream.tell()
        try:
            with _no_checksum():
                torch.save(value, self._stream)
        except RuntimeError as error:  # with which torch's zip writer covers what the stream raised
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        place = StorageInfo(_DATA, begin, self._stream.tell() - begin)
        self._index.storage_data[index] = place

    def finish(self, common: dict[str, Any]) -> None:
        """Close the data file and write what makes the folder a checkpoint.

        Args:
            common: plain values, stored beside the tensors.
        """
        self.close()
        with (self._folder / METADATA_FILE).open("wb") as stream:
            pickle.dump(self._index, stream)
        torch.save(common, self._folder / COMMON_FILE)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))

    def close(self) -> None:
        """Close the data file."""
        self._stream.close()


@contextmanager
def _no_checksum() -> Iterator[None]:
    """torch.save without the CRC32 that no torch.load looks at; it costs as much as the writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def read_pieces(folder: Path, index: Metadata, keys: set[str]) -> Iterator[Piece]:
    """The stored pieces of these tensors in the order in which they lie, in windows of rows.

    Each is valid until the next: one buffer holds them all.

    Args:
        index: the checkpoint's (`compat.unpickle.read_metadata`).

    Raises:
        CheckpointError: names the file and the tensor that cannot be read.
    """
    places = [(where, place) for where, place in index.storage_data.items() if where.fqn in keys]
    buffer = np.empty(_WINDOW_BYTES, np.uint8)
    for where, place in sorted(places, key=lambda item: (item[1].relative_path, item[1].offset)):
        path = folder / place.relative_path
        with path.open("rb") as stream, _reading(path, where.fqn, place):
            told = _load(stream, place, "meta")
            _check(path, where, told, index.state_dict_metadata[where.fqn])
            if not told.is_contiguous():
                yield Piece(where.fqn, tuple(where.offset or ()), _load(stream, place, "cpu"))
                continue
            for shift, values in _windows(stream, place, told, buffer):
                offsets = tuple(map(sum, zip(where.offset or (), shift, strict=True)))
                yield Piece(where.fqn, offsets, values)


@contextmanager
def _reading(path: Path, name: str, place: StorageInfo) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path}: {name} (bytes {place.offset} to {place.offset + place.length}) cannot be read: "
            f"{error or type(error).__name__}"
        ) from error


def _load(stream: BufferedReader, place: StorageInfo, device: str) -> Any:
    """A record's tensor; on the device `meta` without its values, but its storage knows where they lie.

    That `meta` reads none is so since torch 2.11 (pytorch pull request 170619).
    """
    return load_plain(cast(IO[bytes], create_file_view(stream, place.offset, place.length)), device)


def _windows(
    stream: BufferedReader, place: StorageInfo, told: torch.Tensor, buffer: np.ndarray
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Rows of a record, read into the buffer: where they begin in its tensor, and the values."""
    *lead, rows, columns = (1, *told.shape) if told.ndim == 1 else told.shape
    storage: Any = told.untyped_storage()
    begin = place.offset + storage._checkpoint_offset + told.storage_offset() * told.element_size()
    if begin + told.nbytes > place.offset + place.length:
        raise EOFError("its values go beyond it")
    row_bytes = columns * told.element_size()
    step = max(1, buffer.nbytes // row_bytes)
    if row_bytes > buffer.nbytes:
        buffer = np.empty(row_bytes, np.uint8)
    for outer in np.ndindex(*lead):
        for row in range(0, rows, step):
            count = min(step, rows - row)
            window = buffer[: count * row_bytes]
            if os.preadv(stream.fileno(), [window.data], begin) < window.nbytes:
                raise EOFError
            begin += window.nbytes
            values = torch.from_numpy(window).view(told.dtype)
            if told.ndim == 1:
                yield (0,), values
            else:
                yield (*outer, row, 0), values.view(*[1] * len(lead), count, columns)


def _check(path: Path, where: MetadataIndex, told: object, stored: object) -> None:
    """The record is what the index says of it."""
    assert isinstance(stored, TensorStorageMetadata), "objects are not read in pieces"
    offsets = tuple(where.offset or ())
    expected = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in stored.chunks}.get(offsets)
    if not isinstance(told, torch.Tensor) or told.dtype != stored.properties.dtype:
        found = getattr(told, "dtype", type(told).__name__)
        raise CheckpointError(f"{path}: {where.fqn} is {found}, its index says {stored.properties.dtype}")
    if tuple(told.shape) != expected:
        raise CheckpointError(
            f"{path}: {where.fqn} at {offsets} has shape {tuple(told.shape)}, its index says {expected}"
        )
