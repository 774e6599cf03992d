"""Messages between processes of this machine: the collectives of ZeRO, in bytes a second.

`python toolkits/doctor/messages.py RANKS` starts the processes and prints what rank 0 has measured, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.benchmark import Timer as Stopwatch  # not a thread

if __name__ == "__main__":  # it has no other way to the packages
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from patch.device import DeviceContext  # noqa: E402
from patch.distributed.async_collectives import (  # noqa: E402
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from toolkits._program import run_program  # noqa: E402
from toolkits.doctor.check import Finding, Settings  # noqa: E402

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
    ended = run_program([sys.executable, "-P", "-W", "ignore", __file__, str(ranks)], _LIMIT_S)
    if ended.code != 0:
        cure = "GPUs: NCCL_DEBUG=INFO shows why; CPUs: look at the interfaces and firewalls of this machine"
        yield Finding("messages", "broken", f"processes cannot talk: {ended.reason[:200]}", cure)
        return
    # What NCCL_DEBUG lets NCCL say is there too.
    seconds = json.loads(next(line for line in ended.output.splitlines() if line.startswith("{")))
    latency, num_bytes = seconds.pop("latency"), seconds.pop("num_bytes")
    for name, time_s in seconds.items():
        # Bytes that cross the slowest link, over the bytes of the message: nccl-tests' doc/PERFORMANCE.md.
        speed = (ranks - 1) / ranks * num_bytes / time_s
        what = f"{speed / 1e9:.2f} GB/s bus bandwidth ({ranks} processes, {num_bytes / 2**20:.0f} MiB)"
        yield Finding(name, "ok", what, data={"seconds": time_s, "bus_bytes_per_s": speed})
    what = f"{latency * 1e6:.0f} us for an all-reduce of one number"
    yield Finding("latency", "ok", what, data={"seconds": latency})


def _run(rank: int, world_size: int, folder: str) -> None:
    """Measure on this rank; rank 0 prints the seconds of each collective."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    context = DeviceContext.select(rank)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(context.backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    numel = (_NCCL_NUMEL if context.is_cuda else _GLOO_NUMEL) // world_size * world_size
    whole = torch.ones(numel, device=context.device)
    part, one = whole.chunk(world_size)[rank], torch.ones(1, device=context.device)
    group = dist.group.WORLD
    assert group is not None

    def seconds(start: Callable[[], Pending], rounds: int = _ROUNDS) -> float:
        dist.barrier()
        timer = Stopwatch("start().wait()", globals={"start": start}, num_threads=torch.get_num_threads())
        return timer.timeit(rounds).mean

    measured = {
        "num_bytes": whole.nbytes,
        "reduce-scatter": seconds(lambda: start_reduce_scatter(whole, part, group)),
        "all-gather": seconds(lambda: start_all_gather(whole, part, group)),
        "latency": seconds(lambda: start_all_reduce(one, group), _SMALL_ROUNDS),
    }
    if rank == 0:
        print(json.dumps(measured), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run, (world_size, folder), nprocs=world_size, start_method="fork")
