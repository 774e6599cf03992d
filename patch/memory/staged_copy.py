"""Copies of whole buffers between a device and pageable host memory, staged through two pinned buffers.

While one staging buffer is copied to or from the device, the host copies the other staging buffer from or
to pageable memory. A driver stages such copies more slowly and blocks the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from patch.memory.offload_device import Copies, Event, OffloadDevice

# Large enough for full speed, and small because nothing overlaps the first and the last part.
_STAGING_BYTES = 32 << 20


class _Part(NamedTuple):
    """A part of one copy that fits into a staging buffer: (n,) uint8 tensors."""

    staging: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor


class StagedCopier:
    """Copies buffers in call order: a copy starts after the previous copy has ended."""

    def __init__(self, device: OffloadDevice) -> None:
        self._device = device
        self._staging = [device.allocate_pinned(_STAGING_BYTES, torch.uint8) for _ in range(2)]
        self._worker = ThreadPoolExecutor(1, "staged-copy", initializer=device.set_device)

    def copy_to_host(self, copies: Copies) -> None:
        """Copy buffers after all work queued on the device; return when the copies have ended."""
        self._worker.submit(lambda: None).result()  # a copy to the device may still use the staging buffers
        queued = self._device.record_event()
        pending: deque[tuple[Event, _Part]] = deque()
        for part in self._split(copies):
            if len(pending) == len(self._staging):
                _copy_out(*pending.popleft())
            pending.append((self._device.copy_to_host([(part.source, part.staging)], queued), part))
        for event, part in pending:
            _copy_out(event, part)

    def copy_to_device(self, copies: Copies) -> Future[None]:
        """Copy in the background; device work that is queued after the future is done sees the copies."""
        return self._worker.submit(self._copy_to_device, copies)

    def _copy_to_device(self, copies: Copies) -> None:
        pending: deque[Event] = deque()
        for part in self._split(copies):
            if len(pending) == len(self._staging):
                pending.popleft().synchronize()
            part.staging.copy_(part.source)
            pending.append(self._device.copy_to_device([(part.staging, part.target)]))
        for event in pending:
            event.synchronize()

    def _split(self, copies: Copies) -> Iterator[_Part]:
        num_parts = 0
        for pair in copies:
            source, target = (tensor.view(torch.uint8) for tensor in pair)
            for begin in range(0, source.numel(), _STAGING_BYTES):
                source_part = source[begin : begin + _STAGING_BYTES]
                staging = self._staging[num_parts % len(self._staging)][: source_part.numel()]
                yield _Part(staging, source_part, target[begin : begin + _STAGING_BYTES])
                num_parts += 1


def _copy_out(event: Event, part: _Part) -> None:
    event.synchronize()
    part.target.copy_(part.staging)
