"""Copies of whole buffers between a device and pageable host memory, staged through two pinned buffers.

While one staging buffer is being copied to or from the device, the host copies the other one from or to
pageable memory. Without them the driver would stage such copies itself, slower, and block the host for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from patch.memory.offload_device import Copies, Event, OffloadDevice

# Bytes: long enough for full speed, short enough for the first and the last part, which nothing overlaps.
_STAGING_BYTES = 32 << 20


class _Part(NamedTuple):
    """As many bytes of one copy as a staging buffer holds; (n,) uint8 each."""

    staging: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor


class StagedCopier:
    """Copies buffers in the order of the calls: a call begins when the one before has ended."""

    def __init__(self, device: OffloadDevice) -> None:
        self._device = device
        self._staging = [device.allocate_pinned(_STAGING_BYTES, torch.uint8) for _ in range(2)]
        self._worker = ThreadPoolExecutor(1, "staged-copy", initializer=device.set_device)

    def copy_to_host(self, copies: Copies) -> None:
        """Copy what the device holds when all work queued there has run; returns when the copies are done."""
        self._worker.submit(lambda: None).result()  # a copy to the device uses the staging buffers until then
        queued = self._device.record_event()
        under_way: deque[tuple[Event, _Part]] = deque()
        for part in self._cut(copies):
            if len(under_way) == len(self._staging):
                _copy_out(*under_way.popleft())
            under_way.append((self._device.copy_to_host([(part.source, part.staging)], queued), part))
        for event, part in under_way:
            _copy_out(event, part)

    def copy_to_device(self, copies: Copies) -> Future[None]:
        """Copy in the background.

        Returns:
            done when the device holds the copies; work queued on the device after that sees them.
        """
        return self._worker.submit(self._copy_to_device, copies)

    def _copy_to_device(self, copies: Copies) -> None:
        under_way: deque[Event] = deque()
        for part in self._cut(copies):
            if len(under_way) == len(self._staging):
                under_way.popleft().synchronize()
            part.staging.copy_(part.source)
            under_way.append(self._device.copy_to_device([(part.staging, part.target)]))
        for event in under_way:
            event.synchronize()

    def _cut(self, copies: Copies) -> Iterator[_Part]:
        """Cut copies in parts, which take the staging buffers in turn."""
        number = 0
        for pair in copies:
            source, target = (tensor.view(torch.uint8) for tensor in pair)
            for begin in range(0, source.numel(), _STAGING_BYTES):
                cut = source[begin : begin + _STAGING_BYTES]
                staging = self._staging[number % len(self._staging)][: cut.numel()]
                yield _Part(staging, cut, target[begin : begin + _STAGING_BYTES])
                number += 1


def _copy_out(event: Event, part: _Part) -> None:
    event.synchronize()
    part.target.copy_(part.staging)
