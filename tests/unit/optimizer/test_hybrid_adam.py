"""HybridAdam by itself, on shards made by hand: what it holds, and what parameter groups change."""

import numpy as np
import pytest
import torch

from patch.config.schema import OptimizerConfig
from patch.memory import UNLIMITED, SimulatedDevice
from patch.optimizer.hybrid_adam import HybridAdam, Offload
from patch.optimizer.kernels import AdamScalars
from patch.optimizer.kernels.numpy_adam import adam
from patch.optimizer.layout import BucketShard, ShardRange
from patch.optimizer.param_groups import ParamGroup
from patch.optimizer.placement import StaticPlacementPolicy

LR, NUM_STEPS = 1e-2, 20
GROUPS = [ParamGroup([], 0.1), ParamGroup([], 0.0), ParamGroup([], 0.3, lr_multiplier=0.25)]
RANGES = [ShardRange(0, 500, 0, False), ShardRange(500, 600, 1, False), ShardRange(600, 1000, 2, True)]
PLACES = [None, 0.0, 0.5, 1.0]
"""Fractions of the states on the host; None: without offload."""
ROUNDING = 1e-5
"""Twenty steps of a weight near 1 in float32 beside float64."""


def offload_of(fraction: float | None) -> Offload | None:
    if fraction is None:
        return None
    return Offload(SimulatedDevice(UNLIMITED), StaticPlacementPolicy(fraction), 300)


def make_shards() -> list[BucketShard]:
    """Two of 1000 bf16 weights; in each, the gradients of 100 are final late."""
    ranges = [ShardRange(0, 900, 0, False), ShardRange(900, 1000, 1, True)]
    return [BucketShard(torch.zeros(1000), torch.zeros(1000, dtype=torch.bfloat16), ranges) for _ in range(2)]


@pytest.mark.parametrize("fraction", PLACES)
def test_states_of_late_gradients_take_the_bytes_of_their_elements(fraction: float | None) -> None:
    """Chunks of their own, but not as long as those that hold everything else."""
    adam = HybridAdam(make_shards(), OptimizerConfig(lr=1e-3), GROUPS, offload_of(fraction))
    held = adam.manager.total_bytes(on_host=True) + adam.manager.total_bytes(on_host=False)
    assert adam.manager.num_elements == 2000
    assert held == 2000 * (4 + 4 + 2)


def start() -> np.ndarray:
    return np.random.default_rng(0).normal(1, 0.1, 1000).astype(np.float32)


def gradients() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 1, (NUM_STEPS, 1000)).astype(np.float32)


def train(fraction: float | None, *, is_decoupled: bool) -> np.ndarray:
    """One shard of three groups after some steps, of which every third is clipped."""
    shard = BucketShard(torch.zeros(1000), torch.from_numpy(start()), RANGES)
    config = OptimizerConfig(lr=LR, decoupled_weight_decay=is_decoupled)
    adam = HybridAdam([shard], config, GROUPS, offload_of(fraction))
    for index, gradient in enumerate(gradients()):
        adam.start_step(LR, 1.0)
        shard.grad.copy_(torch.from_numpy(gradient))
        adam.grad_ready(0)
        adam.start_update(LR, scale_of(index))
        adam.update([0])
        adam.wait_for_update(0, block=True)
    return shard.param.numpy()


def scale_of(index: int) -> float:
    return 0.5 if index % 3 == 0 else 1.0


def in_numpy(*, is_decoupled: bool) -> np.ndarray:
    """The same by the oracle of the kernels, group by group."""
    found = []
    for first, end, group, _ in RANGES:
        states = [start()[first:end], *(np.zeros(end - first, np.float32) for _ in range(2))]
        for index, gradient in enumerate(gradients()):
            scalars = AdamScalars(
                lr=LR * GROUPS[group].lr_multiplier, beta1=0.9, beta2=0.95, eps=1e-8,
                weight_decay=GROUPS[group].weight_decay, step=index + 1, grad_scale=scale_of(index),
                decoupled_weight_decay=is_decoupled,
            )  # fmt: skip
            states = list(adam(states[0], gradient[first:end], *states[1:], scalars))
        found.append(states[0])
    return np.concatenate(found)


def in_torch(*, is_decoupled: bool) -> np.ndarray:
    """The same by torch's optimizer in float64, with a parameter group for each group."""
    parameters = [torch.nn.Parameter(torch.from_numpy(start()[r.begin : r.end]).double()) for r in RANGES]
    groups = [
        {"params": [p], "lr": LR * group.lr_multiplier, "weight_decay": group.weight_decay}
        for p, group in zip(parameters, GROUPS, strict=True)
    ]
    optimizer = (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(groups, betas=(0.9, 0.95))
    for index, gradient in enumerate(gradients()):
        for parameter, r in zip(parameters, RANGES, strict=True):
            parameter.grad = scale_of(index) * torch.from_numpy(gradient[r.begin : r.end]).double()
        optimizer.step()
    return torch.cat(parameters).detach().numpy()


@pytest.mark.parametrize("is_decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("fraction", PLACES)
def test_groups_have_their_own_rate_and_decay(fraction: float | None, is_decoupled: bool) -> None:
    ours = train(fraction, is_decoupled=is_decoupled)
    assert np.array_equal(ours, in_numpy(is_decoupled=is_decoupled))
    np.testing.assert_allclose(ours, in_torch(is_decoupled=is_decoupled), rtol=0, atol=ROUNDING)
