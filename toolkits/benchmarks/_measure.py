"""Times and counts what contenders do: in turns, to the end of a device's work, on the slowest rank."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from patch.device import DeviceContext
from toolkits.benchmarks._report import Panel, quartiles, table

COMPUTE, COMMUNICATION = "compute alone", "communication alone"
_NUM_KERNELS, _NAME_LENGTH = 10, 90
Columns = Mapping[str, Callable[[str], str]]
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
    return over_ranks(time_call(call, context).wall, context.device)


def over_ranks(
    value: float, device: torch.device, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX
) -> float:
    """The largest value of all ranks, or what another operation makes of them."""
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=operation)
    return found.item()


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


class Rounds(NamedTuple):
    """What contenders took in each round; some beside compute alone and communication alone."""

    values: Mapping[str, Sequence[float]]
    """Name -> one value a round, which is that of the slowest rank."""
    unit: str = "s"
    digits: int = 3

    @property
    def _bound(self) -> list[float] | None:
        """max(compute, communication) of each round, the time with perfect overlap."""
        if COMMUNICATION not in self.values:
            return None
        return list(map(max, self.values[COMPUTE], self.values[COMMUNICATION]))

    def ratio(self, name: str, other: str) -> float:
        """The value of `name` divided by that of `other`."""
        return ratio(self.values[name], self.values[other])

    def over_bound(self, name: str) -> float:
        """The step time divided by max(compute, communication)."""
        assert self._bound is not None
        return ratio(self.values[name], self._bound)

    def best(self, *prefixes: str) -> str:
        """The fastest contender whose name begins with one of the prefixes."""
        names = [name for name in self.values if name.startswith(prefixes)]
        return min(names, key=lambda name: median(self.values[name]))

    def table(self, title: str, base: str, columns: Columns | None = None) -> str:
        """A row for each contender.

        Args:
            title: the head of the first column.
            base: the contender by which the ratios divide.
            columns: more of them: head -> what gives a contender's cell.
        """
        bound, more = self._bound, columns or {}
        heads = [title, f"median {self.unit}", "quartiles", f"/ {base}"]
        heads += ["/ max(compute, comm.)"] * (bound is not None) + [*more]
        rows = []
        for name, values in self.values.items():
            lower, middle, upper = (f"{value:.{self.digits}f}" for value in quartiles(values))
            cells = [name, middle, f"{lower} - {upper}", f"{self.ratio(name, base):.3f}"]
            if bound is not None:
                is_alone = name in (COMPUTE, COMMUNICATION)
                cells.append("" if is_alone else f"{self.over_bound(name):.3f}")
            rows.append([*cells, *(cell(name) for cell in more.values())])
        return table(heads, rows)

    def panel(self, title: str = "", marks: Mapping[str, float] | None = None) -> Panel:
        """Bars of the contenders, lines of compute and communication alone, and of `marks`."""
        alone = {name: median(self.values[name]) for name in (COMPUTE, COMMUNICATION) if name in self.values}
        bars = {name: found for name, found in self.values.items() if name not in alone}
        return Panel(f"{self.unit} (median, quartiles)", bars, {**alone, **(marks or {})}, title=title)


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


class Kernel(NamedTuple):
    """What a step spends in a kernel, or on a CPU in one of torch's operators."""

    name: str
    calls: int
    ms: float
    share: float
    """Of all kernels' time."""


def dearest_kernels(step: Callable[[], Any], device: torch.device) -> list[Kernel]:
    """The kernels that take most of a step.

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
    times = [event.self_device_time_total if is_cuda else event.self_cpu_time_total for event in found]
    total = sum(times) or 1.0
    kernels = [
        Kernel(event.key[:_NAME_LENGTH], event.count, time / 1e3, time / total)
        for event, time in zip(found, times, strict=True)
    ]
    return sorted(kernels, key=lambda kernel: -kernel.ms)[:_NUM_KERNELS]


def kernel_table(title: str, kernels: Sequence[Sequence[Any]]) -> str:
    """A row for each of `dearest_kernels`, as JSON has them."""
    rows = [(f"`{name}`", f"{ms:.1f}", f"{share:.1%}", calls) for name, calls, ms, share in kernels]
    return f"{title}\n\n{table(('kernel', 'ms', 'share', 'calls'), rows)}"


def time_in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, context: DeviceContext
) -> tuple[dict[str, list[Seconds]], str, Rounds]:
    """All times of calls in this process; which kind of them counts, wall on a GPU or else cpu; and those."""
    times = take_turns({name: partial(time_call, call, context) for name, call in calls.items()}, rounds)
    kind = "wall" if context.is_cuda else "cpu"
    return times, kind, Rounds({name: [getattr(one, kind) for one in own] for name, own in times.items()})
