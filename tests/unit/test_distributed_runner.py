"""The runner of multi-process tests: results by rank, failures with their cause, and nothing left behind."""

import logging
import os
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings

from patch import compat


def run_and_leave_traces(rank: int, world_size: int) -> tuple[object, ...]:
    """What a body found of its predecessor's doings, all of which it repeats."""
    found = (
        mappings._reduce.__module__, parallel_state.is_initialized(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), torch.initial_seed(), "TRACE" in os.environ,
        len(logging.getLogger("patch").handlers), len(warnings.filters),
        {"patch.training.step", "torch._inductor.compile_fx"} <= sys.modules.keys(),
    )  # fmt: skip
    compat.apply(cuda=False)
    parallel_state.initialize_model_parallel()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    os.environ["TRACE"] = "left"
    logging.getLogger("patch").addHandler(logging.NullHandler())
    return found


def test_a_body_finds_nothing_of_the_one_before() -> None:
    first, second = (run_distributed(run_and_leave_traces, 1) for _ in range(2))
    assert first == second
    assert first[0][0] == "megatron.core.tensor_parallel.mappings"
    assert first[0][-1], "the server that processes are forked from has what bodies import"


def fail_on_rank_1(rank: int, world_size: int, pid_file: Path) -> None:
    if rank == 0:
        pid_file.write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        raise SystemExit("the cause")
    time.sleep(1000)


def test_a_failure_has_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 of 2 failed:\n(.|\n)*fail_on_rank_1(.|\n)*the cause"):
        run_distributed(fail_on_rank_1, 2, tmp_path / "pid")
    deadline = time.monotonic() + 30
    while psutil.pid_exists(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline, "rank 0 is still there"
        time.sleep(0.05)


def hang(rank: int, world_size: int) -> None:
    time.sleep(1000 * rank)


def test_ranks_that_do_not_finish_in_time_are_named() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[(0, )?1\] of 2 did not finish in time"):
        run_distributed(hang, 2, timeout_s=3)
