"""Copies of a rank's state in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch

from patch.checkpoint.data_files import Value
from patch.logger import get_logger
from patch.memory.pinned import allocate_pinned

_logger = get_logger(__name__)

_ALIGNMENT = 64


class HostCopies:
    """One buffer that is kept from save to save, because memory that is new to a process is slow.

    It is pinned where states are on a GPU, so that copies have the full rate of the bus.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, values: Sequence[Value]) -> list[Value]:
        """Copies of the values; they are complete on return, and valid until the next call.

        Args:
            values: tensors on the host or a GPU, and opaque objects, which are returned as they are.

        Raises:
            MemoryError, RuntimeError: the system has not enough memory.
        """
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._reserve(sum(map(_room, tensors)), any(tensor.is_cuda for tensor in tensors))
        copies: list[Value] = []
        end = 0
        gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
        streams = {gpu: torch.cuda.Stream(gpu) for gpu in gpus}
        for gpu, stream in streams.items():
            stream.wait_stream(torch.cuda.current_stream(gpu))
        for value in values:
            if isinstance(value, io.BytesIO):
                copies.append(value)
                continue
            begin, end = end, end + _room(value)
            copy = self._buffer[begin : begin + value.nbytes].view(value.dtype).view(value.shape)
            with torch.cuda.stream(streams.get(value.device)):
                copies.append(copy.copy_(value.detach(), non_blocking=True))
        for stream in streams.values():
            stream.synchronize()
        return copies

    def _reserve(self, num_bytes: int, is_pinned: bool) -> None:
        if self._buffer.numel() >= num_bytes:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # not both at once
        if is_pinned:
            try:
                self._buffer = allocate_pinned(num_bytes, torch.uint8)
                return
            except MemoryError as error:
                _logger.warning("copies for checkpoints are not pinned, and so slower: %s", error)
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8)


def _room(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's place in the buffer."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
