"""`state_dict` of a rank: training goes on from the file as if it had never stopped, to the bit."""

from itertools import product
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from optimizer_runs import LR, OddModel, make_steps
from small_runs import HALF

from patch.errors import CheckpointError
from patch.optimizer import OptimizerConfig, OverlappedDistributedOptimizer, ZeroStage, build_optimizer

LEVELS = ZeroStage.GRADIENTS, ZeroStage.NONE
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    *((dtype, level, {}) for dtype, level in product(DTYPES, LEVELS)),
    (torch.bfloat16, ZeroStage.GRADIENTS, HALF),
]


def _build(seed: int, case: tuple) -> tuple[OddModel, OverlappedDistributedOptimizer]:
    dtype, stage, changes = case
    model = OddModel(seed, dtype)
    config = OptimizerConfig(lr=LR, reduce_bucket_size=300, optimizer_offload_chunk_size=128, **changes)
    return model, build_optimizer([model], config, stage)


def _train(model: OddModel, optimizer: OverlappedDistributedOptimizer, batches: list) -> None:
    for batch in batches:
        optimizer.zero_grad(LR)
        optimizer.scale_loss(model(batch.to(model.gain.dtype)) / 2).backward()
        optimizer.step()


def _resume(rank: int, world_size: int, folder: Path) -> list[bool]:
    """For each case: whether a resumed run has the weights of the one that was not interrupted.

    States of other shards are refused.
    """
    (_, sharded), (_, replicated) = (_build(0, (torch.float32, level, {})) for level in LEVELS)
    wrong = r"expected \{'exp_avg': 975.*ZeRO stage that they were saved with"
    with pytest.raises(CheckpointError, match=wrong):
        replicated.load_state_dict(sharded.state_dict())
    batches = [step[rank][0] for step in make_steps(4, world_size, 1)]
    found = []
    for case in CASES:
        model, optimizer = _build(0, case)
        _train(model, optimizer, batches[:2])
        torch.save([model.state_dict(), optimizer.state_dict()], folder / f"{rank}.pt")
        _train(model, optimizer, batches[2:])
        resumed, its_optimizer = _build(1, case)
        weights, states = torch.load(folder / f"{rank}.pt")
        resumed.load_state_dict(weights)
        its_optimizer.load_state_dict(states)
        _train(resumed, its_optimizer, batches[2:])
        pairs = zip(model.state_dict().values(), resumed.state_dict().values(), strict=True)
        found.append(
            all(torch.equal(*pair) for pair in pairs) and not torch.equal(weights["gain"], model.gain)
        )
    return found


def test_resumed_training_equals_training_that_was_not_interrupted(tmp_path: Path) -> None:
    for found in run_distributed(_resume, 2, tmp_path):
        assert found == [True] * len(CASES)
