"""Measure contenders: in turns, with GPU synchronization, on the slowest rank, in separate processes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes
from torch.profiler import ProfilerActivity, profile

from patch import compat
from patch.device import DeviceContext, MachineFacts
from patch.distributed.groups import shutdown
from toolkits.benchmarks._report import NotRunError, Rounds
from toolkits.benchmarks._rig import INTERFACE, enter

CPU = DeviceContext(torch.device("cpu"), "gloo")
T = TypeVar("T")


class Seconds(NamedTuple):
    """Seconds of a call."""

    wall: float
    cpu: float
    """Processor time of this single-threaded process, nearly independent of other work; 0 on a GPU."""


def now(device: torch.device) -> float:
    """Return the time in seconds after a GPU synchronization."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_call(call: Callable[[], Any], context: DeviceContext) -> Seconds:
    """Return the time of a call, including its work on the device."""
    begin, cpu = now(context.device), time.process_time()
    call()
    wall = now(context.device) - begin
    return Seconds(wall, 0.0 if context.is_cuda else time.process_time() - cpu)


def take_turns(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return each contender's results by round. The order differs between rounds, but not between ranks."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for index in range(rounds):
        names = list(contenders)
        Random(index).shuffle(names)
        for name in names:
            found[name].append(contenders[name]())
    return found


def time_in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, context: DeviceContext
) -> tuple[dict[str, list[Seconds]], str, Rounds]:
    """Time calls in this process; return all times, the kind that counts, and the rounds of that kind.

    The kind is "wall" on a GPU and "cpu" otherwise.
    """
    times = take_turns({name: partial(time_call, call, context) for name, call in calls.items()}, rounds)
    kind = "wall" if context.is_cuda else "cpu"
    return times, kind, Rounds({name: [getattr(one, kind) for one in own] for name, own in times.items()})


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """Return the peak of bytes that `run` allocates. On a GPU it runs twice, first without measuring."""
    if device.type == "cuda":
        run()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [one for one in recorded.profiler.kineto_results.events() if one.name() == "[memory]"]
    ordered = sorted(events, key=lambda one: one.start_ns())
    return max(accumulate((one.nbytes() for one in ordered), initial=0))


def dearest_kernels(step: Callable[[], Any], device: torch.device) -> str:
    """Return torch's table of the ten kernels (on a CPU: operators) that take most of a step's time."""
    kind = "CUDA" if device.type == "cuda" else "CPU"
    with profile(activities=[getattr(ProfilerActivity, kind)]) as profiler:
        step()
        now(device)
    order = "self_device_time_total" if kind == "CUDA" else "self_cpu_time_total"
    found = profiler.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=90)
    return f"```text\n{found}```\n"


def needs_gpu() -> MachineFacts:
    """Return this machine.

    Raises:
        NotRunError: this machine has no GPU.
    """
    machine = MachineFacts.probe()
    if not machine.cuda_devices:
        raise NotRunError("needs a GPU, found none")
    return machine


def run_ranks(
    measure: Callable[..., Any],
    num_ranks: int,
    timeout_s: float,
    *,
    namespaces: list[str] | None = None,
    on_gpu: bool = False,
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    **fields: Any,
) -> Any:
    """Run each rank of a benchmark in its own process; return the result of rank 0.

    Args:
        measure: a module-level function, called with the rank's device and `fields`. Its result is JSON.
        namespaces: network namespaces of `connected`, one per rank. Each rank is then bound to one core.
        on_gpu: whether the only rank has a GPU.
        threads: threads per process. A rank on a GPU has torch's default.
        environment: environment of the processes, or None for the environment of this process.
        fields: arguments of `measure`.
    Raises:
        ProcessRaisedException: a rank failed; contains its message.
        ProcessExitedException: a rank was killed.
        TimeoutError: not all ranks ended in time.
    """
    own = dict(environment or os.environ, PYTHONWARNINGS="ignore")
    if namespaces is not None:
        own |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    deadline = time.monotonic() + timeout_s
    with TemporaryDirectory() as folder:
        work = (measure, folder, num_ranks, namespaces, on_gpu, threads, fields)
        with mock.patch.dict(os.environ, own, clear=True):
            ranks = start_processes(_run_as_rank, work, num_ranks, join=False, start_method="spawn")
        assert ranks is not None
        try:
            while not ranks.join(1.0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{measure.__name__}: the ranks did not end within {timeout_s:.0f} s")
        finally:
            for process in ranks.processes:
                process.kill()
        return json.loads((Path(folder) / "output.json").read_text(encoding="utf-8"))


def _run_as_rank(rank: int, *work: Any) -> None:
    measure, folder, world_size, namespaces, on_gpu, threads, fields = work
    if namespaces is not None:
        enter(namespaces[rank])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    context = DeviceContext.select(rank) if on_gpu else CPU
    if not on_gpu:
        torch.set_num_threads(threads)
    compat.apply(cuda=context.is_cuda)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(context.backend, store=store, rank=rank, world_size=world_size)
    measured = measure(context, **fields)
    if rank == 0:
        Path(folder, "output.json").write_text(json.dumps(measured), encoding="utf-8")
    dist.barrier()  # no rank leaves earlier
    shutdown()


def try_on_gpu(measure: Callable[..., Any], timeout_s: float, **options: Any) -> Any:
    """Call `run_ranks` with one rank, on a GPU; return None, and print a line to stderr, if it failed."""
    try:
        return run_ranks(measure, 1, timeout_s, on_gpu=True, **options)
    except (ProcessRaisedException, ProcessExitedException, TimeoutError) as error:
        print(f"failed: {measure.__name__} {options}: {error}", file=sys.stderr)
        return None
