"""Copies of a rank's state in host memory, from which a checkpoint is written while training continues."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial

import torch

from patch.checkpoint.data_files import Value
from patch.device import stream_of, streams_of
from patch.logger import get_logger
from patch.memory.disk import is_on_disk
from patch.memory.offload_device import allocate_pinned

_logger = get_logger(__name__)

_ALIGNMENT = 64
_BLOCK = 2**30
"""Bytes that are pinned at once: the driver calls of the training thread wait meanwhile."""


class HostCopies:
    """Buffers that are reused by all saves, because the first write to new memory is slow.
    They are pinned if states are on a GPU, so that copies run at the full rate of the bus.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

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
        streams, stream = streams_of(device), stream_of(device, "checkpoint")
        number, begin, rest = 0, 0, sum(map(_room, values))
        with streams.stream(stream):
            for index, value in enumerate(values):
                if isinstance(value, io.BytesIO) or is_on_disk(value):
                    continue
                if begin and begin + value.nbytes > self._blocks[number].numel():
                    number, begin = number + 1, 0
                if not begin:
                    size = max(value.nbytes, min(rest, _BLOCK))
                    self._reserve(number, size, is_pinned=device.type == "cuda")
                memory = self._blocks[number][begin : begin + value.nbytes].view(value.dtype)
                values[index] = memory.view(value.shape).copy_(value.detach(), non_blocking=True)
                begin, rest = begin + _room(value), rest - _room(value)
                if value.is_cuda:
                    value.record_stream(stream)  # keeps its memory until the copy is done
            copied = streams.Event()
            copied.record(stream)
        copied.synchronize()
        return values

    def _reserve(self, number: int, num_bytes: int, *, is_pinned: bool) -> None:
        """Allocate a block and drop the later ones, if it does not have this many bytes."""
        if number < len(self._blocks) and self._blocks[number].numel() >= num_bytes:
            return
        del self._blocks[number:]  # frees the old blocks first
        if is_pinned:
            try:
                self._blocks.append(allocate_pinned(num_bytes, torch.uint8))
                return
            except MemoryError as error:
                said = "host copies for checkpoints use unpinned memory and are slower: %s"
                _logger.warning(said, error)
        self._blocks.append(torch.empty(num_bytes, dtype=torch.uint8))


def _room(value: Value) -> int:
    if isinstance(value, io.BytesIO) or is_on_disk(value):
        return 0
    return -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
