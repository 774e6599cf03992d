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
from patch.distributed.worker_process import LOST_RANK_CODE
from patch.errors import DataError, TrainingError
from patch.preflight import Rendezvous
from patch.training.error_translation import LostRankError, is_out_of_memory, translate_errors
from patch.training.memory_advice import is_device_error, memory_advice

REPOSITORY = Path(__file__).parents[3]
CONFIG = small_run()
MACHINE = MachineFacts(cuda_devices=0, cpu_cores=2)


def out_of_memory_on_the_cpu() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def out_of_memory_in_python() -> None:
    bytearray(2**60)


def out_of_memory_on_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def out_of_memory_in_a_file() -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize("fail", [out_of_memory_on_the_cpu, out_of_memory_in_python, out_of_memory_in_a_file])
def test_out_of_memory_on_the_host_names_its_cures(fail) -> None:
    with pytest.raises(TrainingError) as caught, translate_errors(small_run(dp=2)):
        fail()
    assert all(name in str(caught.value) for name in ("BATCH_SIZE", "17 AC", "14 DO"))
    assert "OFFLOAD" not in str(caught.value), "states in host memory are no help there"
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
def test_out_of_memory_of_a_library_on_a_gpu_names_the_cures_of_the_gpu(message: str) -> None:
    """The libraries' own words, as torch passes them on: a RuntimeError, of NCCL a DistBackendError."""
    kind = dist.DistBackendError if message.startswith("NCCL") else RuntimeError
    assert is_out_of_memory(kind(message)) and is_device_error(kind(message))
    with pytest.raises(TrainingError, match="ran out of memory") as caught, translate_errors(CONFIG):
        raise kind(message)
    assert POLICY in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        TrainingError("this process ran out of memory: x"),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        dist.DistBackendError("NCCL error in: x, remote process exited or there was a network error"),
    ],
    ids=repr,
)
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_out_of_memory_on_the_host_is_not_the_devices() -> None:
    for fail in (out_of_memory_on_the_cpu, out_of_memory_in_python, out_of_memory_in_a_file):
        with pytest.raises((RuntimeError, MemoryError, OSError)) as raised:
            fail()
        assert is_out_of_memory(raised.value) and not is_device_error(raised.value)


BATCH, PAD, AC = "3 BATCH_SIZE", "8 PAD_LEN", "17 AC"
DO, GRADIENTS, MORE = "14 DO", "gradients at --data-parallel-sharding", "more processes (TP, PP)"
POLICY, FRACTION, THRESHOLD = "18 OPTIMIZER_OFFLOAD", "OFFLOAD_FRACTION", "--optimizer-offload-auto-threshold"
CURES = {BATCH, PAD, AC, DO, GRADIENTS, MORE, POLICY, FRACTION, THRESHOLD}
GPU = MachineFacts(cuda_devices=8, cpu_cores=2, cuda_memory_bytes=2**30, host_memory_bytes=2**31)
STATIC, AUTO = {"optimizer_offload_policy": "static"}, {"optimizer_offload_policy": "auto"}
LARGE = {"hidden_size": 4096, "vocab_size": 50_000}
"""Weights and gradients of more than 1 GiB."""


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, {BATCH, AC, POLICY, MORE}),
        ({"dp": 2}, {BATCH, AC, DO, POLICY, MORE}),
        ({"dp": 2, "use_distributed_optimizer": True}, {BATCH, AC, GRADIENTS, POLICY, MORE}),
        ({"dp": 2, "data_parallel_sharding": "gradients"}, {BATCH, AC, POLICY, MORE}),
        ({"micro_batch_size": 1, "recompute_granularity": "full"}, {PAD, POLICY, MORE}),
        ({"tp": 2, "optimizer_offload_fraction": 0.5, **STATIC}, {BATCH, AC, FRACTION, POLICY, MORE}),
        ({"tp": 2, **STATIC}, {BATCH, AC, MORE}),
        ({"tp": 2, **AUTO}, {BATCH, AC, THRESHOLD, MORE}),
        ({"tp": 2, "optimizer_offload_auto_threshold": 2**30, **AUTO}, {BATCH, AC, MORE}),
        # a process that holds the whole model has moved all of its states before it gives up
        (AUTO, {BATCH, AC, MORE}),
        ({"dp": 2, "data_parallel_sharding": "gradients", **AUTO}, {BATCH, AC, MORE}),
        ({"optimizer_offload_fraction": 0.5, **STATIC}, {BATCH, AC, MORE}),
        ({**LARGE, "dp": 2, **AUTO}, {GRADIENTS, MORE}),
        (LARGE, {MORE}),
    ],
)
def test_out_of_memory_on_a_gpu_names_the_cures_that_are_left(changes: dict, named: set[str]) -> None:
    config = small_run(**{"optimizer_offload_auto_threshold": 2**20} | changes)
    text = memory_advice(torch.OutOfMemoryError("out of memory"), config, GPU)
    assert {cure for cure in CURES if cure in text} == named, text
    assert ("weights and gradients alone take" in text) == (LARGE.items() <= changes.items())


@pytest.mark.parametrize(
    ("setting", "more"), [("none", ", selective (sel) or full at --rec"), ("selective", ", full at --rec")]
)
def test_out_of_memory_names_the_recomputation_that_is_left(setting: str, more: str) -> None:
    config = small_run(recompute_granularity=setting)
    assert more in memory_advice(torch.OutOfMemoryError("out of memory"), config, GPU)


def test_out_of_memory_names_offloaded_activations() -> None:
    error, offload = torch.OutOfMemoryError("out of memory"), {"cpu_offloading": True}
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    assert "true at --cpu-offloading (position 17 AC)" in memory_advice(error, small_run(**block), GPU)
    assert "uniform at --recompute-method" in memory_advice(error, small_run(**block), GPU)
    text = memory_advice(error, small_run(**block, **offload), GPU)
    assert "--cpu-offloading" not in text and "--recompute-method" not in text
    text = memory_advice(MemoryError(), small_run(**offload), GPU)
    assert "less offload (a smaller --cpu-offloading-num-layers)" in text


def test_out_of_memory_of_a_gpus_host_asks_for_less_there() -> None:
    text = memory_advice(MemoryError(), small_run(dp=2, **STATIC), GPU)
    assert DO in text and "less offload (a smaller --optimizer-offload-fraction" in text
    assert BATCH not in text and AC not in text


@pytest.mark.parametrize(
    "error",
    [
        DataError("row 3"),
        RuntimeError("a bug"),
        FileNotFoundError("x"),
        TimeoutError("timed out"),
        KeyError(1),
    ],
    ids=repr,
)
def test_other_errors_pass_as_they_are(error: Exception) -> None:
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
