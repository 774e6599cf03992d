"""Chunks that move at random, each rank's for itself, change no bit.

Some steps use a part of the model only, some are begun and not taken, and weights are loaded midway.
"""

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import run_distributed
from optimizer_runs import (
    LR,
    ZERO_STAGES,
    OddModel,
    accumulate,
    data_parallel_groups,
    make_steps,
    take_step,
    weights_of,
)

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.memory import UNLIMITED, SimulatedDevice
from patch.optimizer import OverlappedDistributedOptimizer, host_update
from patch.optimizer.hybrid_adam import Offload
from patch.optimizer.kernels import AdamScalars, Segment, adam_kernel
from patch.optimizer.placement import Memory, Move, Placed

NUM_STEPS = 20
CLIPPED, FREE = 0.3, 0.0
CASES = [
    (zero_stage, *case)
    for zero_stage in ZERO_STAGES
    for case in ((torch.bfloat16, FREE), (torch.float16, CLIPPED))
]
"""Without clipping all that was speculated is committed, with it all is updated after backward."""


class RandomPolicy:
    """Before about half of the steps, each chunk goes anywhere."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.num_moves = 0

    def moves(self, chunks: Sequence[Placed], memory: Memory) -> list[Move]:
        if self._random.random() < 0.5:
            return []
        wanted = [Move(chunk, self._random.random() < 0.6, "chance") for chunk in chunks]
        found = [move for move in wanted if move.to_host != move.chunk.is_on_host]
        self.num_moves += len(found)
        return found


class SlowKernel:
    """The host's kernel, late at random: the host has not updated when others need its weights."""

    def __init__(self) -> None:
        self._kernel, self._random = adam_kernel(torch.device("cpu")), random.Random(0)

    def update(self, segments: Sequence[Segment], scalars: AdamScalars) -> None:
        time.sleep(self._random.choice((0.0, 0.005)))
        self._kernel.update(segments, scalars)


class Shortened(OddModel):
    """Leaves out its last layer where it is told to: nothing in its forward waits for those weights."""

    is_short = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(batch)).square().mean() if self.is_short else super().forward(batch)


def train(
    rank: int, zero_stage: ZeroStage, dtype: torch.dtype, clip_grad: float, policy: RandomPolicy | None
) -> dict[str, Any]:
    """Norms and weights; every fourth step is not taken, step 10 begins with loaded weights."""
    model = Shortened(dtype=dtype)
    offload = None if policy is None else Offload(SimulatedDevice(UNLIMITED), policy, 60)  # type: ignore[arg-type]
    config = OptimizerConfig(lr=LR, clip_grad=clip_grad, reduce_bucket_size=200, initial_loss_scale=1024.0)
    optimizer = OverlappedDistributedOptimizer([model], config, zero_stage, data_parallel_groups(), offload)
    norms = []
    for index, step in enumerate(make_steps(NUM_STEPS, 2, 2)):
        batches = [batch.to(dtype) for batch in step[rank]]
        model.is_short = index % 3 == 1
        optimizer.apply_placement()
        if index == 10:
            model.load_state_dict(OddModel(seed=7, dtype=dtype).state_dict())
            optimizer.reload_model_params()
        if index % 4 == 3:
            accumulate(model, optimizer, batches)
        else:
            norms.append(take_step(model, optimizer, batches))
    optimizer.finish_param_sync()
    return {"norms": norms, "weights": weights_of(model), "moves": policy.num_moves if policy else 0}


def run_all(rank: int, world_size: int) -> dict[tuple, list[dict[str, Any]]]:
    host_update.adam_kernel = lambda device: SlowKernel()  # type: ignore[assignment]
    return {case: [train(rank, *case, policy) for policy in (None, RandomPolicy(rank))] for case in CASES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple, list[dict[str, Any]]]]:
    return run_distributed(run_all, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_moves_change_no_bit(ranks: list, case: tuple) -> None:
    for found in ranks:
        resident, moved = found[case]
        assert moved["moves"] > 20 and moved["norms"] == resident["norms"]
        for name, weight in resident["weights"].items():
            assert np.isfinite(weight).all() and np.array_equal(moved["weights"][name], weight), name
