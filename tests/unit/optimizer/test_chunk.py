"""Chunks: their layout against a plain simulation, their buffers, and the original's faults in both.

Original: Pai-Megatron-Patch, megatron/core/optimizer/chunk.
"""

import random
import threading

import pytest
import torch
from optimizer_runs import on_host

from patch.config.schema import OptimizerConfig
from patch.memory.offload_device import HOST, Copies, Event
from patch.memory.simulated_device import SimulatedDevice, SimulatedOutOfMemory
from patch.memory.staged_copy import StagedCopier
from patch.optimizer.param_groups import ParamGroup
from patch.optimizer.states.chunk import (
    BucketShard,
    Chunk,
    ChunkFullError,
    ChunkManager,
    ShardRange,
    find_best_chunk_size,
)
from patch.optimizer.states.hybrid_adam import HybridAdam

GENEROUS = 1 << 40
DTYPES = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "master_low": torch.int16}


def next_fit(numels: list[int], size: int) -> list[int]:
    """Elements in use of each chunk: the textbook's bins, longer items cut to whole bins and a rest."""
    bins: list[int] = []
    for part in (p for n in numels for p in [size] * (n // size) + [n % size] * (n % size > 0)):
        if bins and bins[-1] + part <= size:
            bins[-1] += part
        else:
            bins.append(part)
    return bins


def random_numels(seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.choice((1, 7, 64, 100, 999, 4096)) for _ in range(generator.randint(1, 60))]


def filled(numels: list[int], size: int, device: SimulatedDevice | None = None) -> ChunkManager:
    device = device or SimulatedDevice(GENEROUS)
    manager = ChunkManager(size, device, StagedCopier(device))
    for shard, numel in enumerate(numels):
        manager.register(shard, ShardRange(0, numel, shard % 2, needs_extra_reduction=False), DTYPES)
    manager.finish_registration()
    return manager


@pytest.mark.parametrize("seed", range(8))
def test_registration_is_next_fit_and_cuts_what_is_longer_than_a_chunk(seed: int) -> None:
    numels = random_numels(seed)
    for size in (1, 50, 128, 5000):
        manager = filled(numels, size)
        assert [chunk.numel for chunk in manager.chunks] == next_fit(numels, size)
        assert [chunk.index for chunk in manager.chunks] == list(range(len(manager.chunks)))
        ranges = (part for chunk in manager.chunks for part in chunk.ranges)
        seen = [(part.shard, element) for part in ranges for element in range(part.begin, part.end)]
        assert seen == [(shard, element) for shard, numel in enumerate(numels) for element in range(numel)]


def test_ranges_that_need_an_extra_reduction_have_chunks_of_their_own_behind_the_others() -> None:
    manager = ChunkManager(10, SimulatedDevice(GENEROUS))
    for shard in range(4):
        manager.register(shard, ShardRange(0, 8, group=0, needs_extra_reduction=False), DTYPES)
        manager.register(shard, ShardRange(8, 10, group=1, needs_extra_reduction=True), DTYPES)
    manager.finish_registration()
    assert [chunk.needs_extra_reduction for chunk in manager.chunks] == [False] * 4 + [True]
    assert [range_.shard for range_ in manager.chunks[-1].ranges] == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(8))
def test_search_wastes_least_where_the_original_added_up_the_waste_of_all_candidates(seed: int) -> None:
    numels = random_numels(seed)
    size = find_best_chunk_size(numels)
    unit = -(-sum(numels) // 64)
    candidates = [unit * factor for factor in range(1, 5)]
    assert size == min(candidates, key=lambda each: len(next_fit(numels, each)) * each)  # the first of them


@pytest.mark.parametrize("fraction", [None, 0.0, 0.5, 1.0])
def test_states_of_late_gradients_take_the_bytes_of_their_elements(fraction: float | None) -> None:
    """Chunks of their own, but not as long as those that hold everything else."""
    ranges = [ShardRange(0, 900, 0, False), ShardRange(900, 1000, 1, True)]
    shards = [BucketShard(torch.zeros(1000), torch.zeros(1000).bfloat16(), ranges) for _ in range(2)]
    groups = [ParamGroup([], 0.1), ParamGroup([], 0.0)]
    offload = None if fraction is None else on_host(fraction, 300)
    manager = HybridAdam(shards, OptimizerConfig(lr=1e-3), groups, offload).manager
    assert manager.num_elements == 2000
    assert manager.total_bytes(on_host=True) + manager.total_bytes(on_host=False) == 2000 * (4 + 4 + 2)


def test_tensors_lie_one_behind_the_other() -> None:
    device = SimulatedDevice(GENEROUS)
    chunk = Chunk(10, HOST)
    chunk.append_tensor(torch.arange(4.0).view(2, 2))
    chunk.alloc_tensor(3).fill_(7.0)
    with pytest.raises(ChunkFullError, match="4 elements do not fit behind 7"):
        chunk.alloc_tensor(4)
    twin = chunk.clone(device)
    assert twin.used == 7 and twin.memory is device and not twin.data.any()
    assert chunk.data.tolist() == [0, 1, 2, 3, 7, 7, 7, 0, 0, 0]
    assert device.allocated_bytes == 40


def test_states_on_the_device_have_no_copy_on_the_host() -> None:
    """The original keeps the host's buffer of every chunk."""
    device = SimulatedDevice(GENEROUS)
    manager = filled([1000], 100, device)
    for chunk in manager.chunks[:4]:
        chunk.is_on_host = True
    manager.allocate()
    for _ in range(2):  # a move to where a chunk lies, in the original a KeyError, changes nothing
        assert manager.total_bytes(on_host=True) == 4 * 100 * 10
        assert manager.total_bytes(on_host=False) == 6 * 100 * 10 == device.allocated_bytes
        manager.move(manager.chunks[0], to_host=False)
        manager.move(manager.chunks[9], to_host=True)
    assert manager.offload_fraction == 0.4


class SlowDevice(SimulatedDevice):
    """Nothing reaches it before the gate is opened, or nothing at all."""

    is_broken = False

    def copy_to_device(self, copies: Copies) -> Event:
        assert self.gate.wait(30)
        if self.is_broken:
            raise RuntimeError("a device's own trouble")
        return super().copy_to_device(copies)


def test_states_reach_the_device_while_the_host_goes_on() -> None:
    """The original's moves are blocking copies."""
    device = SlowDevice(GENEROUS)
    device.gate = threading.Event()
    manager = filled([100], 100, device)
    (chunk,) = manager.chunks
    chunk.is_on_host = True
    manager.allocate()
    chunk.states["exp_avg_sq"].data.copy_(torch.arange(100.0))
    manager.move(chunk, to_host=False)
    assert not chunk.is_on_host and not chunk.states["exp_avg_sq"].data.any()
    threading.Timer(0.05, device.gate.set).start()
    ((_, squares),) = chunk.views("exp_avg_sq", 0, 0, 100)  # reading them waits
    assert torch.equal(squares, torch.arange(100.0))
    manager.move(chunk, to_host=True)
    device.is_broken = True
    manager.move(chunk, to_host=False)  # what did not reach the device does not come back from there
    with pytest.raises(RuntimeError, match="a device's own trouble"):
        manager.move(chunk, to_host=True)


def test_a_device_that_is_full_says_so_and_the_chunk_stays() -> None:
    device = SimulatedDevice(100 * 10 + 500)  # room for one of three states
    manager = filled([200], 100, device)
    manager.chunks[1].is_on_host = True
    manager.allocate()
    with pytest.raises(SimulatedOutOfMemory, match="--simulated-device-memory"):
        manager.move(manager.chunks[1], to_host=False)
    assert manager.chunks[1].is_on_host
    assert all(state.memory is HOST for state in manager.chunks[1].states.values())
