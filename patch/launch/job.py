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
    own, *address = (str(os.environ.get(name)) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    meetings = dist.rendezvous("env://", timeout=timeout)
    store, rank, world_size = connect(f"rank {own}", ":".join(address), timeout, lambda: next(meetings))
    store.set_timeout(timeout)
    store = dist.PrefixStore(f"job{os.environ.get(ROUND, '')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def connect(who: str, address: str, timeout: timedelta, call: Callable[[], _Answer]) -> _Answer:
    """Return the result of a function that connects to the store at `address`, MASTER_ADDR:MASTER_PORT.

    It runs in a thread, because torch waits without a time limit for the answer to its first message.

    Args:
        who: this process, for the message.
    Raises:
        TrainingError: the function has failed, or has not returned in time.
    """
    minutes = timeout.total_seconds() / 60
    with ThreadPool(1, device_setter()) as thread:  # a daemon, which may outlive this call
        try:  # longer than torch, whose own error is more specific
            return thread.apply_async(call).get(timeout.total_seconds() + 5.0)
        except Exception as error:
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            if isinstance(error, multiprocessing.TimeoutError):
                reason = f"no answer to a connection within {minutes:.3g} minutes"
            raise TrainingError(
                f"{who} could not join the job at {address} (MASTER_ADDR:MASTER_PORT): {reason}. Expected "
                "machine 0's launcher, or rank 0, there: give its address and a port that no other program "
                "uses; --distributed-timeout-minutes is how long machines wait for each other"
            ) from error
