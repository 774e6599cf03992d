"""The processes of `messages.py`: started all by `python -m toolkits.doctor._message_rank FOLDER RANKS`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from patch.device import DeviceContext
from patch.distributed.async_collectives import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    start_swap,
)

_GLOO_NUMEL, _NCCL_NUMEL = 4 << 20, 64 << 20
"""fp32 numbers of a message: 16 and 256 MiB."""
_ROUNDS, _SMALL_ROUNDS = 5, 50
_TIMEOUT = timedelta(seconds=40)


def run(rank: int, world_size: int, folder: str) -> None:
    """Join the others, and measure; rank 0 writes what it found."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    context = DeviceContext.select(rank)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(context.backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    measured = measure(group, context)
    if rank == 0:
        (Path(folder) / "measured.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def measure(group: dist.ProcessGroup, context: DeviceContext, numel: int = 0) -> dict:
    """Time the collectives of training.

    Args:
        group: all ranks, at least two.
        context: this rank's device.
        numel: of a message; 0: as suits the backend.
    """
    size, rank = group.size(), group.rank()
    numel = (numel or (_NCCL_NUMEL if context.is_cuda else _GLOO_NUMEL)) // size * size
    buffer = torch.ones(numel, device=context.device)
    received = torch.empty_like(buffer)
    part = buffer.chunk(size)[rank]
    ring = {"target": (rank + 1) % size, "source": (rank - 1) % size}
    # Bytes that cross the slowest link, over the bytes of the message: nccl-tests' doc/PERFORMANCE.md.
    cases: dict[str, tuple[float, Callable[[], Pending]]] = {
        "all_reduce": (2 * (size - 1) / size, lambda: start_all_reduce(buffer, group)),
        "reduce_scatter": ((size - 1) / size, lambda: start_reduce_scatter(buffer, part, group)),
        "all_gather": ((size - 1) / size, lambda: start_all_gather(buffer, part, group)),
        "send_recv": (1.0, lambda: start_swap(buffer, received, group, **ring)),
    }
    measured: dict = {"backend": context.backend, "num_bytes": buffer.nbytes}
    for name, (factor, start) in cases.items():
        seconds = _seconds(start, context, _ROUNDS)
        measured[name] = {"seconds": seconds, "bus_bytes_per_s": factor * buffer.nbytes / seconds}
    one = torch.ones(1, device=context.device)
    measured["latency_s"] = _seconds(lambda: start_all_reduce(one, group), context, _SMALL_ROUNDS)
    return measured


def _seconds(start: Callable[[], Pending], context: DeviceContext, rounds: int) -> float:
    """Seconds of one collective, on the average of some after a first one."""
    for count in (1, rounds):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            start().wait()
        if context.is_cuda:
            torch.cuda.synchronize(context.device)
        seconds = (time.perf_counter() - begin) / count
    return seconds


def main(argv: list[str]) -> int:
    """Start the ranks and wait for them."""
    folder, world_size = argv[0], int(argv[1])
    mp.start_processes(run, (world_size, folder), nprocs=world_size, start_method="fork")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
