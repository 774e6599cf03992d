"""Times a stretch of device work without stopping the device."""

from __future__ import annotations

import time

import torch


class DeviceClock:
    """CUDA events on a GPU, the host's clock on the CPU (whose operations are synchronous)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list = []

    def start(self) -> None:
        """Mark the beginning."""
        self._marks = [self._mark()]

    def stop(self) -> None:
        """Mark the end."""
        self._marks.append(self._mark())

    def elapsed_ms(self) -> float:
        """Milliseconds between the marks; on CUDA waits for the end to be reached."""
        begin, end = self._marks
        if not self._cuda:
            return (end - begin) * 1e3
        end.synchronize()
        return begin.elapsed_time(end)

    def _mark(self) -> torch.cuda.Event | float:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
