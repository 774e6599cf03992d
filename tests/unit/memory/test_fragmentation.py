"""auto beside an allocator that reserves more than is allocated: figures as torch's statistics give them."""

from dataclasses import dataclass

import pytest

from patch.memory.cuda_device import Fragmentation
from patch.optimizer.placement import AutoPlacementPolicy, DeviceMemory

GIB = 2**30
TOTAL, FIXED, ACTIVATIONS, THRESHOLD, WASTE = 139 * GIB, 46 * GIB, 20 * GIB, 2 * GIB, 6 * GIB
STEPS = 200


@dataclass
class Chunk:
    """A chunk as placement sees it."""

    index: int
    numel: int = GIB // 10
    is_on_host: bool = True
    stays_on_host: bool = False

    @property
    def num_bytes(self) -> int:
        return 10 * self.numel


class Device:
    """A GPU whose allocator can use all but WASTE of what it reserves, and keeps what was given up."""

    def __init__(self) -> None:
        self.chunks, self.fragmentation = [Chunk(index) for index in range(100)], Fragmentation()
        self.reserved = 90 * GIB
        """Loading left it behind."""
        self.needed = 0

    @property
    def held(self) -> int:
        return FIXED + sum(chunk.num_bytes for chunk in self.chunks if not chunk.is_on_host)

    def place(self, policy: AutoPlacementPolicy) -> None:
        memory = DeviceMemory(TOTAL - self.fragmentation.num_bytes, FIXED)
        for move in policy.moves(self.chunks, memory):
            self.chunks[move.chunk.index].is_on_host = move.to_host
            if move.to_host:
                self.fragmentation.invalidate()

    def step(self, policy: AutoPlacementPolicy, activations: int) -> None:
        before, peak = self.held, self.held + activations
        self.needed = peak + WASTE
        self.reserved = max(self.reserved, self.needed)
        policy.stats.record("train", peak, before)
        if self.fragmentation.update(peak, self.reserved):
            self.reserved = before


@pytest.mark.parametrize("grows_by", [0, 9 * GIB])
def test_auto_leaves_room_for_fragments_and_fills_the_rest(grows_by: int) -> None:
    """Only what is allocated was counted: the device was filled with WASTE still to come."""
    device, policy = Device(), AutoPlacementPolicy(THRESHOLD)
    for step in range(STEPS):
        device.place(policy)
        device.step(policy, ACTIVATIONS + (grows_by if step == 100 else 0))
        assert device.needed <= TOTAL or step == 100, step
    kept_free = THRESHOLD + GIB + (0 if grows_by == 0 else grows_by + GIB)
    assert TOTAL - kept_free <= device.needed <= TOTAL - THRESHOLD


def test_what_a_longer_step_left_reserved_counts_until_something_moves() -> None:
    fragmentation = Fragmentation()
    assert fragmentation.update(5, 90) and fragmentation.num_bytes == 0, "90 are what loading left"
    assert not fragmentation.update(5, 7) and fragmentation.num_bytes == 2
    assert not fragmentation.update(5, 8) and fragmentation.num_bytes == 3
    fragmentation.invalidate()
    assert fragmentation.update(4, 8) and fragmentation.num_bytes == 0
    assert not fragmentation.update(4, 6) and fragmentation.num_bytes == 2
