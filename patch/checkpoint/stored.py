"""Reads a stored checkpoint without a model or a job: names, shapes, dtypes, and any part of a tensor.

A reader does not depend on how tensors were sharded when they were saved. Files on disk are mapped, so a
reader needs memory for its results and one window. torch's FileSystemReader holds a whole stored piece for
each part that is read. From a store, the pieces of one tensor are read whole. If a mapped file is truncated
during a read, SIGBUS ends the process; lengths are checked first.
"""

from __future__ import annotations

import io
import math
import mmap
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
from patch.storage.names import COMMON_FILE, COMMON_KEY, METADATA_FILE
from patch.storage.places import AnyPath, check_kind, open_to_read
from patch.storage.remote import RemotePath
from patch.storage.text_files import read_small

LEGACY_FILE = "model_optim_rng.pt"
WINDOW_BYTES = 2 * 2**20
"""Bytes copied at a time; they fit the processor's cache."""
_MOST_MAPPED = 64
"""Most files mapped at a time; each keeps a file open."""
MOST_COMMON_BYTES = 1 << 30
_MAPPED_BYTES = 256 * 2**20
"""A file of the old format is mapped again after this many bytes, to release its pages."""
_KEPT_BYTES = 16 * 2**20
"""The pages of mapped files are released after this many bytes."""


class StoredTensor(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Piece(NamedTuple):
    """A rectangular part of a stored tensor, with its values."""

    key: str
    offsets: tuple[int, ...]
    """The index of the first element in the whole tensor."""
    tensor: torch.Tensor


class _StoredPiece(NamedTuple):
    key: str
    box: Box
    place: StorageInfo


class TorchDistReader:
    """Reads a torch_dist checkpoint of this project or another program.

    Args:
        folder: the checkpoint itself (`iter_*`, `release`).
        index: its parsed `.metadata`, if the caller has read it and checks the files.
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
            self.objects = sorted(set(index.state_dict_metadata) - set(self.tensors) - {COMMON_KEY})
            self._places = {
                (where.fqn, tuple(where.offset or ())): place for where, place in index.storage_data.items()
            }
            self._stored = _stored_pieces(folder, index, self._places)
        except (AttributeError, TypeError, ValueError) as error:
            what = f"cannot be read as a checkpoint index: {error}; take another checkpoint"
            raise CheckpointError(f"{folder / METADATA_FILE} {what}") from error
        self._records: dict[tuple[str, int], np.ndarray] = {}
        """The bytes of the pieces of the last read tensor, by file and offset."""
        self._last_key: str | None = None
        self._mapped: dict[Path, mmap.mmap] = {}
        self._num_bytes = 0
        """Bytes read since pages were released."""

    def common(self) -> dict[str, Any]:
        """Return the plain values beside the tensors; objects of other classes become empty stand-ins.

        Raises:
            CheckpointError: the values cannot be read.
        """
        place = None if (self.folder / COMMON_FILE).is_file() else self._places.get((COMMON_KEY, ()))
        return _load_dict(self.folder / (place.relative_path if place else COMMON_FILE), place)

    def boxes(self, key: str) -> list[Box]:
        """Return the boxes of a tensor's stored pieces, in the order of the files."""
        return [stored.box for stored in sorted(self._stored.get(key, ()), key=_position)]

    def read(self, key: str, box: Box) -> torch.Tensor:
        """Return a copy of a part of a tensor, from all pieces that overlap it.

        Raises:
            CheckpointError: a piece cannot be read, or the pieces do not cover the part.
        """
        values = torch.empty(box.sizes, dtype=self.tensors[key].dtype)
        self.fill([(key, box, values)])
        return values

    def fill(self, targets: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Read parts of stored tensors into target tensors, in the order of the files; errors as in `read`.

        Args:
            targets: key, part and target tensor. Values are converted to the target's dtype. Elements outside
                of the stored tensor are not changed.
        """
        parts = []
        for key, box, target in targets:
            pieces = self._stored.get(key, ())
            stored = [(piece, common) for piece in pieces if (common := intersection(box, piece.box))]
            shape = self.tensors[key].shape
            wanted = intersection(box, Box((0,) * len(shape), shape))
            if wanted and math.prod(wanted.sizes) > sum(math.prod(common.sizes) for _, common in stored):
                raise CheckpointError(f"{self.folder}: the pieces of {key} do not cover it at {box.offsets}")
            parts += [(piece, common, target[_slices(common, box.offsets)]) for piece, common in stored]
        for piece, part, target in sorted(parts, key=lambda each: _position(each[0])):
            for window, values in self._values(piece, part):
                target[_slices(window, part.offsets)].copy_(values)

    def read_object(self, key: str) -> Any:
        """Return the value of an opaque object.

        Raises:
            CheckpointError: it cannot be read, or holds anything but tensors and plain values.
        """
        place = self._places[key, ()]
        path = self.folder / place.relative_path
        with _reading_errors(path, key, place):
            (value,) = _load_record(path, place)
            return value

    def pieces(self, keys: set[str]) -> Iterator[Piece]:
        """Yield all values of these tensors in the order of the files, one window of adjacent rows at a time.

        Raises:
            CheckpointError: values cannot be read; the message names the file and the tensor.
        """
        stored = [piece for key in keys for piece in self._stored.get(key, ())]
        for piece in sorted(stored, key=_position):
            for window, values in self._values(piece, piece.box):
                yield Piece(piece.key, window.offsets, values)

    def _values(self, piece: _StoredPiece, part: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the windows of a part of a stored piece, each with a copy of its values."""
        (key, box, place), dtype = piece, self.tensors[piece.key].dtype
        path, position = self.folder / place.relative_path, _position(piece)
        for window in windows(part, WINDOW_BYTES // dtype.itemsize):
            if key != self._last_key:
                self._records, self._last_key = {}, key
            if position not in self._records:
                with _reading_errors(path, key, place):
                    self._records[position] = self._record(path, piece, dtype)
            copied = np.array(self._records[position][_slices(window, box.offsets)])
            self._num_bytes += copied.nbytes
            if self._num_bytes > _KEPT_BYTES:
                self._num_bytes = 0
                for mapped in self._mapped.values():
                    mapped.madvise(mmap.MADV_DONTNEED)
            yield window, torch.from_numpy(copied).view(-1).view(dtype).view(window.sizes)

    def _record(self, path: AnyPath, stored: _StoredPiece, dtype: torch.dtype) -> np.ndarray:
        """Return a stored piece as bytes [*shape, itemsize], mapped if the file is on disk.
        The device `meta` reads no values since torch 2.11 (pytorch pull request 170619).
        """
        _, box, place = stored
        found = _load_record(path, place, "meta" if isinstance(path, Path) else "cpu")
        if not isinstance(found, torch.Tensor):
            raise ValueError(f"it is a {type(found).__name__}, its index says {dtype}")
        if (found.dtype, tuple(found.shape)) != (dtype, box.sizes):
            says = f"its index says {dtype} of shape {box.sizes}"
            raise ValueError(f"it is {found.dtype} of shape {tuple(found.shape)}, {says}")
        shape = (*box.sizes, dtype.itemsize)
        if isinstance(path, Path):
            storage: Any = found.untyped_storage()
            first = storage._checkpoint_offset  # None in torch.save's format before 1.6
            if first is not None and found.is_contiguous():
                begin = place.offset + first + found.storage_offset() * dtype.itemsize
                if begin + found.nbytes > place.offset + place.length:
                    raise EOFError("its values go beyond it")
                return np.ndarray(shape, np.uint8, self._map(path), begin)
            found = _load_record(path, place, "cpu")
        return found.contiguous().view(-1).view(torch.uint8).numpy().reshape(shape)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._mapped:
            if len(self._mapped) == _MOST_MAPPED:
                self._records.clear()
                self._mapped.clear()
            with open_to_read(path) as stream:
                self._mapped[path] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._mapped[path]


class LegacyReader:
    """Reads a checkpoint in Megatron-LM's old format: one pickle for each rank, with the rank's own tensors.

    Args:
        folder: the folder with `mp_rank_*`. A tensor's name begins with the name of its rank's folder.
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
        """Return the numbers that the files hold beside the tensors."""
        return self._common

    def boxes(self, key: str) -> list[Box]:
        """Return one box: the whole tensor."""
        shape = self.tensors[key].shape
        return [Box((0,) * len(shape), shape)]

    def read(self, key: str, box: Box) -> torch.Tensor:
        """Return a part of a tensor, mapped from its file."""
        return self._values[key][_slices(box, (0,) * len(box.offsets))]

    def pieces(self, keys: set[str]) -> Iterator[Piece]:
        """Yield these tensors whole; a piece is valid until the next piece is read."""
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
    """Return whether this folder itself holds a checkpoint in Megatron-LM's old format."""
    return any(folder.glob("mp_rank_*"))


def open_stored(folder: AnyPath) -> Reader:
    """Return the reader of a checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    if not is_legacy_checkpoint(folder):
        return TorchDistReader(folder)
    if isinstance(folder, RemotePath):
        raise CheckpointError(f"{folder} has Megatron-LM's old format (mp_rank_*): copy it to a disk first")
    return LegacyReader(folder)


def intersection(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes with equal numbers of dimensions, or None if it is empty."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = [
        min(begin + size, other_begin + other_size)
        for begin, size, other_begin, other_size in zip(*one, *other, strict=True)
    ]
    sizes = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def windows(box: Box, num_elements: int) -> Iterator[Box]:
    """Divide a box into boxes of at most `num_elements` elements, in the order of memory."""
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
    """Return where each tensor's pieces are; `places` is by key and offsets. A piece without a file raises
    CheckpointError; a malformed index raises AttributeError, TypeError or ValueError.
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
            pieces.setdefault(key, []).append(_StoredPiece(key, box, place))
    return pieces


def _position(stored: _StoredPiece) -> tuple[str, int]:
    return stored.place.relative_path, stored.place.offset


def _slices(part: Box, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return where a part is in a tensor whose first element has the index `origin`."""
    places = zip(part.offsets, part.sizes, origin, strict=True)
    return tuple(slice(begin - first, begin - first + size) for begin, size, first in places)


def _load_dict(path: AnyPath, place: StorageInfo | None = None) -> dict[str, Any]:
    """Return the dict of a file, or of one record in it, a list with the dict as its only value."""
    try:
        if place is not None:
            if place.length > MOST_COMMON_BYTES:
                raise ValueError(f"got {place.length} bytes, expected at most {MOST_COMMON_BYTES}")
            with _record(path, place) as stream:
                (contents,) = load_tensors(io.BytesIO(stream.read()))
        elif isinstance(path, Path):
            check_kind(path)
            contents = load_tensors(path)
        else:
            contents = load_tensors(io.BytesIO(read_small(path, MOST_COMMON_BYTES)))
    except Exception as error:  # noqa: BLE001 - hostile bytes can make the unpickler raise anything
        raise CheckpointError(f"{path} cannot be read: {error or type(error).__name__}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} holds a {type(contents).__name__}, expected a dict")
    return contents


def _load_rank(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the contents of a rank's file in the old format, and its mapped tensors by nested name."""
    contents = _load_dict(path)
    try:
        return contents, dict(_nested_tensors(contents, path.parent.name, set()))
    except RecursionError as error:
        raise CheckpointError(f"{path} cannot be read: its values are nested too deeply") from error


def _nested_tensors(values: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors in nested dicts and lists, by nested name. `seen` has the ids of visited containers:
    a hostile file may nest a container in itself, or repeat it endlessly.
    """
    if isinstance(values, torch.Tensor):
        yield prefix, values
    elif isinstance(values, dict | list | tuple) and id(values) not in seen:
        seen.add(id(values))
        items = values.items() if isinstance(values, dict) else enumerate(values)
        for name, value in items:
            yield from _nested_tensors(value, f"{prefix}.{name}", seen)


def _load_record(path: AnyPath, place: StorageInfo, device: str | None = None) -> Any:
    with _record(path, place) as stream:
        return load_plain(stream, device)


@contextmanager
def _record(path: AnyPath, place: StorageInfo) -> Iterator[IO[bytes]]:
    if isinstance(path, RemotePath):
        yield io.BytesIO(path.read_bytes(place.offset, place.offset + place.length))
        return
    with open_to_read(path) as stream:
        yield cast(IO[bytes], create_file_view(stream, place.offset, place.length))


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
