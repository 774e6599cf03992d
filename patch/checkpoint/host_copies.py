"""Copies of a rank's state in host memory, from which a checkpoint is written while training goes on."""

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
    """One buffer that is kept from save to save, because memory that is new to a process is slow.

    It is pinned where states are on a GPU, so that copies have the full rate of the bus.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def prepare(self, values: list[Value]) -> Callable[[], list[Value]]:
        """Prepare to copy values as all work that is queued on their GPU by now leaves them.

        Args:
            values: tensors on the host or one GPU; opaque objects and tensors on a disk, which are not
                copied. The function replaces each tensor by its copy, so that one that only this list holds
                is freed at once.

        Returns:
            a function that copies, in any thread, and returns the list; the copies are complete then, and
            valid until the next one is called. It raises MemoryError or RuntimeError if the system has not
            enough memory.
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
                    value.record_stream(stream)  # its memory is free when the copy is done, not before
            copied = streams.Event()
            copied.record(stream)
        copied.synchronize()
        return values

    def _reserve(self, num_bytes: int, *, is_pinned: bool) -> None:
        if self._buffer.numel() >= num_bytes:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # not both at once
        if is_pinned:
            try:
                self._buffer = allocate_pinned(num_bytes, torch.uint8)
                return
            except MemoryError as error:
                _logger.warning("copies for checkpoints are not pinned, and so slower: %s", error)
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)


def _room(value: Value) -> int:
    """Bytes of a value's place in the buffer."""
    if isinstance(value, io.BytesIO) or is_on_disk(value):
        return 0
    return -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
