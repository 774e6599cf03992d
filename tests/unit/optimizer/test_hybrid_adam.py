"""HybridAdam by itself, on shards made by hand: what it holds."""

import pytest
import torch

from patch.config.schema import OptimizerConfig
from patch.memory import UNLIMITED, SimulatedDevice
from patch.optimizer.hybrid_adam import HybridAdam, Offload
from patch.optimizer.layout import BucketShard, ShardRange
from patch.optimizer.placement import StaticPlacementPolicy


def make_shards() -> list[BucketShard]:
    """Two of 1000 bf16 weights; in each, the gradients of 100 are final late."""
    ranges = [ShardRange(0, 900, True, False), ShardRange(900, 1000, False, True)]
    return [BucketShard(torch.zeros(1000), torch.zeros(1000, dtype=torch.bfloat16), ranges) for _ in range(2)]


@pytest.mark.parametrize("fraction", [None, 0.0, 0.5, 1.0])
def test_states_of_late_gradients_take_the_bytes_of_their_elements(fraction: float | None) -> None:
    """Chunks of their own, but not as long as those that hold everything else."""
    device = SimulatedDevice(UNLIMITED)
    offload = None if fraction is None else Offload(device, StaticPlacementPolicy(fraction), 300)
    adam = HybridAdam(make_shards(), OptimizerConfig(lr=1e-3), offload)
    held = adam.manager.total_bytes(on_host=True) + adam.manager.total_bytes(on_host=False)
    assert adam.manager.num_elements == 2000
    assert held == 2000 * (4 + 4 + 2)
