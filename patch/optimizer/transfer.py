"""Whole buffers between a device and pageable host memory, through two pinned pieces of fixed size.

While one piece is on its way, the host copies the other from or to its place. Without them the driver
would stage the copies of pageable memory itself, more slowly, and the host would wait for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from patch.optimizer.accelerator import Accelerator, Copies, Mark

# Bytes: long enough for full speed, short enough for the first and the last, which nothing hides.
_PIECE = 32 << 20


class Transfer:
    """Carries buffers, those of one call at a time: a call begins when the one before has ended."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pieces = [accelerator.pinned(_PIECE, torch.uint8) for _ in range(2)]
        self._worker = ThreadPoolExecutor(1, "transfer", initializer=accelerator.enter)

    def to_host(self, copies: Copies) -> None:
        """Copy what the device holds when all that is queued there has run; the host waits for it."""
        self._worker.submit(lambda: None).result()  # what goes up has the pieces until it is there
        now = self._accelerator.mark()
        under_way: deque[tuple[Mark, torch.Tensor, torch.Tensor]] = deque()
        for piece, source, target in self._cut(copies):
            if len(under_way) == len(self._pieces):
                _land(*under_way.popleft())
            under_way.append((self._accelerator.to_host([(source, piece)], now), piece, target))
        for arrival in under_way:
            _land(*arrival)

    def to_device(self, copies: Copies) -> Future[None]:
        """Copy beside everything else; what is queued on the device after the end sees the copies."""
        return self._worker.submit(self._lift, copies)

    def _lift(self, copies: Copies) -> None:
        under_way: deque[Mark] = deque()
        for piece, source, target in self._cut(copies):
            if len(under_way) == len(self._pieces):
                under_way.popleft().synchronize()
            under_way.append(self._accelerator.to_device([(piece.copy_(source), target)]))
        for mark in under_way:
            mark.synchronize()

    def _cut(self, copies: Copies) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """A pinned piece, in turn, and as many bytes of a source and its target."""
        number = 0
        for whole in copies:
            source, target = (tensor.view(torch.uint8) for tensor in whole)
            for begin in range(0, source.numel(), _PIECE):
                part = source[begin : begin + _PIECE]
                piece = self._pieces[number % len(self._pieces)][: part.numel()]
                yield piece, part, target[begin : begin + _PIECE]
                number += 1


def _land(mark: Mark, piece: torch.Tensor, target: torch.Tensor) -> None:
    mark.synchronize()
    target.copy_(piece)
