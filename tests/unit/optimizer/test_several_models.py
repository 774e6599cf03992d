"""Several models, each with its optimizer, over the same ranks: messages have one order on all ranks."""

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from weakref import ref

import torch
from distributed_runner import run_distributed
from optimizer_runs import OddModel, SlowKernel, build_optimizer, host_kernel, make_steps, on_host, take_step

from patch.config.choices import ZeroStage

CHUNK_S = 0.002
"""Of the slow host."""
SHARED = tuple(ZeroStage)[1:]


def _train(rank: int, zero_stage: ZeroStage, seeds: Sequence[int]) -> list[torch.Tensor]:
    """The weights of models that are trained in turns."""
    pairs = []
    for seed in seeds:
        model, changes = OddModel(seed), {"clip_grad": 1e-3, "reduce_bucket_size": 200}
        pairs.append((model, build_optimizer(model, zero_stage, offload=on_host(1.0), **changes)))
    for step in make_steps(3, 2, 2):
        for model, optimizer in pairs:
            take_step(model, optimizer, step[rank])
    found = []
    for model, optimizer in reversed(pairs):
        with optimizer.full_weights():
            found += [parameter.detach().clone() for parameter in model.parameters()]
    return found


def _leave(rank: int, zero_stage: ZeroStage) -> None:
    model = OddModel(0)
    optimizer = build_optimizer(model, zero_stage)
    take_step(model, optimizer, make_steps(1, 2, 2)[0][rank])
    optimizer.finish_param_sync()
    gone = ref(model), ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None]


def _compare(rank: int, world_size: int) -> None:
    for zero_stage in ZeroStage:
        _leave(rank, zero_stage)
    for zero_stage in SHARED:
        with host_kernel(SlowKernel(CHUNK_S)) if rank == 1 else nullcontext():
            in_turns = _train(rank, zero_stage, (0, 1))
        alone = _train(rank, zero_stage, (1,)) + _train(rank, zero_stage, (0,))
        assert all(map(torch.equal, in_turns, alone))


def test_late_updates_beside_messages_of_another_model_change_no_bit_and_nobodys_leave_no_memory() -> None:
    run_distributed(_compare, 2)
