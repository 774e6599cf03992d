"""Copies of a rank's state in host memory, from which a checkpoint is written while training continues."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial

import torch

from patch.checkpoint.data_files import Value
from patch.device import stream_of, streams_of
from patch.logger import get_logger
from patch.memory import is_on_disk
from patch.memory.offload_device import allocate_pinned

_logger = get_logger(__name__)

_ALIGNMENT = 64


class HostCopies:
    """A buffer that is reused by all saves, because the first write to new memory is slow.
    It is pinned if states are on a GPU, so that copies run at the full rate of the bus.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def prepare(self, values: list[Value]) -> Callable[[], list[Value]]:
        """Return a function that copies the values in any thread, after the work now queued on their GPU.

        The function returns the list when the copies are complete. They are valid until the next copy. It
        raises MemoryError or RuntimeError if host memory is too small.

        Args:
            values: tensors on the host or one GPU. Opaque objects and tensors on disk are not copied. Each
                tensor in this list is replaced by its copy, which frees a tensor that only the list holds.
        """
        gpus = {value.device for value in values if isinstance(value, torch.Tensor) and value.is_cuda}
        assert len(gpus) < 2, "a rank has one GPU"
        device = gpus.pop() if gpus else torch.device("cpu")
        stream_of(device, "checkpoint").wait_stream(streams_of(device).current_stream(device))
        return partial(self._copy, values, device)

    def _copy(self, values: list[Value], device: torch.device) -> list[Value]:
        end, streams, stream = 0, streams_of(device), stream_of(device, "checkpoint")
        with streams.stream(stream):
            self._reserve(sum(map(_room, values)), is_pinned=device.type == "cuda")
            for index, value in enumerate(values):
                if isinstance(value, io.BytesIO) or is_on_disk(value):
                    continue
                begin, end = end, end + _room(value)
                copy = self._buffer[begin : begin + value.nbytes].view(value.dtype).view(value.shape)
                values[index] = copy.copy_(value.detach(), non_blocking=True)
                if value.is_cuda:
                    value.record_stream(stream)  # keeps its memory until the copy is done
            copied = streams.Event()
            copied.record(stream)
        copied.synchronize()
        return values

    def _reserve(self, num_bytes: int, *, is_pinned: bool) -> None:
        if self._buffer.numel() >= num_bytes:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old buffer first
        if is_pinned:
            try:
                self._buffer = allocate_pinned(num_bytes, torch.uint8)
                return
            except MemoryError as error:
                said = "host copies for checkpoints use unpinned memory and are slower: %s"
                _logger.warning(said, error)
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)


def _room(value: Value) -> int:
    if isinstance(value, io.BytesIO) or is_on_disk(value):
        return 0
    return -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
