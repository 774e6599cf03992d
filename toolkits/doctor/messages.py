"""Messages between processes of this machine: the collectives that training uses, in bytes a second.

`python -m toolkits.doctor.messages RANKS` starts the processes and prints what rank 0 has measured, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.benchmark import Timer as Stopwatch  # not a thread

from patch.device import DeviceContext
from patch.distributed.async_collectives import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    start_swap,
)
from toolkits.doctor.check import Finding, Settings, run_program

_LIMIT_S = 60.0
_GLOO_NUMEL, _NCCL_NUMEL = 4 << 20, 64 << 20
"""fp32 numbers of a message: 16 and 256 MiB."""
_ROUNDS, _SMALL_ROUNDS = 5, 50
_TIMEOUT = timedelta(seconds=40)


def measure_messages(settings: Settings) -> Iterator[Finding]:
    """Bus bandwidth of each collective, as nccl-tests count it, and the time of a small message."""
    ranks = settings.num_processes
    if ranks < 2:
        yield Finding("messages", "ok", "not measured with one process: --nproc 2")
        return
    ended = run_program([sys.executable, "-W", "ignore", "-m", __name__, str(ranks)], _LIMIT_S)
    if ended.code != 0:
        cure = "GPUs: NCCL_DEBUG=INFO shows why; CPUs: look at the interfaces and firewalls of this machine"
        yield Finding("messages", "broken", f"processes cannot talk: {ended.reason[:200]}", cure)
        return
    measured = json.loads(next(line for line in ended.output.splitlines() if line.startswith("{")))
    latency = measured.pop("latency")
    for name, data in measured.items():
        used = f"{data['backend']}, {ranks} processes, {data['num_bytes'] / 2**20:.0f} MiB"
        what = f"{data['bus_bytes_per_s'] / 1e9:.2f} GB/s bus bandwidth ({used})"
        yield Finding(name, "ok", what, data={"ranks": ranks, **data})
    what = f"{latency['seconds'] * 1e6:.0f} us for an all-reduce of one number"
    yield Finding("latency", "ok", what, data=latency)


def _run(rank: int, world_size: int, folder: str) -> None:
    """Join the others, and measure; rank 0 prints what it found."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    context = DeviceContext.select(rank)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(context.backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    measured = _measure(group, context)
    if rank == 0:
        print(json.dumps(measured), flush=True)  # beside what NCCL_DEBUG lets NCCL say
    dist.barrier()
    dist.destroy_process_group()


def _measure(group: dist.ProcessGroup, context: DeviceContext) -> dict[str, dict]:
    """Time the collectives of training between all ranks, at least two."""
    size, rank = group.size(), group.rank()
    numel = (_NCCL_NUMEL if context.is_cuda else _GLOO_NUMEL) // size * size
    buffer = torch.ones(numel, device=context.device)
    received = torch.empty_like(buffer)
    part = buffer.chunk(size)[rank]
    ring = {"target": (rank + 1) % size, "source": (rank - 1) % size}
    # Bytes that cross the slowest link, over the bytes of the message: nccl-tests' doc/PERFORMANCE.md.
    cases: dict[str, tuple[float, Callable[[], Pending]]] = {
        "all-reduce": (2 * (size - 1) / size, lambda: start_all_reduce(buffer, group)),
        "reduce-scatter": ((size - 1) / size, lambda: start_reduce_scatter(buffer, part, group)),
        "all-gather": ((size - 1) / size, lambda: start_all_gather(buffer, part, group)),
        "send and receive": (1.0, lambda: start_swap(buffer, received, group, **ring)),
    }
    measured: dict[str, dict] = {}
    for name, (factor, start) in cases.items():
        seconds = _seconds(start, _ROUNDS)
        speed = factor * buffer.nbytes / seconds
        measured[name] = {"backend": context.backend, "num_bytes": buffer.nbytes, "seconds": seconds,
                          "bus_bytes_per_s": speed}  # fmt: skip
    one = torch.ones(1, device=context.device)
    measured["latency"] = {"seconds": _seconds(lambda: start_all_reduce(one, group), _SMALL_ROUNDS)}
    return measured


def _seconds(start: Callable[[], Pending], rounds: int) -> float:
    """Seconds of one collective to its end, on the average of some after a first one."""
    dist.barrier()
    timer = Stopwatch("start().wait()", globals={"start": start}, num_threads=torch.get_num_threads())
    return timer.timeit(rounds).mean


if __name__ == "__main__":
    world_size = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run, (world_size, folder), nprocs=world_size, start_method="fork")
