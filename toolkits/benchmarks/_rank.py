"""The rank of a benchmark: it joins its job, measures, and writes what it found for `_link.run_ranks`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from patch import compat
from patch.device import DeviceContext
from patch.distributed.groups import shutdown

CPU = DeviceContext(torch.device("cpu"), "gloo")


class Seconds(NamedTuple):
    """Seconds of one call."""

    wall: float
    cpu: float
    """Processor time of this process, which has one thread; 0 on a GPU. Other work on the machine changes it
    little."""


@contextmanager
def job(
    context: DeviceContext, rank: int = 0, world_size: int = 1, store: dist.Store | None = None
) -> Iterator[None]:
    """Within it this process, with one thread, is a rank of a job.

    Args:
        context: the device of the rank.
        rank: its number.
        world_size: the number of ranks.
        store: where the ranks find each other; None: there is one rank.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    compat.apply(cuda=context.is_cuda)
    dist.init_process_group(
        context.backend, store=store or dist.HashStore(), rank=rank, world_size=world_size
    )
    yield
    dist.barrier()  # before anybody leaves
    shutdown()
    torch.set_num_threads(threads)


def run_as_rank(
    task: Callable[..., Any], measure: Callable[[Any, DeviceContext], Any], *, on_cpu: bool = False
) -> None:
    """The main program of a rank, with the arguments that `_link.run_ranks` gives it.

    Args:
        task: the class of the work.
        measure: gets the work and the rank's device; its result on rank 0 is the result of the job.
        on_cpu: the rank leaves a GPU alone.
    """
    folder, rank, world_size, fields = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    context = CPU if on_cpu else DeviceContext.select(rank)
    with job(context, rank, world_size, dist.FileStore(str(folder / "store"), world_size)):
        measured = measure(task(**json.loads(fields)), context)
    if rank == 0:
        (folder / "output.json").write_text(json.dumps(measured), encoding="utf-8")


def time_call(call: Callable[[], Any], context: DeviceContext) -> Seconds:
    """The time of a call, to the end of its work on the device."""
    begin, cpu = time.perf_counter(), time.process_time()
    call()
    if context.is_cuda:
        torch.cuda.synchronize(context.device)
    return Seconds(time.perf_counter() - begin, 0.0 if context.is_cuda else time.process_time() - cpu)


def time_on_ranks(call: Callable[[], Any], context: DeviceContext) -> float:
    """Seconds of a call that all ranks begin together, on the slowest of them."""
    dist.barrier()
    return slowest(time_call(call, context).wall, context.device)


def slowest(seconds: float, device: torch.device) -> float:
    """The most seconds of all ranks."""
    most = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()
