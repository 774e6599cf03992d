"""The tensors of a stored checkpoint, without a model or a job: names, shapes, types, any part of the values.

A reader does not depend on how the tensors were cut into pieces when they were saved. It needs memory for
what it returns and one window, because it reads the records of torch.save by windows: torch's own
FileSystemReader has a whole stored piece in memory for each part of it that is wanted, and a mapped file ends
the process by a signal, where a read raises an error, when a disk fails or the file is truncated meanwhile.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from patch.checkpoint.sharded_tensors import check_files
from patch.compat.checkpoint_format import StorageInfo, create_file_view
from patch.compat.unpickle import load_plain, load_tensors, read_metadata
from patch.errors import CheckpointError
from patch.storage.names import COMMON_FILE, METADATA_FILE
from patch.storage.places import AnyPath, local_file, open_to_read, read_at
from patch.storage.remote import RemotePath

LEGACY_FILE = "model_optim_rng.pt"
WINDOW_BYTES = 2 * 2**20
"""Bytes read at once. They fit the processor's cache."""
_MAPPED_BYTES = 256 * 2**20
"""After this many bytes a file is mapped again, so that pages that were read leave the memory."""


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


class Piece(NamedTuple):
    """A rectangular part of a stored tensor, with its values."""

    key: str
    offsets: tuple[int, ...]
    """The index of its first element in the whole tensor."""
    tensor: torch.Tensor


class _StoredPiece(NamedTuple):
    """Where a piece of a tensor is stored."""

    box: Box
    place: StorageInfo


class TorchDistReader:
    """Reads a torch_dist checkpoint, ours or another program's.

    Args:
        folder: the checkpoint itself (`iter_*`, `release`).
        index: its parsed `.metadata`, if the caller has read it and has its files checked.

    Raises:
        CheckpointError: the index cannot be read, or a data file is missing or truncated.
    """

    def __init__(self, folder: AnyPath, index: Metadata | None = None) -> None:
        self.folder = folder
        try:
            if index is None:
                index = read_metadata(folder / METADATA_FILE)
                check_files(folder, index)
            self.tensors = {
                key: StoredTensor(tuple(stored.size), stored.properties.dtype)
                for key, stored in index.state_dict_metadata.items()
                if isinstance(stored, TensorStorageMetadata)
            }
            self.objects = sorted(set(index.state_dict_metadata) - set(self.tensors))
            self._places = {
                (where.fqn, tuple(where.offset or ())): place for where, place in index.storage_data.items()
            }
            self._stored = _stored_pieces(folder, index, self._places)
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / METADATA_FILE} is no index of tensors: {error}") from error
        self._records: dict[tuple[str, int], _Record] = {}
        """Records of the tensor that was read last, by file and offset."""
        self._last_key: str | None = None
        self._buffer = np.empty(WINDOW_BYTES, np.uint8)
        self._remote: tuple[RemotePath, IO[bytes]] | None = None

    def common(self) -> dict[str, Any]:
        """The plain values of common.pt; objects of a program's own classes are empty stand-ins.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return _load_dict(self.folder / COMMON_FILE)

    def boxes(self, key: str) -> list[Box]:
        """The pieces in which a tensor is stored, in the order of the files."""
        return [stored.box for stored in sorted(self._stored.get(key, ()), key=_position)]

    def read(self, key: str, box: Box) -> torch.Tensor:
        """A copy of a part of a tensor, from all pieces that have values of it.

        Raises:
            CheckpointError: a piece cannot be read, or the pieces do not cover the part.
        """
        values = torch.empty(box.sizes, dtype=self.tensors[key].dtype)
        self.fill([(key, box, values)])
        return values

    def fill(self, targets: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Read parts of tensors into others, in the order of the files.

        Args:
            targets: the stored tensor, the part of it, and where its values go, converted to that type. What
                lies outside of the stored tensor stays as it is.

        Raises:
            CheckpointError: see `read`.
        """
        parts = []
        for key, box, target in targets:
            stored = [
                (piece, common)
                for piece in self._stored.get(key, ())
                if (common := intersection(box, piece.box))
            ]
            shape = self.tensors[key].shape
            wanted = intersection(box, Box((0,) * len(shape), shape))
            if wanted and math.prod(wanted.sizes) > sum(math.prod(common.sizes) for _, common in stored):
                raise CheckpointError(f"{self.folder}: the pieces of {key} do not cover it at {box.offsets}")
            parts += [
                (piece, key, common, target[_slices(_relative(common, box), common.sizes)])
                for piece, common in stored
            ]
        for piece, key, common, target in sorted(parts, key=lambda part: _position(part[0])):
            self._read_part(key, piece, common, target)

    def read_object(self, key: str) -> Any:
        """The value of an opaque object, which holds nothing but tensors and plain values.

        Raises:
            CheckpointError: it cannot be read, or it holds something else.
        """
        place = self._places[key, ()]
        path = self.folder / place.relative_path
        with _reading_errors(path, key, place), self._opened(path) as stream:
            (value,) = _load_record(stream, place)
            return value

    def pieces(self, keys: set[str]) -> Iterator[Piece]:
        """All values of these tensors in the order of the files, a window of neighbouring rows at a time.

        A piece is valid until the next one is read, because all of them share one buffer.

        Raises:
            CheckpointError: values cannot be read; the message names the file and the tensor.
        """
        buffer = torch.empty(WINDOW_BYTES, dtype=torch.uint8)
        stored_pieces = [(key, stored) for key in keys for stored in self._stored.get(key, ())]
        for key, stored in sorted(stored_pieces, key=lambda item: _position(item[1])):
            dtype = self.tensors[key].dtype
            for window in windows(stored.box, WINDOW_BYTES // dtype.itemsize):
                values = buffer[: math.prod(window.sizes) * dtype.itemsize].view(dtype).view(window.sizes)
                self._read_part(key, stored, window, values)
                yield Piece(key, window.offsets, values)

    def _read_part(self, key: str, stored: _StoredPiece, part: Box, target: torch.Tensor) -> None:
        """Read a part of a stored piece."""
        path, place = self.folder / stored.place.relative_path, stored.place
        if key != self._last_key:
            self._records, self._last_key = {}, key
        with _reading_errors(path, key, place), self._opened(path) as stream:
            position = _position(stored)
            if position not in self._records:
                dtype = self.tensors[key].dtype
                self._records[position] = _read_header(stream, place, stored.box.sizes, dtype)
            offsets = _relative(part, stored.box)
            _read_region(stream, self._records[position], offsets, target, self._buffer)

    @contextmanager
    def _opened(self, path: AnyPath) -> Iterator[IO[bytes]]:
        """A file; that of a store stays open until another one is read, with what was read ahead of it."""
        if isinstance(path, Path):
            with open_to_read(path) as stream:
                yield stream
            return
        if self._remote is None or self._remote[0] != path:
            self._remote = path, open_to_read(path)
        yield self._remote[1]


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
        for path in self._files():
            contents, values = _load_rank(path)
            self._values |= values
            self._common = {key: value for key, value in contents.items() if isinstance(value, int | float)}
        self.tensors = {
            key: StoredTensor(tuple(values.shape), values.dtype) for key, values in self._values.items()
        }

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"mp_rank_*/{LEGACY_FILE}"))

    def common(self) -> dict[str, Any]:
        """The numbers that the files hold beside the tensors."""
        return self._common

    def boxes(self, key: str) -> list[Box]:
        """The whole tensor."""
        shape = self.tensors[key].shape
        return [Box((0,) * len(shape), shape)]

    def read(self, key: str, box: Box) -> torch.Tensor:
        """A part of a tensor, mapped from its file."""
        return self._values[key][_slices(*box)]

    def pieces(self, keys: set[str]) -> Iterator[Piece]:
        """All values of these tensors, one after the other; a piece is valid until the next one is read."""
        for path in self._files():
            values, num_bytes = {}, _MAPPED_BYTES
            of_rank = [key for key in self._values if key.startswith(f"{path.parent.name}.")]
            for key in filter(keys.__contains__, of_rank):
                if num_bytes >= _MAPPED_BYTES:
                    values, num_bytes = _load_rank(path)[1], 0
                num_bytes += values[key].nbytes
                yield Piece(key, (0,) * values[key].ndim, values[key])


Reader = TorchDistReader | LegacyReader


def is_legacy_checkpoint(folder: AnyPath) -> bool:
    """Whether this folder itself holds a checkpoint in Megatron-LM's old format."""
    return any(folder.glob("mp_rank_*"))


def open_stored(folder: AnyPath) -> Reader:
    """The reader of a checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    if not is_legacy_checkpoint(folder):
        return TorchDistReader(folder)
    if isinstance(folder, RemotePath):
        raise CheckpointError(f"{folder} has Megatron-LM's old format (mp_rank_*): copy it to a disk first")
    return LegacyReader(folder)


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


def _stored_pieces(
    folder: AnyPath, index: Metadata, places: dict[tuple[str, tuple[int, ...]], StorageInfo]
) -> dict[str, list[_StoredPiece]]:
    """Where the pieces of each tensor are, by the places of all records by key and first element.

    Raises:
        CheckpointError: the index names no file for a piece.
        AttributeError, TypeError, ValueError: it is no index.
    """
    pieces: dict[str, list[_StoredPiece]] = {}
    for key, stored in index.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        for chunk in stored.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            ends = map(sum, zip(*box, strict=True))
            if not all(0 <= o <= end <= n for o, end, n in zip(box.offsets, ends, stored.size, strict=True)):
                raise ValueError(
                    f"{key} of shape {tuple(stored.size)} has a piece {box.sizes} at {box.offsets}"
                )
            place = places.get((key, box.offsets))
            if place is None:
                raise CheckpointError(f"{folder / METADATA_FILE} names no file for {key} at {box.offsets}")
            pieces.setdefault(key, []).append(_StoredPiece(box, place))
    return pieces


def _position(stored: _StoredPiece) -> tuple[str, int]:
    """The file and the offset of a piece."""
    return stored.place.relative_path, stored.place.offset


def _relative(part: Box, whole: Box) -> list[int]:
    """The offsets of a part within a box that contains it."""
    return [begin - origin for begin, origin in zip(part.offsets, whole.offsets, strict=True)]


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))


def _load_dict(path: AnyPath) -> dict[str, Any]:
    try:
        with local_file(path) as file:
            contents = load_tensors(file)
    except Exception as error:  # noqa: BLE001 - hostile bytes can make the unpickler raise anything
        raise CheckpointError(f"{path} cannot be read: {error or type(error).__name__}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} holds a {type(contents).__name__}, expected a dict")
    return contents


def _load_rank(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The contents of a rank's file in the old format, and all its tensors, mapped, by their names in it."""
    contents = _load_dict(path)
    try:
        return contents, dict(_nested_tensors(contents, path.parent.name, set()))
    except RecursionError as error:
        raise CheckpointError(f"{path} cannot be read: its values are nested too deeply") from error


def _nested_tensors(values: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in nested dicts and lists, with the names on the way to them.

    Args:
        values: a tensor, a container, or something else, which is ignored.
        prefix: the name of `values`.
        seen: ids of containers whose tensors are known. A hostile file may hold one in itself, or so often
            that they would never end.
    """
    if isinstance(values, torch.Tensor):
        yield prefix, values
    elif isinstance(values, dict | list | tuple) and id(values) not in seen:
        seen.add(id(values))
        items = values.items() if isinstance(values, dict) else enumerate(values)
        for name, value in items:
            yield from _nested_tensors(value, f"{prefix}.{name}", seen)


class _Record(NamedTuple):
    """A stored tensor whose values are read when they are wanted."""

    tensor: torch.Tensor
    """On the device `meta`: its shape and dtype. On the CPU, with its values, if these are not in order."""
    begin: int | None
    """The file offset of its values; None if they are not in the order of its elements."""


def _read_header(stream: IO[bytes], place: StorageInfo, shape: Sequence[int], dtype: torch.dtype) -> _Record:
    """A record's tensor without its values, unless they were stored with strides, which ours never are.

    That the device `meta` reads no values is true since torch 2.11 (pytorch pull request 170619). Place,
    shape and dtype are those of the index.

    Raises:
        OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError: the record is damaged, or it is
            another one.
    """
    header = _load_record(stream, place, "meta")
    if not isinstance(header, torch.Tensor):
        raise ValueError(f"it is a {type(header).__name__}, its index says {dtype}")
    if (header.dtype, tuple(header.shape)) != (dtype, tuple(shape)):
        found, expected = tuple(header.shape), tuple(shape)
        raise ValueError(f"it is {header.dtype} of shape {found}, its index says {dtype} of shape {expected}")
    storage: Any = header.untyped_storage()
    first = storage._checkpoint_offset  # None in torch.save's format before 1.6
    if first is None or not header.is_contiguous():
        return _Record(_load_record(stream, place, "cpu"), None)
    begin = place.offset + first + header.storage_offset() * header.element_size()
    if begin + header.nbytes > place.offset + place.length:
        raise EOFError("its values go beyond it")
    return _Record(header, begin)


def _load_record(stream: IO[bytes], place: StorageInfo, device: str | None = None) -> Any:
    view = create_file_view(cast(io.IOBase, stream), place.offset, place.length)
    return load_plain(cast(IO[bytes], view), device)


def _read_region(
    stream: IO[bytes],
    record: _Record,
    offsets: Sequence[int],
    target: torch.Tensor,
    buffer: np.ndarray,
) -> None:
    """Read a rectangular part of a stored tensor; the values are converted to the target's dtype.

    Neighbouring rows are read at once, as many as fit the buffer: numbers, or slices of more dimensions.

    Args:
        stream: the data file.
        record: of `_read_header`.
        offsets: the part's first element.
        target: has the part's shape; on any device.
        buffer: (n,) uint8, the window.

    Raises:
        OSError, EOFError: the file cannot be read.
    """
    header, begin = record
    size = header.element_size()
    if begin is None:
        target.copy_(header[_slices(offsets, target.shape)])
        return
    if not header.ndim:  # a single number
        header, target, offsets = header.view(1), target.view(1), (0,)
    limit = buffer.nbytes // size
    axis = next(axis for axis in range(header.ndim) if header.shape[axis + 1 :].numel() <= limit)
    row = header.shape[axis + 1 :].numel()
    step = max(1, limit // row)
    for leading in itertools.product(*map(range, target.shape[:axis])):
        for first in range(0, target.shape[axis], step):
            part = target[leading][first : first + step]
            place = [offset + index for offset, index in zip(offsets, (*leading, first), strict=False)]
            start = begin + int(np.ravel_multi_index(place, header.shape[: axis + 1])) * row * size
            is_whole_rows = part.shape[1:].numel() == row
            if is_whole_rows and part.is_contiguous() and part.is_cpu and part.dtype == header.dtype:
                memory = part.as_strided((part.numel(),), (1,)).view(torch.uint8).numpy()
                _read_fully(stream, start, memory)
                continue
            memory = buffer[: len(part) * row * size]
            _read_fully(stream, start, memory)
            values = torch.from_numpy(memory).view(header.dtype).view(len(part), *header.shape[axis + 1 :])
            part.copy_(values[_slices((0, *offsets[axis + 1 :]), part.shape)])


@contextmanager
def _reading_errors(path: AnyPath, name: str, place: StorageInfo) -> Iterator[None]:
    """Turn errors of the block into a CheckpointError that names the file and the tensor."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path}: {name} (bytes {place.offset} to {place.offset + place.length}) cannot be read: "
            f"{error or type(error).__name__}"
        ) from error


def _read_fully(stream: IO[bytes], begin: int, memory: np.ndarray) -> None:
    view = memory.data
    while len(view):
        count = read_at(stream, view, begin)
        if not count:
            raise EOFError("the file ends before its values do")
        view, begin = view[count:], begin + count
