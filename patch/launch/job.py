"""Joins the job, with a time limit even if another program listens at the job's address."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from typing import TypeVar

import torch.distributed as dist

from patch.device import device_setter
from patch.errors import TrainingError

ROUND = "PATCH_ROUND"
"""Environment variable: the round of this start of the workers; one store serves all rounds."""
_Answer = TypeVar("_Answer")


def join(backend: str, timeout: timedelta) -> None:
    """Join the other processes at MASTER_ADDR:MASTER_PORT, as rank RANK of WORLD_SIZE.

    Groups are not bound to a GPU (`device_id`). A bound group has a single NCCL communicator, on which each
    pipeline message waits for all other work of the group. An unbound group creates a separate communicator
    for each pair of neighbours at first use. Its objects and barriers use the current device.

    Args:
        backend: nccl or gloo.
        timeout: time limit of this call and of every later collective.
    Raises:
        TrainingError: no rank 0 of a job answers there, or another program uses rank 0's port.

    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, pointToPoint and barrier.
    """
    if backend == "nccl":
        # NCCL's streams then come from another pool than `stream_of`, and its kernels start before others.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    try:
        store, rank, world_size = answer_within(
            timeout, lambda: next(iter(dist.rendezvous("env://", timeout=timeout)))
        )
    except (RuntimeError, TimeoutError) as error:
        address = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
        raise unreachable(f"rank {os.environ['RANK']}", address, error) from error
    store.set_timeout(timeout)
    store = dist.PrefixStore(f"job{os.environ.get(ROUND, '')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def answer_within(timeout: timedelta, call: Callable[[], _Answer]) -> _Answer:
    """Call a function that connects to a store, in a thread, and return its result.

    The thread is needed because torch waits without a time limit for the answer to its first message.

    Raises:
        TimeoutError: the function has not returned in time.
        Exception: any error of the function.
    """
    seconds = timeout.total_seconds()
    with ThreadPool(1, device_setter()) as thread:  # a daemon, which may outlive this call
        try:  # longer than torch, whose own error is more specific
            return thread.apply_async(call).get(seconds + 5.0)
        except multiprocessing.TimeoutError:
            reason = f"no answer to a connection within {seconds / 60:.3g} minutes"
            raise TimeoutError(reason) from None


def unreachable(who: str, address: str, error: BaseException) -> TrainingError:
    """Return the error of process `who` that gets no answer at `address`, MASTER_ADDR:MASTER_PORT."""
    reason = str(error).strip().partition("\n")[0]
    return TrainingError(
        f"{who} could not join the job at {address} (MASTER_ADDR:MASTER_PORT): {reason}. Expected "
        "machine 0's launcher, or rank 0, there: give its address and a port that no other program uses; "
        "--distributed-timeout-minutes is how long machines wait for each other"
    )
