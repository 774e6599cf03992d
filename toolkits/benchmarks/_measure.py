"""Times and counts what contenders do: in turns, to the end of a device's work, on the slowest rank."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from patch.device import DeviceContext
from toolkits.benchmarks._report import Panel, quartiles, spread, table

COMPUTE, COMMUNICATION = "compute alone", "communication alone"
_NUM_KERNELS, _NAME_LENGTH = 10, 90
T = TypeVar("T")


class Seconds(NamedTuple):
    """Seconds of one call."""

    wall: float
    cpu: float
    """Processor time of this process, which has one thread; 0 on a GPU. Other work on the machine changes it
    little."""


def now(device: torch.device) -> float:
    """The time in seconds, after waiting for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_call(call: Callable[[], Any], context: DeviceContext) -> Seconds:
    """The time of a call, to the end of its work on the device."""
    begin, cpu = now(context.device), time.process_time()
    call()
    wall = now(context.device) - begin
    return Seconds(wall, 0.0 if context.is_cuda else time.process_time() - cpu)


def time_on_ranks(call: Callable[[], Any], context: DeviceContext) -> float:
    """Seconds of a call that all ranks begin together, on the slowest of them."""
    dist.barrier()
    return slowest(time_call(call, context).wall, context.device)


def slowest(seconds: float, device: torch.device) -> float:
    """The most seconds of all ranks."""
    most = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


def take_turns(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each contender returned in each round; rounds differ in their order, ranks do not."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for index in range(rounds):
        names = list(contenders)
        Random(index).shuffle(names)
        for name in names:
            found[name].append(contenders[name]())
    return found


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round: other work on the machine hits neighbours alike."""
    return median(this / that for this, that in zip(these, those, strict=True))


class Overlaps:
    """Rounds of contenders beside compute alone and communication alone.

    Args:
        seconds: name -> seconds of a step in each round, on the slowest rank.
    """

    def __init__(self, seconds: Mapping[str, Sequence[float]]) -> None:
        self.seconds = seconds
        self._bound = list(map(max, seconds[COMPUTE], seconds[COMMUNICATION]))

    def ratio(self, name: str, other: str) -> float:
        """The step time of `name` divided by the step time of `other`."""
        return ratio(self.seconds[name], self.seconds[other])

    def over_bound(self, name: str) -> float:
        """The step time divided by max(compute, communication), the time with perfect overlap."""
        return ratio(self.seconds[name], self._bound)

    def best(self, prefix: str, besides: str = "") -> str:
        """The fastest contender whose name begins with `prefix`."""
        names = [name for name in self.seconds if name.startswith(prefix) and name != besides]
        return min(names, key=lambda name: median(self.seconds[name]))

    def table(self, title: str, rival: str) -> str:
        """A row for each contender, the fastest first; `rival`: whose time the last column divides by."""
        rows = []
        for name in sorted(self.seconds, key=lambda name: median(self.seconds[name])):
            alone = name in (COMPUTE, COMMUNICATION)
            ratios = ("", "") if alone else (self.over_bound(name), self.ratio(name, rival))
            rows.append([name, *spread(self.seconds[name]), *(one and f"{one:.3f}" for one in ratios)])
        return table((title, "median s", "quartiles", "/ max(compute, comm.)", f"/ {rival}"), rows)

    def panel(self, title: str) -> Panel:
        """Bars of the contenders, lines of compute and communication alone."""
        alone = {name: quartiles(self.seconds[name])[1] for name in (COMPUTE, COMMUNICATION)}
        bars = {name: found for name, found in self.seconds.items() if name not in alone}
        return Panel("seconds a step (median, quartiles)", bars, alone, title=title)


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


def dearest_kernels(step: Callable[[], Any], device: torch.device) -> list[tuple[str, int, float, float]]:
    """The kernels that take most of a step, with calls, milliseconds, and their share of all kernels' time.

    On a CPU they are torch's operators.

    Args:
        step: what is profiled, once.
        device: where it runs.
    """
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        step()
        now(device)
    kind = DeviceType.CUDA if is_cuda else DeviceType.CPU
    found = [event for event in profiler.key_averages() if event.device_type == kind]
    times = {
        event.key: event.self_device_time_total if is_cuda else event.self_cpu_time_total for event in found
    }
    total = sum(times.values()) or 1.0
    found.sort(key=lambda event: -times[event.key])
    return [
        (event.key[:_NAME_LENGTH], event.count, times[event.key] / 1e3, times[event.key] / total)
        for event in found[:_NUM_KERNELS]
    ]
