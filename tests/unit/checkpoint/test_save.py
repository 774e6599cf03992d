"""A save changes nothing that it was given; in the background the state may change at once."""

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from fake_device import COPIES_FIRST, LATE, FakeDevice
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from patch import compat
from patch.checkpoint import host_copies, latest_iteration, load_checkpoint, save_checkpoint
from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.save import Save
from patch.errors import CheckpointError
from patch.storage.lock import hold_run

ROWS = 4096


def state(value: float, rank: int = 0, world_size: int = 1, columns: int = 256) -> dict[str, Any]:
    """Two tensors, of which one is a part of a larger buffer."""
    whole = torch.full((ROWS, columns), value)
    part = torch.full((2 * ROWS,), value, dtype=torch.bfloat16)[ROWS:]
    return {
        "model": {
            "whole": ShardedTensor.from_rank_offsets("whole", whole, (0, rank, world_size)),
            "part": ShardedTensor.from_rank_offsets("part", part, (0, rank, world_size)),
        }
    }


def values(root: Path, iteration: int, rank: int, world_size: int) -> set[float]:
    target = state(-1.0, rank, world_size)
    load_checkpoint(root, iteration, target)
    return {float(value) for shard in target["model"].values() for value in shard.data.unique()}


def save_while_the_state_changes(rank: int, world_size: int, folder: str) -> list[Any]:
    """What each save came to, and what is there when one was given up."""
    compat.apply(cuda=False)
    root, copies, found = Path(folder), HostCopies(), []
    sections = state(1.0, rank, world_size)
    for iteration in (1, 2):
        for shard in sections["model"].values():
            shard.data.fill_(float(iteration))
        save = Save(root, iteration, sections, {"iteration": iteration}, copies)
        save.wait_for_copies()
        busy = save.is_busy
        for shard in sections["model"].values():
            shard.data.fill_(99.0)
        save.finish()
        found.append((busy, values(root, iteration, rank, world_size), latest_iteration(root)))
    given_up = Save(root, 4, sections, {}, copies)
    given_up.abandon()
    dist.barrier()
    found.append((given_up.is_busy, latest_iteration(root)))
    save_checkpoint(root, 5, sections, {})
    return [*found, values(root, 5, rank, world_size), sorted(os.listdir(root))]


def test_checkpoint_has_the_values_of_its_start_and_one_given_up_is_cleared_by_the_next(tmp_path):
    saved = ["iter_0000001", "iter_0000002", "iter_0000005", "latest_checkpointed_iteration.txt"]
    for found in run_distributed(save_while_the_state_changes, 2, str(tmp_path)):
        assert found == [(True, {1.0}, 1), (True, {2.0}, 2), (False, 2), {99.0}, saved]


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


def test_copies_lie_in_blocks_of_limited_size_that_the_next_save_uses_again(monkeypatch):
    monkeypatch.setattr(host_copies, "_BLOCK", 100)
    copies, sizes, places = HostCopies(), [8, 12, 1, 40, 3, 0, 7], []
    for first in (0.0, 100.0):
        values = [torch.full((size,), first + number) for number, size in enumerate(sizes)]
        copied = copies.prepare([*values])()
        assert all(map(torch.equal, copied, values))
        assert list(map(len, copies._blocks)) == [100, 100, 160, 100]
        places.append([block.data_ptr() for block in copies._blocks])
    assert places[0] == places[1]


class CopiesOn(HostCopies):
    """Of a fake device, to pinned memory."""

    def __init__(self, fake: FakeDevice) -> None:
        super().__init__()
        self._fake = fake

    def _reserve(self, number: int, num_bytes: int, *, is_pinned: bool) -> None:
        self._blocks[number:] = [self._fake.pinned(num_bytes, torch.uint8)]


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


def test_save_refuses_common_values_that_could_not_be_read_back(one_process, tmp_path):
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save_checkpoint(tmp_path, 1, state(1.0), {"optimizer": object()})


def test_save_and_load_do_not_change_the_shards(one_process, tmp_path):
    def stacked() -> ShardedTensor:
        return ShardedTensor.from_rank_offsets("w", torch.ones(4, 4), (0, 0, 1), prepend_axis_num=1)

    saved, loaded = {"model": {"w": stacked()}}, {"model": {"w": stacked()}}
    save_checkpoint(tmp_path, 1, saved, {"iteration": 1})
    load_checkpoint(tmp_path, 1, loaded)
    for given in (saved, loaded):
        assert set(given) == {"model"} and set(given["model"]) == {"w"}
        assert given["model"]["w"].data.shape == (4, 4)


@pytest.mark.parametrize("is_lost_while_it_writes", [False, True])
def test_run_whose_lock_was_taken_over_removes_nothing_of_the_new_owner(
    one_process, tmp_path, is_lost_while_it_writes
):
    """Which writes the same checkpoint at the moment."""
    root = tmp_path / "checkpoint"
    theirs = root / "iter_0000002.tmp" / "__0_0.distcp"

    def lose() -> None:
        (tmp_path / ".lock").write_text("process 1 on elsewhere since today\nanother token\n")
        theirs.parent.mkdir(parents=True, exist_ok=True)
        theirs.write_bytes(b"theirs")

    with hold_run(tmp_path):
        if not is_lost_while_it_writes:
            lose()
        with pytest.raises(CheckpointError, match="now belongs to process 1 on elsewhere since today"):
            saving = Save(root, 2, state(2.0), {"iteration": 2})
            lose()
            saving.finish()
    assert theirs.is_file() and latest_iteration(root) is None
