"""Speed of messages between processes of this machine: bus bandwidth of a reduce-scatter, and latency.

`python toolkits/doctor/messages.py RANKS` starts the processes. Rank 0 prints its measurements as JSON.
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
from torch.utils.benchmark import Timer as Stopwatch  # the architecture tests take `Timer` for a thread

if __name__ == "__main__":  # a script finds no packages otherwise
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from patch.device import DeviceContext  # noqa: E402
from patch.distributed.async_collectives import CommHandle, start_all_reduce, start_reduce_scatter  # noqa: E402
from toolkits._program import run_program  # noqa: E402
from toolkits.doctor.check import Finding, Settings  # noqa: E402

_LIMIT_S = 60.0
_GLOO_NUMEL, _NCCL_NUMEL = 4 << 20, 64 << 20
"""Elements (fp32) of a message: 16 and 256 MiB."""
_ROUNDS, _SMALL_ROUNDS = 5, 50
_TIMEOUT = timedelta(seconds=40)


def measure_messages(settings: Settings) -> Iterator[Finding]:
    """Measure the bus bandwidth of a reduce-scatter, as nccl-tests define it, and the latency."""
    ranks = settings.num_processes
    if ranks < 2:
        yield Finding("messages", "ok", "not measured with one process: --nproc 2")
        return
    ended = run_program([sys.executable, "-P", "-W", "ignore", __file__, str(ranks)], _LIMIT_S)
    if ended.code != 0:
        cure = "GPUs: NCCL_DEBUG=INFO shows why; CPUs: look at the interfaces and firewalls of this machine"
        yield Finding("messages", "broken", f"processes cannot communicate: {ended.reason[:200]}", cure)
        return
    # With NCCL_DEBUG the output has NCCL's lines too.
    seconds = json.loads(next(line for line in ended.output.splitlines() if line.startswith("{")))
    latency, num_bytes, time_s = seconds["latency"], seconds["num_bytes"], seconds["reduce-scatter"]
    # Bytes over the slowest link / bytes of the message: doc/PERFORMANCE.md of nccl-tests.
    speed = (ranks - 1) / ranks * num_bytes / time_s
    what = f"{speed / 1e9:.2f} GB/s bus bandwidth ({ranks} processes, {num_bytes / 2**20:.0f} MiB)"
    yield Finding("reduce-scatter", "ok", what, data={"seconds": time_s, "bus_bytes_per_s": speed})
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

    def seconds(start: Callable[[], CommHandle], rounds: int = _ROUNDS) -> float:
        dist.barrier()
        timer = Stopwatch("start().wait()", globals={"start": start}, num_threads=torch.get_num_threads())
        return timer.timeit(rounds).mean

    measured = {
        "num_bytes": whole.nbytes,
        "reduce-scatter": seconds(lambda: start_reduce_scatter(whole, part, group)),
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
