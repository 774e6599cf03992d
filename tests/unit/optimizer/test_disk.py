"""States on a disk: what is read and written, what is left in the folder, how failures are named.

That they change no bit, wherever chunks move: test_host_update.py.
"""

import gc
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from full_disk import disk_full_after
from optimizer_runs import OddModel, build_optimizer, make_steps, on_host, take_step
from small_runs import small_run

from patch.config.choices import ZeroStage
from patch.device import MachineFacts
from patch.errors import ConfigError, TrainingError
from patch.memory import HOST, DiskMemory, write_values
from patch.memory import on_host as values_of
from patch.preflight.validate import check_offload_room, offload_folder_is_on_a_disk

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
    assert os.stat(disk._file.fileno()).st_size == 2 * 3 * PAGE
    assert not any(disk.folder.iterdir()), "nothing of it has a name"


def test_a_killed_process_leaves_no_bytes(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    if not (child := os.fork()):
        disk = DiskMemory(tmp_path)
        buffer = disk.allocate(1 << 20)
        os.write(writer, str(os.stat(disk._file.fileno()).st_nlink).encode())
        signal.pause()
        del buffer
    links = os.read(reader, 10)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert links == b"0" and not any(tmp_path.iterdir())


def full(disk: DiskMemory) -> None:
    os.dup2(os.open("/dev/full", os.O_RDWR), disk._direct.fileno())


def broken(disk: DiskMemory) -> None:
    os.dup2(os.open("/proc/self/mem", os.O_RDONLY), disk._direct.fileno())


def shortened(disk: DiskMemory) -> None:
    os.truncate(disk._file.fileno(), PAGE)


FAILURES = {full: "No space left on device", broken: "Input/output error", shortened: "the file ends before"}


def train(rank: int, world_size: int, folder: Path, fail: Callable | None) -> tuple[str, list[int]]:
    """What a step says whose disk fails, and the bytes that each step has moved."""
    disk, moved = DiskMemory(folder), []
    optimizer = build_optimizer(
        model := OddModel(), ZeroStage.NONE, offload=replace(on_host(1.0), disk=disk, host_state_bytes=0),
        clip_grad=0.0,
    )  # fmt: skip
    for index, step in enumerate(make_steps(6, 1, 1)):
        optimizer.adam.disk_updates.failure_rate = float(fail is None)  # no early updates
        if index == 3 and fail is not None:
            fail(disk)
        try:
            take_step(model, optimizer, step[0])
            optimizer.finish_param_sync()
        except TrainingError as error:
            assert error.field == "offload_folder" and not error.may_restart
            return f"{index}: {error}", moved
        moved.append(disk.num_bytes_moved - sum(moved))
    return "", moved


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_a_failing_disk_ends_the_run_by_name_in_its_step(tmp_path: Path, fail: Callable) -> None:
    ((message, _),) = run_distributed(train, 1, tmp_path, fail)
    assert message.startswith(("3: ", "4: ")) and FAILURES[fail] in message and str(tmp_path) in message


def test_a_step_reads_and_writes_each_state_once(tmp_path: Path) -> None:
    ((message, moved),) = run_distributed(train, 1, tmp_path, None)
    num_states = 11 * 2
    assert not message and moved == [2 * num_states * PAGE] * 6


def test_no_room_is_said_when_room_is_reserved(tmp_path: Path) -> None:
    disk = DiskMemory(tmp_path)
    with disk_full_after(PAGE), pytest.raises(TrainingError, match="cannot be reserved: File too large"):
        disk.allocate(PAGE)


def test_memory_links_and_full_disks_are_refused_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = {"/dev/shm/new": "tmpfs", str(tmp_path / "file"): "no folder", "/proc": "not writable"}
    for folder, why in wrong.items():
        with pytest.raises(ConfigError, match=why):
            offload_folder_is_on_a_disk(small_run(offload_folder=folder), MACHINE)
    config = small_run(offload_folder=str(tmp_path / "new"))
    offload_folder_is_on_a_disk(config, MACHINE)
    check_offload_room(config, 1)
    with pytest.raises(ConfigError, match="GiB free"):
        check_offload_room(config, 1 << 60)
