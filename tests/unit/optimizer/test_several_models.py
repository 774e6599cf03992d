"""Several models, each with its optimizer, over the same ranks: messages have one order on all ranks."""

import torch
from distributed_runner import run_distributed
from optimizer_runs import LR, OddModel, SlowKernel, data_parallel_groups, make_steps, take_step

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.memory import UNLIMITED, SimulatedDevice
from patch.optimizer import OverlappedDistributedOptimizer, host_update
from patch.optimizer.hybrid_adam import Offload
from patch.optimizer.placement import StaticPlacementPolicy

CHUNK_S = 0.002
"""Of the slow host."""


def _build(seed: int, zero_stage: ZeroStage) -> tuple[OddModel, OverlappedDistributedOptimizer]:
    model = OddModel(seed)
    config = OptimizerConfig(lr=LR, clip_grad=1e-3, reduce_bucket_size=200)
    offload = Offload(SimulatedDevice(UNLIMITED), StaticPlacementPolicy(1.0), 100)
    return model, OverlappedDistributedOptimizer([model], config, zero_stage, data_parallel_groups(), offload)


def _train(rank: int, zero_stage: ZeroStage, *, waits: bool) -> list[torch.Tensor]:
    """The weights of two models that are trained in turns."""
    pairs = [_build(seed, zero_stage) for seed in (0, 1)]
    for step in make_steps(3, 2, 2):
        for model, optimizer in pairs:
            take_step(model, optimizer, step[rank])
            if waits:
                optimizer.finish_param_sync()
    found = []
    for model, optimizer in reversed(pairs):
        optimizer.finish_param_sync()
        found += [parameter.detach().clone() for parameter in model.parameters()]
    return found


def _compare(rank: int, world_size: int) -> list[bool]:
    if rank == 1:
        host_update.adam_kernel = lambda device: SlowKernel(CHUNK_S)  # type: ignore[assignment]
    found = []
    for zero_stage in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS):
        overlapped, waiting = (_train(rank, zero_stage, waits=waits) for waits in (False, True))
        found.append(all(torch.equal(*pair) for pair in zip(overlapped, waiting, strict=True)))
    return found


def test_late_updates_of_one_model_beside_messages_of_another() -> None:
    assert run_distributed(_compare, 2) == [[True, True]] * 2
