"""Joining the job: what is in force before it, and addresses where no job of ours is."""

import os
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed_runner import leave, rejoin, run_distributed
from launches import free_port
from small_runs import small_run

from patch import compat
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from patch.errors import PatchError
from patch.launch.job import join

SOON_S = 30  # 2 s, and what torch is given to say it itself; the machine may be busy
CPU = DeviceContext(torch.device("cpu"), "gloo")


def fail_to_join(rank: int, world_size: int) -> list:
    """Return the settings at the time of joining the job, which fails without an address."""
    set_then = []
    for own in ({}, {"NCCL_ALGO": "Ring", "TORCH_NCCL_HIGH_PRIORITY": "0"}):
        dist.destroy_process_group()
        os.environ.update(own)
        with pytest.raises(PatchError, match="MASTER_ADDR expected"):
            initialize(small_run(deterministic_mode=True), DeviceContext(torch.device("cpu"), "nccl"))
        names = ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "TORCH_NCCL_HIGH_PRIORITY")
        set_then.append((torch.are_deterministic_algorithms_enabled(), *map(os.environ.get, names)))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return set_then


def test_what_nccl_reads_is_set_before_the_job_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its algorithms when it starts, torch's mode and streams when a group is made; by any launcher."""
    for name in ("MASTER_ADDR", "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "TORCH_NCCL_HIGH_PRIORITY"):
        monkeypatch.delenv(name, raising=False)
    (set_then,) = run_distributed(fail_to_join, 1)
    assert set_then == [(True, "^NVLS", ":4096:8", "1"), (True, "Ring", ":4096:8", "0")]


def join_with_a_gpu(rank: int, world_size: int) -> object:
    dist.destroy_process_group()
    compat.apply(cuda=False)
    initialize(small_run(), DeviceContext(torch.device("cuda", 0), "gloo"))
    return dist.distributed_c10d._get_default_group().bound_device_id


def test_groups_are_not_bound_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound group sends every message of a pipeline on its one communicator, behind all else.

    This torch knows no GPU, and refuses to bind to one.
    """
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert run_distributed(join_with_a_gpu, 1) == [None]


def join_at(rank: int, world_size: int, places: list[tuple[int, int]]) -> tuple[str, int, float]:
    """Try to join a job of two at this process's port, as this rank: the error, its exit code, seconds."""
    leave()
    before = dict(os.environ)
    port, as_rank = places[rank]
    os.environ.update(RANK=str(as_rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    begin = time.monotonic()
    with pytest.raises(PatchError) as caught:
        join("gloo", timedelta(seconds=2))
    seconds = time.monotonic() - begin
    os.environ.update(before)
    rejoin()
    return str(caught.value), caught.value.exit_code, seconds


@pytest.mark.long
def test_a_port_without_the_job_ends_the_join_in_time_and_is_named() -> None:
    """A program that accepts connections and never answers; node 0's own port taken; one that refuses."""
    with socket.socket() as silent, socket.socket() as refusing:
        for each in (silent, refusing):
            each.bind(("127.0.0.1", 0))
        silent.listen()
        taken, refused = (each.getsockname()[1] for each in (silent, refusing))
        places = [(taken, 1), (taken, 0), (refused, 1)]
        found = run_distributed(join_at, 3, places)
    reasons = ("no answer", "address already in use", "timed out")
    for (port, _), reason, (message, code, seconds) in zip(places, reasons, found, strict=True):
        assert code == 5
        assert f"127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT): " in message and reason in message
        assert "--distributed-timeout-minutes" in message
        assert seconds < SOON_S
