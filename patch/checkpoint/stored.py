"""The tensors of a stored checkpoint, without a model or a job: names, shapes, types, any part of the values.

A reader does not depend on how the tensors were cut into pieces when they were saved. It maps the files, and
gives back the memory after every 64 MiB.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from patch.checkpoint.compatibility import check_files
from patch.compat.torch_checkpoint import StorageInfo, create_file_view
from patch.compat.unpickle import load_plain, load_tensors, read_metadata
from patch.errors import CheckpointError
from patch.storage.names import COMMON_FILE, METADATA_FILE

_BYTES_AT_ONCE = 64 * 2**20
"""After so many bytes, the mapped pages that were read are given back."""
LEGACY_FILE = "model_optim_rng.pt"


class StoredTensor(NamedTuple):
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Piece(NamedTuple):
    box: Box
    record: StorageInfo


class TorchDistReader:
    """Reads a torch_dist checkpoint, ours or another program's.

    Args:
        folder: the checkpoint itself (`iter_*`, `release`).

    Raises:
        CheckpointError: the index cannot be read, or a data file is missing or truncated.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = read_metadata(folder / METADATA_FILE)
        check_files(folder, index)
        self.tensors = {
            key: StoredTensor(tuple(stored.size), stored.properties.dtype)
            for key, stored in index.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.objects = sorted(set(index.state_dict_metadata) - set(self.tensors))
        self._pieces = _pieces(folder, index)
        self._maps: dict[str, mmap.mmap] = {}
        self._begins: dict[tuple[str, int], int | None] = {}
        """Place of a record in the files -> place of its first value; None: its values are not contiguous."""
        self._num_read = 0

    def common(self) -> dict[str, Any]:
        """The plain values of common.pt; objects of a program's own classes are empty stand-ins.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return _load_dict(self.folder / COMMON_FILE)

    def boxes(self, key: str) -> list[Box]:
        """The pieces in which a tensor is stored, in the order of the files."""
        pieces = sorted(self._pieces.get(key, ()), key=lambda p: (p.record.relative_path, p.record.offset))
        return [piece.box for piece in pieces]

    def read(self, key: str, box: Box) -> torch.Tensor:
        """A copy of a part of a tensor, from all pieces that have values of it.

        Raises:
            CheckpointError: a piece cannot be read, or the pieces do not cover the part.
        """
        values = torch.empty(box.sizes, dtype=self.tensors[key].dtype)
        missing = values.numel()
        for piece in self._pieces.get(key, ()):
            common = intersection(box, piece.box)
            if common is not None:
                stored = self._values(key, piece)
                values[_slices(common, box)] = stored[_slices(common, piece.box)]
                missing -= math.prod(common.sizes)
        if missing > 0:
            raise CheckpointError(f"{self.folder}: the pieces of {key} do not cover it at {box.offsets}")
        self._give_back(values.nbytes)
        return values

    def _values(self, key: str, piece: _Piece) -> torch.Tensor:
        """The values of a piece, mapped from its file."""
        path, record = self.folder / piece.record.relative_path, piece.record
        try:
            place = (record.relative_path, record.offset)
            if place not in self._begins:
                self._begins[place] = self._find_begin(path, key, piece)
            begin = self._begins[place]
            if begin is None:
                return self._load(path, record, "cpu")
            return self._mapped(path, begin, piece.box.sizes, self.tensors[key].dtype)
        except Exception as error:  # noqa: BLE001 - hostile bytes can make the unpickler raise anything
            raise CheckpointError(
                f"{path}: {key} (bytes {record.offset} to {record.offset + record.length}) cannot be read: "
                f"{error or type(error).__name__}"
            ) from error

    def _find_begin(self, path: Path, key: str, piece: _Piece) -> int | None:
        header, record = self._load(path, piece.record, "meta"), piece.record
        expected = piece.box.sizes, self.tensors[key].dtype
        if not isinstance(header, torch.Tensor) or (tuple(header.shape), header.dtype) != expected:
            raise ValueError("it is another tensor than the index says")
        if not header.is_contiguous():
            return None
        storage: Any = header.untyped_storage()
        begin = record.offset + storage._checkpoint_offset + header.storage_offset() * header.element_size()
        if begin + header.nbytes > record.offset + record.length:
            raise EOFError("its values go beyond it")
        return begin

    def _load(self, path: Path, record: StorageInfo, device: str) -> Any:
        """A record's tensor. On the device `meta` no values are read, but its storage has their place."""
        with path.open("rb") as stream:
            return load_plain(cast(IO[bytes], create_file_view(stream, record.offset, record.length)), device)

    def _mapped(self, path: Path, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        if path.name not in self._maps:
            with path.open("rb") as stream:  # a private copy, because torch warns of read-only memory
                self._maps[path.name] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        values = np.frombuffer(self._maps[path.name], np.uint8, num_bytes, begin)
        return torch.from_numpy(values).view(dtype).view(shape)

    def _give_back(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        if self._num_read > _BYTES_AT_ONCE:
            self._num_read = 0
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)


class LegacyReader:
    """Reads a checkpoint in Megatron-LM's old format: one pickle for each rank, with the rank's own tensors.

    Args:
        folder: the folder with `mp_rank_*`. A tensor's name begins with that of its rank.

    Raises:
        CheckpointError: a file cannot be read.
    """

    objects: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._values: dict[str, torch.Tensor] = {}
        self._common: dict[str, Any] = {}
        for path in sorted(folder.glob(f"mp_rank_*/{LEGACY_FILE}")):
            contents = _load_dict(path)
            self._values |= dict(_nested_tensors(contents, path.parent.name))
            self._common = {key: value for key, value in contents.items() if isinstance(value, int | float)}
        self.tensors = {
            key: StoredTensor(tuple(values.shape), values.dtype) for key, values in self._values.items()
        }

    def common(self) -> dict[str, Any]:
        """The numbers that the files hold beside the tensors."""
        return self._common

    def boxes(self, key: str) -> list[Box]:
        """The whole tensor."""
        shape = self.tensors[key].shape
        return [Box((0,) * len(shape), shape)]

    def read(self, key: str, box: Box) -> torch.Tensor:
        """A part of a tensor, mapped from its file."""
        return self._values[key][_slices(box, Box((0,) * len(box.offsets), ()))]


Reader = TorchDistReader | LegacyReader


def is_legacy_checkpoint(folder: Path) -> bool:
    """Whether this folder itself holds a checkpoint in Megatron-LM's old format."""
    return any(folder.glob("mp_rank_*"))


def open_stored(folder: Path) -> Reader:
    """The reader of a checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    return LegacyReader(folder) if is_legacy_checkpoint(folder) else TorchDistReader(folder)


def intersection(one: Box, other: Box) -> Box | None:
    """The common part of two boxes with the same number of dimensions; None if it is empty."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = [
        min(begin + size, other_begin + other_size)
        for begin, size, other_begin, other_size in zip(*one, *other, strict=True)
    ]
    sizes = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def windows(box: Box, num_elements: int) -> Iterator[Box]:
    """Cut a box into smaller ones of at most so many elements, in the order of memory."""
    if math.prod(box.sizes) <= num_elements:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.sizes) if size > 1)
    inner = math.prod(box.sizes[axis + 1 :])
    step = max(1, num_elements // inner)
    for begin in range(0, box.sizes[axis], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += begin
        sizes[axis] = min(step, box.sizes[axis] - begin)
        yield from windows(Box(tuple(offsets), tuple(sizes)), num_elements)


def _pieces(folder: Path, index: Metadata) -> dict[str, list[_Piece]]:
    """The pieces of each tensor.

    Raises:
        CheckpointError: the index names no file for a piece.
    """
    pieces: dict[str, list[_Piece]] = {}
    records: dict[tuple[str, tuple[int, ...]], StorageInfo] = {
        (where.fqn, tuple(where.offset or ())): record for where, record in index.storage_data.items()
    }
    for key, stored in index.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        for chunk in stored.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            record = records.get((key, box.offsets))
            if record is None:
                raise CheckpointError(f"{folder / METADATA_FILE} names no file for {key} at {box.offsets}")
            pieces.setdefault(key, []).append(_Piece(box, record))
    return pieces


def _slices(part: Box, whole: Box) -> tuple[slice, ...]:
    """The place of a part within a box that contains it."""
    return tuple(
        slice(begin - origin, begin - origin + size)
        for begin, origin, size in zip(part.offsets, whole.offsets, part.sizes, strict=True)
    )


def _load_dict(path: Path) -> dict[str, Any]:
    try:
        contents = load_tensors(path)
    except Exception as error:  # noqa: BLE001 - hostile bytes can make the unpickler raise anything
        raise CheckpointError(f"{path} cannot be read: {error or type(error).__name__}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} holds a {type(contents).__name__}, expected a dict")
    return contents


def _nested_tensors(values: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in nested dicts and lists, with the names on the way to them."""
    if isinstance(values, torch.Tensor):
        yield prefix, values
    elif isinstance(values, dict | list | tuple):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        for name, value in items:
            yield from _nested_tensors(value, f"{prefix}.{name}")
