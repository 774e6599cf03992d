"""Real failures of torch, gloo and the system, as errors with an exit code and a cure."""

import errno
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed_runner import rejoin, run_distributed
from small_runs import small_run

from patch.distributed.worker_process import LOST_RANK_CODE, failure
from patch.errors import MemoryLackError, TrainingError
from patch.training.error_translation import (
    LostRankError,
    is_device_error,
    is_out_of_memory,
    translate_errors,
)

CONFIG = small_run()


def out_of_memory_on_the_cpu() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def out_of_memory_in_python() -> None:
    bytearray(2**60)


def out_of_memory_in_a_file() -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize("fail", [out_of_memory_on_the_cpu, out_of_memory_in_python, out_of_memory_in_a_file])
def test_out_of_memory_on_the_host_is_told_as_such(fail) -> None:
    with pytest.raises(MemoryLackError, match="ran out of memory") as caught, translate_errors(CONFIG):
        fail()
    assert not caught.value.on_device and failure(caught.value).lacks == "host"
    assert caught.value.exit_code == 5 and caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.29.7\nncclUnhandledCudaError: "
        "Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
        "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error\nncclUnhandledCudaError: Call to "
        "CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    ],
    ids=["cublas", "cudnn", "nccl-calloc", "nccl"],
)
def test_out_of_memory_of_a_library_is_the_gpus(message: str) -> None:
    """The libraries' own words, as torch passes them on: a RuntimeError, of NCCL a DistBackendError."""
    kind = dist.DistBackendError if message.startswith("NCCL") else RuntimeError
    assert is_out_of_memory(kind(message)) and is_device_error(kind(message))
    with pytest.raises(MemoryLackError, match="ran out of memory") as caught, translate_errors(CONFIG):
        raise kind(message)
    assert caught.value.on_device and failure(caught.value).lacks == "device"


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
