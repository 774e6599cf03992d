"""Writes and reads a torch_dist checkpoint piece by piece, in one process that never has all of it in memory.

Upstream's writer needs the whole state at once (megatron/core/dist_checkpointing/serialization.py:278). The
format itself does not: a `.distcp` file is a sequence of torch.save records, and the pickled `.metadata`
states where each piece of a tensor is stored (torch/distributed/checkpoint/metadata.py). A tensor may be
tiled in any way; a reader with another layout takes what it needs from each piece.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

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

from patch.checkpoint.records import WINDOW_BYTES, load_record, no_zip_checksums, reading_errors
from patch.compat.torch_checkpoint import StorageInfo
from patch.errors import CheckpointError
from patch.storage.names import COMMON_FILE, METADATA_FILE

_DATA = "__0_0.distcp"


class Piece(NamedTuple):
    """A rectangular part of a stored tensor."""

    key: str
    offsets: tuple[int, ...]
    """The index of its first element in the whole tensor."""
    tensor: torch.Tensor


class PieceWriter:
    """Writes the data file of a checkpoint piece by piece; `finish` adds the other files.

    Args:
        folder: an existing, empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stream = (folder / _DATA).open("wb")
        self._index = Metadata(state_dict_metadata={}, storage_data={})

    def add(self, piece: Piece, shape: tuple[int, ...]) -> None:
        """Append a piece of a tensor. The pieces of one key must tile the tensor and have the same dtype.

        Args:
            piece: the piece.
            shape: the shape of the whole tensor.

        Raises:
            OSError: the file cannot be written.
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
        """Append an opaque object in the format of megatron-core's ShardedObject."""
        self._index.state_dict_metadata[key] = BytesStorageMetadata()
        self._append(MetadataIndex(key), [value])

    def _append(self, index: MetadataIndex, value: Any) -> None:
        begin = self._stream.tell()
        try:
            with no_zip_checksums():
                torch.save(value, self._stream)
        except RuntimeError as error:  # torch's zip writer raises it instead of the stream's OSError
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        self._index.storage_data[index] = StorageInfo(_DATA, begin, self._stream.tell() - begin)

    def finish(self, common: dict[str, Any]) -> None:
        """Close the data file and write the other files of the checkpoint.

        Args:
            common: plain values, stored in common.pt.
        """
        self.close()
        with (self._folder / METADATA_FILE).open("wb") as stream:
            pickle.dump(self._index, stream)
        torch.save(common, self._folder / COMMON_FILE)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))

    def close(self) -> None:
        """Close the data file."""
        self._stream.close()


def read_pieces(folder: Path, index: Metadata, keys: set[str]) -> Iterator[Piece]:
    """Read the stored pieces of these tensors in the files' order, a window of rows at a time.

    A piece is valid until the next one is read, because all of them share one buffer.

    Args:
        folder: the checkpoint.
        index: its parsed `.metadata` (`compat.unpickle.read_metadata`).
        keys: the keys of the tensors to read.

    Raises:
        CheckpointError: a piece cannot be read; the message names the file and the tensor.
    """
    records = [(piece, record) for piece, record in index.storage_data.items() if piece.fqn in keys]
    buffer = np.empty(WINDOW_BYTES, np.uint8)
    for piece, record in sorted(records, key=lambda item: (item[1].relative_path, item[1].offset)):
        path = folder / record.relative_path
        with path.open("rb") as stream, reading_errors(path, piece.fqn, record):
            header = load_record(stream, record, "meta")
            _check(path, piece, header, index.state_dict_metadata[piece.fqn])
            if not header.is_contiguous():
                yield Piece(piece.fqn, tuple(piece.offset or ()), load_record(stream, record))
                continue
            for shift, values in _windows(stream, record, header, buffer):
                offsets = tuple(map(sum, zip(piece.offset or (), shift, strict=True)))
                yield Piece(piece.fqn, offsets, values)


def _windows(
    stream: BufferedReader, record: StorageInfo, header: torch.Tensor, buffer: np.ndarray
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Read a record's rows into the buffer, a window at a time.

    Args:
        stream: the data file.
        record: where the record is in the file.
        header: its tensor on the device `meta`.
        buffer: the window; a larger one is used if a row does not fit.

    Yields:
        The index of the window's first element in the record's tensor, and the window's values.
    """
    *lead, rows, columns = (1, *header.shape) if header.ndim == 1 else header.shape
    storage: Any = header.untyped_storage()
    begin = record.offset + storage._checkpoint_offset + header.storage_offset() * header.element_size()
    if begin + header.nbytes > record.offset + record.length:
        raise EOFError("its values go beyond it")
    row_bytes = columns * header.element_size()
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
            values = torch.from_numpy(window).view(header.dtype)
            if header.ndim == 1:
                yield (0,), values
            else:
                yield (*outer, row, 0), values.view(*[1] * len(lead), count, columns)


def _check(path: Path, piece: MetadataIndex, header: object, stored: object) -> None:
    """Check that a record has the dtype and the shape that the index states.

    Args:
        path: the data file, for messages.
        piece: the piece's key and offsets.
        header: what the record contains, on the device `meta`.
        stored: what the index states about the tensor.
    """
    assert isinstance(stored, TensorStorageMetadata), "objects are not read in pieces"
    offsets = tuple(piece.offset or ())
    expected = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in stored.chunks}.get(offsets)
    if not isinstance(header, torch.Tensor) or header.dtype != stored.properties.dtype:
        actual = getattr(header, "dtype", type(header).__name__)
        raise CheckpointError(f"{path}: {piece.fqn} is {actual}, its index says {stored.properties.dtype}")
    if tuple(header.shape) != expected:
        raise CheckpointError(
            f"{path}: {piece.fqn} at {offsets} has shape {tuple(header.shape)}, its index says {expected}"
        )
