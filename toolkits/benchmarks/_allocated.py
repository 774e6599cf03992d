"""How much memory torch's allocator gives out at once, on a GPU or on a CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """The most bytes at once of those that `run` asks for; on a GPU it runs twice, the first time unmeasured.

    Args:
        run: what is measured.
        device: where it allocates.
    """
    if device.type == "cuda":
        run()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    allocated = peak = 0
    for num_bytes in _allocations(recorded):
        allocated += num_bytes
        peak = max(peak, allocated)
    return peak


def _allocations(recorded: profile) -> list[int]:
    """Bytes of each allocation, and less than 0 of each that ended, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_bytes())["traceEvents"]
    found = [event for event in events if event["name"] == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(found, key=lambda event: event["ts"])]
