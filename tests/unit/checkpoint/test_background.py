"""A save in the background: the state may change at once; whatever happens then hurts no older checkpoint."""

import os
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from fake_device import COPIES_FIRST, LATE, FakeDevice
from full_disk import disk_full_after
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from patch import compat
from patch.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.save import start_save
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


class CopiesOn(HostCopies):
    """Of a fake device, to pinned memory."""

    def __init__(self, fake: FakeDevice) -> None:
        super().__init__()
        self._fake = fake

    def _reserve(self, num_bytes: int, *, is_pinned: bool) -> None:
        self._buffer = self._fake.pinned(num_bytes, torch.uint8)


@pytest.mark.parametrize("order", [LATE, COPIES_FIRST])
def test_copies_of_a_gpu_follow_what_was_queued_there(order) -> None:
    """They are made in a thread of the GPU, when compute has not come to it yet, and are there in the end."""
    fake = FakeDevice(order)
    with fake.executing():
        weights = torch.zeros(6)
    with fake:
        fake.adopt([weights])
        weights.add_(1.0)
        copy = CopiesOn(fake).prepare([weights])
        with fake.in_thread("checkpoint"):
            with pytest.raises(AssertionError, match="has not called set_device"):
                copy()
            fake.set_device(0)
            (copied,) = copy()
        assert copied.numpy().tolist() == [1.0] * 6
