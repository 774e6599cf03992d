"""Writes a torch_dist checkpoint piece by piece, in one process that never has all of it in memory.

Upstream's writer needs the whole state at once (megatron/core/dist_checkpointing/serialization.py:278). The
format itself does not: a `.distcp` file is a sequence of torch.save records, and the pickled `.metadata`
states where each piece of a tensor is stored (torch/distributed/checkpoint/metadata.py). A tensor may be
tiled in any way; a reader with another layout takes what it needs from each piece.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from patch.checkpoint.data_files import write_record
from patch.checkpoint.manifest import write_manifest
from patch.checkpoint.stored import Piece
from patch.compat.checkpoint_format import StorageInfo, common_files
from patch.storage.checksums import SummedFile, write_summed
from patch.storage.names import METADATA_FILE

_DATA = "__0_0.distcp"


class PieceWriter:
    """Writes the data file of a checkpoint piece by piece; `finish` adds the other files.

    Args:
        folder: an existing, empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stream = SummedFile(folder / _DATA)
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
        begin, length = write_record(self._stream, value)
        self._index.storage_data[index] = StorageInfo(_DATA, begin, length)

    def finish(self, common: dict[str, Any]) -> None:
        """Finish the data file and write the other files of the checkpoint; the checksums last.

        Args:
            common: plain values, stored in common.pt.
        """
        contents = {_DATA: self._stream.finish()}
        small_files = {METADATA_FILE: pickle.dumps(self._index), **common_files(common)}
        contents |= {name: write_summed(self._folder / name, data) for name, data in small_files.items()}
        write_manifest(self._folder, 0, contents)

    def close(self) -> None:
        """Close the data file."""
        self._stream.close()
