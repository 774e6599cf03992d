"""States on a disk: what is read and written, what is left in the folder, how failures are named.

That they change no bit, wherever chunks move: test_host_update.py.
"""

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from full_disk import disk_full_after
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from optimizer_runs import OddModel, build_optimizer, make_steps, on_host, take_step
from small_runs import HALF, small_run

from patch.checkpoint import load_checkpoint
from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.save import Save
from patch.config.choices import ZeroStage
from patch.device import MachineFacts
from patch.errors import ConfigError, TrainingError
from patch.memory.disk import DiskMemory, write_values
from patch.memory.disk import on_host as values_of
from patch.memory.offload_device import HOST
from patch.plan.memory import disk_bytes, host_bytes
from patch.plan.parameters import parameters_of
from patch.preflight.validate import check_offload_room, offload_folder_is_on_a_disk
from patch.storage.places import IN_MEMORY, file_system_of

PAGE = 4096
MACHINE = MachineFacts(cuda_devices=0, cpu_cores=1)


def test_any_part_has_what_was_written_to_it_and_freed_room_is_used_again(tmp_path: Path) -> None:
    disk = DiskMemory(tmp_path / "new" / "folder")
    first, second = disk.allocate(5000, torch.int16), disk.allocate(3000)
    memory, copy = (HOST.allocate(3000) for _ in range(2))
    memory.copy_(torch.arange(3000))
    disk.start_write(memory, second)
    write_values(first, torch.tensor(7))
    write_values(second[10:20].view(2, 5)[1], -torch.ones(5))
    for job in disk.start_read(second, copy):
        job.result()

    assert copy[13:22].tolist() == [13, 14, -1, -1, -1, -1, -1, 20, 21]
    assert torch.equal(values_of(second.view(30, 100)[None]).view(-1), copy)
    assert torch.equal(values_of(first), torch.full((5000,), 7, dtype=torch.int16))
    del second
    gc.collect()
    disk.allocate(3000)
    found = os.stat(disk._file.fileno())
    assert found.st_size == 2 * 3 * PAGE
    assert not found.st_nlink and not any(disk.folder.iterdir()), "without a name it ends with its process"


FAILURES = {"/dev/full": "No space left on device", "/proc/self/mem": "Input/output error"}


def train(rank: int, world_size: int, folder: Path, becomes: str | None) -> tuple[str, list[int]]:
    """What a step says whose disk fails, and the bytes that each step has moved."""
    disk, moved = DiskMemory(folder), []
    offload = replace(on_host(1.0), disk=disk, host_state_bytes=0)
    optimizer = build_optimizer(model := OddModel(), ZeroStage.NONE, offload=offload, clip_grad=0.0)
    for index, step in enumerate(make_steps(6, 1, 1)):
        optimizer.adam.disk_updates.failure_rate = float(becomes is None)  # no early updates
        if index == 3 and becomes is not None:
            os.dup2(os.open(becomes, os.O_RDWR), disk._direct.fileno())
        try:
            take_step(model, optimizer, step[0])
            optimizer.finish_param_sync()
        except TrainingError as error:
            assert error.field == "offload_folder" and not error.may_restart
            return f"{index}: {error}", moved
        moved.append(disk.num_bytes_moved - sum(moved))
    return "", moved


@pytest.mark.parametrize("becomes", FAILURES)
def test_a_failing_disk_ends_the_run_by_name_in_its_step(tmp_path: Path, becomes: str) -> None:
    ((message, _),) = run_distributed(train, 1, tmp_path, becomes)
    assert message.startswith(("3: ", "4: ")) and FAILURES[becomes] in message and str(tmp_path) in message


def test_a_file_that_ends_early_has_no_zeros_and_no_room_is_said_at_once(tmp_path: Path) -> None:
    disk = DiskMemory(tmp_path)
    state = disk.allocate(4 * PAGE, torch.float32)
    os.truncate(disk._file.fileno(), PAGE)
    with pytest.raises(TrainingError, match="the file ends before"):
        values_of(state)
    with disk_full_after(PAGE), pytest.raises(TrainingError, match="cannot be reserved: File too large"):
        disk.allocate(PAGE)


def test_a_step_reads_and_writes_each_state_once(tmp_path: Path) -> None:
    ((message, moved),) = run_distributed(train, 1, tmp_path, None)
    num_states = 11 * 2
    assert not message and moved == [2 * num_states * PAGE] * 6


def save_and_load(rank: int, world_size: int, folder: Path) -> tuple[bool, int, bool]:
    """Was all written when the state might change; bytes of copies; did a load bring it back?"""
    disk, copies = DiskMemory(folder), HostCopies()
    states = [disk.allocate(6000) for _ in range(3)]
    for value, state in enumerate(states):
        write_values(state, torch.arange(6000) + value)
    shards = {
        key: ShardedTensor.from_rank_offsets(key, state[1000:5000].view(40, 100))
        for key, state in zip(("optimizer.a", "optimizer.b", "optimizer.c"), states, strict=True)
    }
    save = Save(folder / "checkpoint", 1, {"optimizer": shards}, {}, copies)
    save.wait_for_copies()
    is_written = save._written is not None
    save.finish()
    for state in states:
        write_values(state[1000:5000], torch.zeros(()))
    load_checkpoint(folder / "checkpoint", 1, {"optimizer": shards})
    is_back = all(values_of(state).equal(torch.arange(6000.0) + value) for value, state in enumerate(states))
    return is_written, sum(map(len, copies._blocks)), is_back


def test_a_checkpoint_in_the_background_takes_no_copies_of_them(tmp_path: Path) -> None:
    assert run_distributed(save_and_load, 1, tmp_path) == [(True, 0, True)]


def test_memory_links_and_full_disks_are_refused_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = {"/dev/shm/new": "tmpfs", str(tmp_path / "file"): "no folder", "/proc": "not writable"}
    for folder, why in wrong.items():
        with pytest.raises(ConfigError, match=why):
            offload_folder_is_on_a_disk(small_run(offload_folder=folder), MACHINE)
    config = small_run(offload_folder=str(tmp_path / "new"))
    if file_system_of(tmp_path) not in IN_MEMORY:
        offload_folder_is_on_a_disk(config, MACHINE)
    check_offload_room(config, 1)
    half = HALF | {"precision": "bf16"}
    planned = small_run(offload_folder=str(tmp_path), optimizer_offload_host_share=0.0, **half)
    on_host = host_bytes(small_run(**half)).optimizer
    assert disk_bytes(planned, MACHINE) == 5 * parameters_of(planned, 0).trained.total == on_host
    with pytest.raises(ConfigError, match="GiB free"):
        check_offload_room(config, 1 << 60)
