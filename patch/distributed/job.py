"""Joins the job of all processes, or fails after a time limit, whatever program listens at its address."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from patch.device import start_thread
from patch.distributed.worker_process import note_nccl
from patch.errors import TrainingError

ROUND = "PATCH_ROUND"
"""The variable with the number of this start of the workers; our launchers' store serves all of them."""
_Answer = TypeVar("_Answer")


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
    if backend == "nccl":
        note_nccl()


def answer_within(timeout: timedelta, call: Callable[[], _Answer]) -> _Answer:
    """Call a function of torch that connects to a store, in a thread, and wait for what it returns.

    torch waits without a time limit for the answer to its first message.

    Raises:
        TimeoutError: it has not returned in time.
        Exception: what it raises.
    """
    future: Future[_Answer] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - it is raised in the caller's thread
            future.set_exception(error)

    start_thread("connect to a store", work)
    seconds = timeout.total_seconds()
    try:
        return future.result(seconds + 5.0)  # longer than torch, whose own error says more
    except TimeoutError:
        raise TimeoutError(f"no answer to a connection within {seconds / 60:.3g} minutes") from None


def unreachable(who: str, address: str, error: BaseException) -> TrainingError:
    """The error of a process to which no other one answers.

    Args:
        who: the process.
        address: MASTER_ADDR:MASTER_PORT.
        error: the cause.
    """
    reason = str(error).strip().partition("\n")[0]
    return TrainingError(
        f"{who} could not join the job at {address} (MASTER_ADDR:MASTER_PORT): {reason}. Expected "
        "machine 0's launcher, or rank 0, there: give its address and a port that no other program uses; "
        "--distributed-timeout-minutes is how long machines wait for each other"
    )
