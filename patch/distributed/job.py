"""Joining the job of all processes, within a time whatever listens at its address."""

from __future__ import annotations

import os
import queue
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from patch.errors import TrainingError

_GRACE_S = 5.0
"""torch's own time-out comes first where it has one: it knows more."""


def join(backend: str, timeout: timedelta) -> None:
    """Meet the other processes at MASTER_ADDR and MASTER_PORT, as RANK of WORLD_SIZE.

    Groups are not bound to a GPU (`device_id`). A bound group has one NCCL communicator, and sends each of a
    pipeline's messages on it, behind everything else the group does; an unbound one makes a communicator of
    its own for each pair of neighbours. What a bound one has besides, the current device gives: where objects
    and barriers go. Communicators are made at their first use.

    Args:
        timeout: of this call, and of every later collective.
    Raises:
        TrainingError: nobody answers there as rank 0 of a job, or another program has rank 0's port.

    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, pointToPoint and barrier.
    """
    store, rank, world_size = _meet(timeout)
    dist.init_process_group(
        backend, store=dist.PrefixStore("job", store), rank=rank, world_size=world_size, timeout=timeout
    )


def _meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The store that rank 0 keeps, this process's rank and their number."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # In a thread: torch bounds every step but the answer to its first message, for which it waits for ever.
    threading.Thread(target=_ask, args=(timeout, answers), daemon=True).start()
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


def _ask(timeout: timedelta, answers: queue.SimpleQueue[Any]) -> None:
    try:
        answers.put(next(iter(dist.rendezvous("env://", timeout=timeout))))
    except Exception as error:  # noqa: BLE001 - the thread that waits for it raises it
        answers.put(error)


def _unreachable(reason: str) -> TrainingError:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return TrainingError(
        f"rank {os.environ['RANK']} could not join the job at {address} (MASTER_ADDR:MASTER_PORT): {reason}. "
        "Expected rank 0 of this job there: give the address of the first machine and a port that no other "
        "program uses; --distributed-timeout-minutes is how long processes wait for each other"
    )
