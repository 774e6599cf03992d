"""Joins the job of all processes, or fails after a time limit, whatever program listens at its address."""

from __future__ import annotations

import os
import queue
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from patch.errors import TrainingError

_GRACE_S = 5.0
"""We wait this much longer than torch, because the error of torch's own time limit says more."""


def join(backend: str, timeout: timedelta) -> None:
    """Join the other processes at MASTER_ADDR:MASTER_PORT, as rank RANK of WORLD_SIZE.

    Groups are not bound to a GPU (`device_id`). A bound group has a single NCCL communicator, on which each
    message of a pipeline waits for everything else that the group does. An unbound group creates a separate
    communicator for each pair of neighbours, at its first use. The device for objects and barriers, which
    a bound group knows, is then the current device.

    Args:
        backend: nccl or gloo.
        timeout: of this call, and of every later collective.
    Raises:
        TrainingError: no rank 0 of a job answers there, or another program uses rank 0's port.

    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, pointToPoint and barrier.
    """
    store, rank, world_size = _connect(timeout)
    dist.init_process_group(
        backend, store=dist.PrefixStore("job", store), rank=rank, world_size=world_size, timeout=timeout
    )


def _connect(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Connect to the store of rank 0; returns the store, this process's rank, the number of processes."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # In a thread, because torch waits without a time limit for the answer to its first message.
    threading.Thread(target=_rendezvous, args=(timeout, answers), daemon=True).start()
    seconds = timeout.total_seconds()
    try:
        answer = answers.get(timeout=seconds + _GRACE_S)
    except queue.Empty:
        raise _unreachable(f"no answer to a connection within {seconds / 60:.3g} minutes") from None
    if isinstance(answer, RuntimeError):
        raise _unreachable(str(answer).strip().partition("\n")[0]) from answer
    if isinstance(answer, Exception):
        raise answer
    store, rank, world_size = answer
    store.set_timeout(timeout)
    return store, rank, world_size


def _rendezvous(timeout: timedelta, answers: queue.SimpleQueue[Any]) -> None:
    """Put torch's (store, rank, world size), or the error, into `answers`."""
    try:
        answers.put(next(iter(dist.rendezvous("env://", timeout=timeout))))
    except Exception as error:  # noqa: BLE001 - `_connect` raises it in the caller's thread
        answers.put(error)


def _unreachable(reason: str) -> TrainingError:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return TrainingError(
        f"rank {os.environ['RANK']} could not join the job at {address} (MASTER_ADDR:MASTER_PORT): {reason}. "
        "Expected rank 0 of this job there: give the address of the first machine and a port that no other "
        "program uses; --distributed-timeout-minutes is how long processes wait for each other"
    )
