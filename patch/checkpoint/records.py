"""The records of a data file: one tensor each, as torch.save writes it, and parts of it read by windows.

Reading needs no memory but a small buffer, however large a record is and whatever part of it is wanted.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import IOBase
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch

from patch.compat.torch_checkpoint import StorageInfo, create_file_view
from patch.compat.unpickle import load_plain
from patch.errors import CheckpointError
from patch.storage.checksums import SummedFile
from patch.storage.places import AnyPath, read_at

WINDOW_BYTES = 2 * 2**20
"""Bytes read at once, unless one element row is larger. They fit the processor's cache."""

_crc32_lock = threading.Lock()
_crc32_users = 0


@contextmanager
def no_zip_checksums() -> Iterator[None]:
    """Make torch.save skip its CRC-32, which takes as long as writing and which torch.load never checks.

    It is a setting of the process: while any thread is in this context, no thread computes them.
    """
    global _crc32_users
    with _crc32_lock:
        _crc32_users += 1
        torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        with _crc32_lock:
            _crc32_users -= 1
            if not _crc32_users:
                torch.serialization.set_crc32_options(True)


def write_record(stream: SummedFile, value: Any) -> tuple[int, int]:
    """Append a record; its offset and length in bytes.

    Args:
        stream: the data file.
        value: a tensor, or an opaque object in the format of megatron-core's ShardedObject.

    Raises:
        OSError: the file cannot be written.
    """
    begin = stream.tell()
    try:
        with no_zip_checksums():
            torch.save(_alone(value) if isinstance(value, torch.Tensor) else value, cast(IO[bytes], stream))
    except RuntimeError:  # torch's zip writer raises it instead of the stream's error
        if stream.error is not None:
            raise stream.error from None
        raise
    return begin, stream.tell() - begin


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU tensor with a storage of its own size, which is all that torch.save writes.

    A view of a larger CPU storage is not copied.
    """
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.numel():
        return tensor.clone()
    values = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return values.view(tensor.dtype).view(tensor.shape)


class Record(NamedTuple):
    """A stored tensor whose values are read when they are wanted."""

    tensor: torch.Tensor
    """On the device `meta`: its shape and dtype. On the CPU, with its values, if these are not in order."""
    begin: int | None
    """The file offset of its values; None if they are not in the order of its elements."""


def read_header(stream: IO[bytes], place: StorageInfo, shape: Sequence[int], dtype: torch.dtype) -> Record:
    """A record's tensor without its values, unless they were stored with strides, which ours never are.

    That the device `meta` reads no values is true since torch 2.11 (pytorch pull request 170619).

    Args:
        stream: the data file.
        place: where the record is, by the index.
        shape: of its tensor, by the index.
        dtype: of its tensor, by the index.

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
        return Record(_load_record(stream, place, "cpu"), None)
    begin = place.offset + first + header.storage_offset() * header.element_size()
    if begin + header.nbytes > place.offset + place.length:
        raise EOFError("its values go beyond it")
    return Record(header, begin)


def _load_record(stream: IO[bytes], place: StorageInfo, device: str) -> Any:
    view = create_file_view(cast(IOBase, stream), place.offset, place.length)
    return load_plain(cast(IO[bytes], view), device)


def read_region(
    stream: IO[bytes],
    record: Record,
    offsets: Sequence[int],
    target: torch.Tensor,
    buffer: np.ndarray,
) -> None:
    """Read a rectangular part of a stored tensor; the values are converted to the target's dtype.

    Args:
        stream: the data file.
        record: of `read_header`.
        offsets: the part's first element.
        target: has the part's shape; on any device.
        buffer: (n,) uint8, the window; a larger one is used if a row does not fit.

    Raises:
        OSError, EOFError: the file cannot be read.
    """
    header, begin = record
    size = header.element_size()
    if not target.numel():
        return
    if begin is None:
        target.copy_(_narrowed(header, offsets, target.shape))
        return
    if not header.ndim:  # a single number
        header, target, offsets = header.view(1), target.view(1), (0,)
    for window in cut_windows(tuple(header.shape), offsets, target.shape, buffer.nbytes // size):
        num_bytes = window.rows * window.row * size
        part = target[window.prefix][window.first : window.first + window.rows]
        is_whole_rows = part.shape[1:].numel() == window.row
        if is_whole_rows and part.is_contiguous() and part.is_cpu and part.dtype == header.dtype:
            memory = part.as_strided((part.numel(),), (1,)).view(torch.uint8).numpy()
            _read_fully(stream, begin + window.start * size, memory)
            continue
        if num_bytes > buffer.nbytes:
            buffer = np.empty(num_bytes, np.uint8)
        _read_fully(stream, begin + window.start * size, buffer[:num_bytes])
        values = torch.from_numpy(buffer[:num_bytes]).view(header.dtype)
        values = values.view(window.rows, *header.shape[len(window.prefix) + 1 :])
        part.copy_(_narrowed(values, (0, *window.inner_offsets), part.shape))


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for axis, (offset, length) in enumerate(zip(offsets, shape, strict=True)):
        tensor = tensor.narrow(axis, offset, length)
    return tensor


@contextmanager
def reading_errors(path: AnyPath, name: str, place: StorageInfo) -> Iterator[None]:
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


class Window(NamedTuple):
    """Neighbouring rows of a stored tensor, read at once."""

    prefix: tuple[int, ...]
    """The rows' index in the leading axes of the target."""
    first: int
    """The first row's index in the target, on the axis after the prefix."""
    rows: int
    row: int
    """Elements of one stored row."""
    start: int
    """Index of the first element among the stored ones."""
    inner_offsets: tuple[int, ...]
    """What of each row is wanted: its first element on the axes after that of the rows."""


def cut_windows(
    shape: tuple[int, ...], offsets: Sequence[int], lengths: Sequence[int], limit: int
) -> Iterator[Window]:
    """Cut a rectangular part of a row-major tensor into windows of whole rows.

    Args:
        shape: of the stored tensor.
        offsets: of the part.
        lengths: of the part.
        limit: elements of a window.

    Yields:
        windows that cover the part, in the order of the elements.
    """
    row = math.prod(shape[1:])
    if row <= limit or len(shape) == 1:
        step = max(1, limit // max(1, row))
        for first in range(0, lengths[0], step):
            rows = min(step, lengths[0] - first)
            yield Window((), first, rows, row, (offsets[0] + first) * row, tuple(offsets[1:]))
        return
    for index in range(lengths[0]):
        for window in cut_windows(shape[1:], offsets[1:], lengths[1:], limit):
            start = (offsets[0] + index) * row + window.start
            yield window._replace(prefix=(index, *window.prefix), start=start)


def _read_fully(stream: IO[bytes], begin: int, memory: np.ndarray) -> None:
    view = memory.data
    while len(view):
        count = read_at(stream, view, begin)
        if not count:
            raise EOFError("the file ends before its values do")
        view, begin = view[count:], begin + count
