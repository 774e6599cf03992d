"""Chunks between a GPU and its host: the bits of no offload, pinned rings, copies off the compute stream."""

import tempfile
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from optimizer_runs import LR, make_steps, take_step

from patch import compat
from patch.config.schema import OptimizerConfig
from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer.accelerator import CudaAccelerator
from patch.optimizer.hybrid_adam import Offload
from patch.optimizer.placement import StaticPlacementPolicy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, NUM_STEPS, CHUNK = 256, 10, 10_000
CASES = list(product((torch.float32, torch.bfloat16), (0.0, 0.3), (0.0, 0.3, 1.0)))


class Model(torch.nn.Module):
    """About 100 thousand elements; sizes odd."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(23, WIDTH + 1)
        self.middle = torch.nn.Linear(WIDTH + 1, WIDTH + 1)
        self.last = torch.nn.Linear(WIDTH + 1, 7)
        self.to("cuda", dtype)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of inputs [B, 23]."""
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(batch))))).square().mean()


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroupCollection]:
    compat.apply(cuda=True)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield ProcessGroupCollection.use_mpu_process_groups()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def train(
    groups: ProcessGroupCollection, dtype: torch.dtype, clip_grad: float, offload: Offload | None
) -> tuple[list[float], list[np.ndarray]]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = Model(dtype)
    config = OptimizerConfig(lr=LR, clip_grad=clip_grad, reduce_bucket_size=9_000)
    optimizer = OverlappedDistributedOptimizer([model], config, "none", groups, offload)
    norms = [
        take_step(model, optimizer, [batch.to("cuda", dtype) for batch in step[0]])
        for step in make_steps(NUM_STEPS, 1, 2)
    ]
    optimizer.wait_for_weights()
    return norms, [parameter.detach().float().cpu().numpy() for parameter in model.parameters()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_placement_changes_no_bit(groups: ProcessGroupCollection, case: tuple) -> None:
    dtype, clip_grad, fraction = case
    offload = Offload(CudaAccelerator(torch.device("cuda", 0)), StaticPlacementPolicy(fraction), CHUNK)
    norms, weights = train(groups, dtype, clip_grad, offload)
    expected_norms, expected = train(groups, dtype, clip_grad, None)
    assert norms == expected_norms
    assert all(map(np.array_equal, weights, expected))


def test_rings_are_pinned_and_exact() -> None:
    """The original asks for pinned memory and gets pageable."""
    buffer = CudaAccelerator(torch.device("cuda", 0)).pinned(1_000_003, torch.bfloat16)
    assert buffer.is_pinned() and buffer.untyped_storage().nbytes() == 2 * 1_000_003


def test_copies_do_not_hold_up_compute() -> None:
    """A copy of a quarter of a second is queued; compute queued after it ends first."""
    accelerator = CudaAccelerator(torch.device("cuda", 0))
    source = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    target = accelerator.pinned(1 << 30, torch.float32)
    mark = accelerator.to_host([(source, target)])
    torch.ones(8, device="cuda").add_(1)
    torch.cuda.current_stream().synchronize()
    assert not mark.query()
    mark.synchronize()
