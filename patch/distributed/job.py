"""Joins the job of all processes, or fails after a time limit, whatever program listens at its address."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from patch.device import start_thread
from patch.distributed.worker_process import note_nccl
from patch.errors import TrainingError
from patch.logger import get_logger

_logger = get_logger(__name__, every_rank=True)

ROUND = "PATCH_ROUND"
"""The variable with the number of this start of the workers; our launchers' store serves all of them."""
_Answer = TypeVar("_Answer")
NAME_S = 10.0
"""Seconds that a name may have no address."""
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
    if backend == "nccl":
        # NCCL takes its streams from another pool then than `stream_of`, and its kernels begin before others.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    store, rank, world_size = _connect(timeout)
    store = dist.PrefixStore(f"job{os.environ.get(ROUND, '')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    if backend == "nccl":
        note_nccl()


def await_address(host: str) -> None:
    """Return when a name has an address; a cluster's names may come a moment later than its machines.

    Raises:
        TimeoutError: it has none.
    """
    begin, is_told = time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() - begin > NAME_S:
                raise TimeoutError(f"the name {host} has no address ({error.strerror})") from error
            if not is_told:
                _logger.warning("MASTER_ADDR %s has no address (%s); trying again", host, error.strerror)
            is_told = True
            time.sleep(0.5)


def _connect(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Connect to the store of rank 0; returns the store, this process's rank, the number of processes."""
    try:
        await_address(os.environ.get("MASTER_ADDR", "localhost"))
        store, rank, world_size = answer_within(
            timeout, lambda: next(iter(dist.rendezvous("env://", timeout=timeout)))
        )
    except (RuntimeError, TimeoutError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        who = f"rank {os.environ['RANK']}"
        raise unreachable(who, address, error, "rank 0, on the first machine,") from error
    store.set_timeout(timeout)
    return store, rank, world_size


def answer_within(timeout: timedelta, call: Callable[[], _Answer]) -> _Answer:
    """Call a function of torch that connects to a store, in a thread, and wait for what it returns.

    torch waits without a time limit for the answer to its first message.

    Raises:
        TimeoutError: it has not returned in time.
        Exception: what it raises.
    """
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:  # noqa: BLE001 - it is raised in the caller's thread
            answers.put((None, error))

    start_thread("connect to a store", work)
    seconds = timeout.total_seconds()
    try:
        answer, error = answers.get(timeout=seconds + _GRACE_S)
    except queue.Empty:
        raise TimeoutError(f"no answer to a connection within {seconds / 60:.3g} minutes") from None
    if error is not None:
        raise error
    return answer


def unreachable(who: str, address: str, error: BaseException, expected: str) -> TrainingError:
    """The error of a process that nobody answers.

    Args:
        who: the process.
        address: MASTER_ADDR:MASTER_PORT.
        error: the cause.
        expected: who should have answered.
    """
    reason = str(error).strip().partition("\n")[0]
    return TrainingError(
        f"{who} could not join the job at {address} (MASTER_ADDR:MASTER_PORT): {reason}. Expected {expected} "
        "there: give that machine's address and a port that no other program uses; "
        "--distributed-timeout-minutes is how long machines wait for each other"
    )
