"""The data files of one rank, written by a few threads, each with the checksum of what went into it."""

from __future__ import annotations

import heapq
import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch

from patch.device import start_thread
from patch.storage.checksums import Content, SummedFile
from patch.storage.places import AnyPath, retried

NUM_FILES = 2
"""Files of each rank, which are written at the same time."""

Value = torch.Tensor | io.BytesIO

_crc32_lock = threading.Lock()
_crc32_users = 0


class Written(NamedTuple):
    """What a rank has written."""

    places: np.ndarray
    """(n, 3) int64: the file's number, and the offset and length in bytes of each value, in their order."""
    contents: dict[str, Content]
    """Length and checksum of each file, by name."""


class CancelledError(Exception):
    """The writing was given up."""


def data_file(rank: int, number: int) -> str:
    """The name of a data file."""
    return f"__{rank}_{number}.distcp"


def write_data(
    folder: AnyPath,
    rank: int,
    values: Sequence[Value],
    cancelled: threading.Event,
    files: list[SummedFile],
) -> Written:
    """Write a rank's values and make them durable; a file that a store refuses is written again for a while.

    Args:
        folder: the checkpoint's folder.
        rank: of this process.
        values: tensors and opaque objects.
        cancelled: once it is set, the writing is given up before the next value.
        files: each file is added when it is created, so that other threads can see how far it is.

    Raises:
        OSError: a file cannot be written.
        CancelledError: `cancelled` was set.
    """
    shares = _split(values)
    places = np.zeros((len(values), 3), np.int64)
    contents: dict[str, Content] = {}
    errors: list[Exception] = []

    def write(number: int) -> None:
        name = data_file(rank, number)
        try:
            path = folder / name
            attempt = partial(_write_file, path, number, values, shares[number], places, cancelled, files)
            contents[name] = retried(path, attempt, cancelled)
        except Exception as error:  # noqa: BLE001 - raised below, in the thread that called
            errors.append(error)

    others = [
        start_thread("checkpoint file", partial(write, number), daemon=False)
        for number in range(1, len(shares))
    ]
    if shares:
        write(0)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return Written(places, contents)


def _write_file(
    path: AnyPath,
    number: int,
    values: Sequence[Value],
    share: list[int],
    places: np.ndarray,
    cancelled: threading.Event,
    files: list[SummedFile],
) -> Content:
    file = SummedFile(path)
    files.append(file)
    try:
        for index in share:
            if cancelled.is_set():
                raise CancelledError
            value = values[index]
            if isinstance(value, io.BytesIO):
                begin = file.tell()
                places[index] = (number, begin, file.write(value.getbuffer()))
            else:
                places[index] = (number, *write_record(file, value))
        return file.finish()
    finally:
        file.close()


@contextmanager
def _no_zip_checksums() -> Iterator[None]:
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
        with _no_zip_checksums():
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


def _split(values: Sequence[Value]) -> list[list[int]]:
    """The values of each file by index, so that the files are about equally long; none is empty."""
    files: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(NUM_FILES)]
    for index in sorted(range(len(values)), key=lambda index: -_num_bytes(values[index])):
        size, number, share = heapq.heappop(files)
        share.append(index)
        heapq.heappush(files, (size + _num_bytes(values[index]), number, share))
    return [share for _, _, share in sorted(files, key=lambda file: file[1]) if share]


def _num_bytes(value: Value) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else value.getbuffer().nbytes
