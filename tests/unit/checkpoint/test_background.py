"""A save in the background: the state may change at once; whatever happens then hurts no older checkpoint."""

import os
import random
import resource
import signal
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_runner import _forking, run_distributed
from full_disk import disk_full_after
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from patch import compat
from patch.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.save import Save, start_save
from patch.errors import CheckpointError

ROWS = 4096


def state(rank: int, world_size: int, value: float, columns: int = 256) -> dict[str, Any]:
    """Two tensors, of which one is a part of a larger buffer."""
    whole = torch.full((ROWS, columns), value)
    part = torch.full((2 * ROWS,), value, dtype=torch.bfloat16)[ROWS:]
    return {
        "model": {
            "whole": ShardedTensor.from_rank_offsets("whole", whole, (0, rank, world_size)),
            "part": ShardedTensor.from_rank_offsets("part", part, (0, rank, world_size)),
        }
    }


def fill(sections: dict[str, Any], value: float) -> None:
    for shard in sections["model"].values():
        shard.data.fill_(value)


def values(root: Path, iteration: int, rank: int, world_size: int) -> set[float]:
    target = state(rank, world_size, -1.0)
    load_checkpoint(root, iteration, target)
    return {float(value) for shard in target["model"].values() for value in shard.data.unique()}


def save_while_the_state_changes(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    compat.apply(cuda=False)
    root, copies, found = Path(folder), HostCopies(), {}
    sections = state(rank, world_size, 1.0)
    for iteration in (1, 2):
        fill(sections, float(iteration))
        save = start_save(root, iteration, sections, {"iteration": iteration}, copies)
        save.wait_for_copies()
        busy = save.is_busy
        fill(sections, 99.0)
        while not save.advance():
            pass
        found[iteration] = (busy, values(root, iteration, rank, world_size), latest_iteration(root))

    with disk_full_after(64 * 1024 if rank == 1 else resource.RLIM_INFINITY):
        failing = start_save(root, 3, sections, {}, copies)
        with pytest.raises(CheckpointError) as raised:
            failing.finish()
    dist.barrier()
    found["failed"] = (str(raised.value), latest_iteration(root), sorted(os.listdir(root)))
    given_up = start_save(root, 4, sections, {}, copies)
    given_up.abandon()
    dist.barrier()
    found["given up"] = (given_up.is_busy, latest_iteration(root))
    save_checkpoint(root, 5, sections, {})
    found["after"] = (values(root, 5, rank, world_size), sorted(os.listdir(root)))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_distributed(save_while_the_state_changes, 2, str(tmp_path_factory.mktemp("background")))


def test_checkpoint_has_the_values_of_its_start(found):
    for rank in found:
        for iteration in (1, 2):
            busy, loaded, latest = rank[iteration]
            assert busy and loaded == {float(iteration)} and latest == iteration


def test_writer_that_fails_on_one_rank_is_an_error_on_all_and_leaves_no_trace(found):
    for rank in found:
        message, latest, names = rank["failed"]
        assert "was not written, earlier ones are untouched" in message and "File too large" in message
        assert latest == 2
        assert names == ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]


def test_save_that_is_given_up_is_cleared_by_the_next(found):
    for rank in found:
        assert rank["given up"] == (False, 2)
        loaded, names = rank["after"]
        assert loaded == {99.0} and "iter_0000004.tmp" not in names and "iter_0000005" in names


def save_for_ever(root: Path) -> None:
    """From the newest checkpoint on, each with its iteration as values, which change while it is written."""
    torch.set_num_threads(1)
    compat.apply(cuda=False)
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        iteration, copies, sections = latest_iteration(root) or 0, HostCopies(), state(0, 1, 0.0)
        pending: Save | None = None
        while True:
            iteration += 1
            if pending is not None:
                pending.wait_for_copies()
            fill(sections, float(iteration))
            if pending is not None:
                pending.finish()
            pending = start_save(root, iteration, sections, {}, copies)


class Watched(list):
    """A list that counts, at each replacement, the tensors of its start that are still alive."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._first = [weakref.ref(tensor) for tensor in tensors]
        self.num_alive: list[int] = []

    def __setitem__(self, index, value) -> None:
        super().__setitem__(index, value)
        self.num_alive.append(sum(tensor() is not None for tensor in self._first))


def test_each_tensor_is_released_when_it_is_copied():
    values = Watched([torch.full((8,), float(number)) for number in range(4)])
    copies = HostCopies().prepare(values)()
    assert values.num_alive == [4, 3, 2, 1]
    assert [float(copy[0]) for copy in copies] == [0.0, 1.0, 2.0, 3.0]


def test_kill_while_a_checkpoint_is_written_leaves_the_older_ones(one_process, tmp_path):
    generator, last = random.Random(13), 0
    for _ in range(3):
        process = _forking().Process(target=save_for_ever, args=(tmp_path,))
        process.start()
        deadline = time.monotonic() + 60
        while (latest_iteration(tmp_path) if any(tmp_path.glob("latest*")) else 0) <= last:
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        last = latest_iteration(tmp_path)
        for iteration in range(1, last + 1):
            assert values(tmp_path, iteration, 0, 1) == {float(iteration)}
