"""Real failures of torch, gloo and the system, as the launcher's exit code and a message with a cure."""

import errno
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from small_runs import small_run

from patch.device import MachineFacts
from patch.distributed.launch import launch
from patch.distributed.worker_process import LOST_RANK_CODE, failure
from patch.errors import MemoryLackError, TrainingError
from patch.preflight.cluster import Rendezvous
from patch.training.error_translation import (
    LostRankError,
    is_device_error,
    is_out_of_memory,
    translate_errors,
)

REPOSITORY = Path(__file__).parents[3]
CONFIG = small_run()
MACHINE = MachineFacts(cuda_devices=0, cpu_cores=2)


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


def wait_for_a_rank_that_hangs(rank: int, world_size: int) -> str:
    hasty = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(3)
        return ""
    with pytest.raises(TrainingError) as caught, translate_errors(CONFIG):
        dist.all_reduce(torch.ones(1), group=hasty)
    assert not isinstance(caught.value, LostRankError)
    return str(caught.value)


def test_hang_names_the_flag_and_the_other_ranks() -> None:
    message, _ = run_distributed(wait_for_a_rank_that_hangs, 2)
    assert "--distributed-timeout-minutes" in message and "30 minutes" in message
    assert "another rank" in message


LOSE_RANK_1 = f"""
import os, sys
sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / "tests/support")!r}]
from patch.compat import quick_start
with quick_start():
    import torch
    import torch.distributed as dist
    from patch.training.error_translation import LostRankError, translate_errors
from small_runs import small_run

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    os._exit(1)
try:
    with translate_errors(small_run()):
        dist.all_reduce(torch.ones(1))
except LostRankError as error:
    assert error.exit_code == {LOST_RANK_CODE}
    os._exit(error.exit_code)
"""


def test_rank_that_ended_gives_the_exit_code(tmp_path: Path) -> None:
    """Rank 1 crashes; rank 0 waits for it and ends with what `translate_errors` makes of it."""
    worker = tmp_path / "worker.py"
    worker.write_text(LOSE_RANK_1)
    assert launch(worker, [], small_run(dp=2), Rendezvous(), MACHINE) == 1
