"""Writes data files: one rank's files with a few threads, or a whole checkpoint piece by piece.

Writing piece by piece, in one process, needs little memory. Upstream's writer needs the whole state at once
(megatron/core/dist_checkpointing/serialization.py:278). The format does not: a `.distcp` file is a sequence
of torch.save records, and the pickled `.metadata` states where each piece of a tensor is stored
(torch/distributed/checkpoint/metadata.py). A tensor may be tiled in any way.
"""

from __future__ import annotations

import heapq
import io
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.serialization import config as serialization_config

from patch.checkpoint.manifest import write_manifest
from patch.checkpoint.stored import Piece
from patch.compat.checkpoint_format import COMMON_IS_OBJECT, StorageInfo, common_files
from patch.device import device_setter
from patch.memory.disk import on_host
from patch.storage.checksums import Checksum, SummedFile, write_summed
from patch.storage.names import COMMON_KEY, METADATA_FILE
from patch.storage.places import AnyPath

NUM_FILES = 2
"""Files per rank, written at the same time."""

Value = torch.Tensor | io.BytesIO


class WrittenFiles(NamedTuple):
    """The data files of a rank."""

    places: np.ndarray
    """(n, 3) int64: file number, offset and length in bytes of each value, in the order of the values."""
    contents: dict[str, Checksum]
    """Length and checksum by file name."""


def data_file(rank: int, number: int) -> str:
    """Return the name of a data file."""
    return f"__{rank}_{number}.distcp"


def write_data(
    folder: AnyPath,
    rank: int,
    values: Sequence[Value],
    cancelled: threading.Event,
    files: list[SummedFile],
) -> WrittenFiles:
    """Write a rank's values and sync the files to the disk.

    Args:
        cancelled: if it is set, writing stops before the next value.
        files: each file is appended when it is created, so that other threads can read the progress.
    Raises:
        OSError: a file cannot be written.
        CancelledError: `cancelled` was set.
    """
    shares = _split(values)
    places = np.zeros((len(values), 3), np.int64)

    def write(number: int) -> tuple[str, Checksum]:
        name = data_file(rank, number)
        with closing(SummedFile(folder / name)) as file:
            files.append(file)
            for index in shares[number]:
                if cancelled.is_set():
                    raise CancelledError
                value = values[index]
                if isinstance(value, io.BytesIO):
                    begin = file.tell()
                    # Not getbuffer: after an error its memory may be freed twice (python/cpython#111049).
                    places[index] = (number, begin, file.write(value.getvalue()))
                else:
                    places[index] = (number, *write_record(file, value))
            return name, file.finish()

    with ThreadPoolExecutor(NUM_FILES, initializer=device_setter()) as pool:
        return WrittenFiles(places, dict(pool.map(write, range(len(shares)))))


def write_record(stream: SummedFile, value: Any) -> tuple[int, int]:
    """Append a record, and return its offset and length in bytes.

    Args:
        value: a tensor, or an opaque object in the format of megatron-core's ShardedObject.
    Raises:
        OSError: the file cannot be written.
    """
    begin = stream.tell()
    try:
        # Without CRC-32, which takes as long as writing and is never checked by torch.load.
        with serialization_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            torch.save(
                _with_own_storage(value) if isinstance(value, torch.Tensor) else value,
                cast(IO[bytes], stream),
            )
    except RuntimeError:  # torch's zip writer raises it instead of the stream's error
        if stream.error is not None:
            raise stream.error from None
        raise
    return begin, stream.tell() - begin


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU tensor with a storage of its size, because torch.save writes whole storages.
    A tensor on disk is read only now, to bound memory. A view of a larger CPU storage is not copied.
    """
    tensor = on_host(tensor.detach()).contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.numel():
        return tensor.clone()
    values = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return values.view(tensor.dtype).view(tensor.shape)


def _split(values: Sequence[Value]) -> list[list[int]]:
    """Return the value indices of each file; the files have similar lengths and none is empty."""
    files: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(NUM_FILES)]
    for index in sorted(range(len(values)), key=lambda index: -_num_bytes(values[index])):
        size, number, share = heapq.heappop(files)
        share.append(index)
        heapq.heappush(files, (size + _num_bytes(values[index]), number, share))
    return [share for _, _, share in sorted(files, key=lambda file: file[1]) if share]


def _num_bytes(value: Value) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else len(value.getvalue())


class PieceWriter:
    """Writes a checkpoint piece by piece into an existing, empty folder; `finish` adds the other files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stream = SummedFile(folder / data_file(0, 0))
        self._index = Metadata(state_dict_metadata={}, storage_data={})

    def add(self, piece: Piece, shape: tuple[int, ...]) -> None:
        """Append a piece of a tensor of this shape; a key's pieces tile the tensor and have one dtype.

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
        begin, length = write_record(self._stream, value)
        self._index.storage_data[index] = StorageInfo(data_file(0, 0), begin, length)

    def finish(self, common: dict[str, Any]) -> None:
        """Finish the data file and write the other files; the checksums last."""
        if COMMON_IS_OBJECT:
            self.add_object(COMMON_KEY, common)
        contents = {data_file(0, 0): self._stream.finish()}
        small_files = {METADATA_FILE: pickle.dumps(self._index), **common_files(common)}
        contents |= {name: write_summed(self._folder / name, data) for name, data in small_files.items()}
        write_manifest(self._folder, 0, contents)

    def close(self) -> None:
        """Close the data file."""
        self._stream.close()
