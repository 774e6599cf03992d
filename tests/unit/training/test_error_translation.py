"""Real failures of torch, gloo and the system, as errors with an exit code and a cure."""

import errno
import os
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed_runner import rejoin, run_distributed
from small_runs import small_run

from patch.errors import MemoryLackError, TrainingError
from patch.launch.worker_process import LOST_RANK_CODE, failure
from patch.training.guards.error_translation import (
    LostRankError,
    is_device_error,
    is_out_of_memory,
    translate_errors,
)

CONFIG = small_run()


def raising(error: BaseException) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


NCCL = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nncclUnhandledCudaError: Call failed."
OUT_OF_MEMORY: dict[str, tuple[str, Callable[[], object]]] = {
    "torch": ("host", lambda: torch.empty(2**60, dtype=torch.uint8)),
    "python": ("host", lambda: bytearray(2**60)),
    "file": ("host", raising(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))),
    "cublas": ("device", raising(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`"))),
    "cudnn": ("device", raising(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))),
    "nccl-calloc": (
        "device",
        raising(dist.DistBackendError(f"{NCCL}\nLast error:\nFailed to CUDA calloc async 608 bytes")),
    ),
    "nccl": ("device", raising(dist.DistBackendError(f"{NCCL}\nCuda failure 2 'out of memory'"))),
}
"""The libraries' own words, as torch passes them on."""


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_out_of_memory_is_told_as_such_with_its_place(name: str) -> None:
    lacks, fail = OUT_OF_MEMORY[name]
    with pytest.raises(MemoryLackError, match="ran out of memory") as caught, translate_errors(CONFIG):
        fail()
    cause = caught.value.__cause__
    assert caught.value.exit_code == 5 and is_out_of_memory(cause)
    assert failure(caught.value).lacks == lacks
    assert is_device_error(cause) == caught.value.on_device == (lacks == "device")


@pytest.mark.parametrize(
    "error",
    [
        TrainingError("this process ran out of memory: x"),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        TimeoutError("timed out"),
    ],
    ids=repr,
)
def test_other_errors_are_not_out_of_memory_and_pass_as_they_are(error: Exception) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught, translate_errors(CONFIG):
        raise error
    assert caught.value is error


def lose_ranks(rank: int, world_size: int) -> list[TrainingError]:
    """The errors of rank 0: rank 1 comes late to a collective, and then leaves the job."""
    hasty, errors = dist.new_group(timeout=timedelta(seconds=1)), []
    for group in (hasty, None):
        if rank == 0:
            with pytest.raises(TrainingError) as caught, translate_errors(CONFIG):
                dist.all_reduce(torch.ones(1), group=group)
            errors.append(caught.value)
    time.sleep(3 * rank)
    dist.destroy_process_group()
    rejoin()
    return errors


def test_hang_names_the_flag_and_a_rank_that_ended_gives_way_to_its_own_exit_code() -> None:
    (silent, lost), _ = run_distributed(lose_ranks, 2)
    assert not isinstance(silent, LostRankError) and silent.exit_code == 5
    assert "another rank" in str(silent) and "--distributed-timeout-minutes" in str(silent)
    assert isinstance(lost, LostRankError) and lost.exit_code == LOST_RANK_CODE
