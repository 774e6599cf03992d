"""Weights that are gathered in 8 bits: every wait, contexts of whole weights, and a rank without memory.

The waits: the product's own code runs on a device that executes as late, or as early, as it may
(fake_device.py); it is told that streams can wait. Whole training runs: training/test_bits.py.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from fake_device import AT_ONCE, COMPUTE_FIRST, COPIES_FIRST, LATE, FakeDevice, Order
from fake_offload import on
from optimizer_runs import LR, build_optimizer, data_parallel_groups, make_steps, take_step

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.errors import PatchError
from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer.buckets.fp8_params import Fp8GatheredParams

ORDERS: tuple[Order, ...] = (LATE, COPIES_FIRST, COMPUTE_FIRST, 0, 1, 2, 3)
RATES = (0.1, 0.4, 1.5, 6.0)
"""Of the steps: so high that each step changes the scales, which are powers of two."""


class _Product(torch.autograd.Function):
    """A product with a weight that has one byte a number."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        whole = weight.to(inputs.dtype)
        if weight.itemsize == 1:
            whole = whole * weight.scale_inv.to(inputs.dtype)  # type: ignore[attr-defined]
        ctx.save_for_backward(inputs, whole)
        return inputs @ whole.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, whole = ctx.saved_tensors
        return gradients[0] @ whole, gradients[0].t() @ inputs


class _Layers(torch.nn.Module):
    """Two matrices in 8 bits, which buckets of 200 elements cut, and vectors in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(23, 31), torch.nn.Linear(31, 7)
        self.to(torch.bfloat16)
        for layer in (self.first, self.last):
            layer.weight.gather_dtype = torch.float8_e4m3fn  # type: ignore[assignment]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(_Product.apply(inputs, self.first.weight) + self.first.bias)
        return (_Product.apply(hidden, self.last.weight) + self.last.bias).square().mean()


def _in_8_bits(optimizer: OverlappedDistributedOptimizer) -> list[Fp8GatheredParams]:
    return [flat for flat in optimizer.param_buffer.flats if isinstance(flat, Fp8GatheredParams)]


def trained(order: Order, level: ZeroStage) -> tuple[list[float], list[np.ndarray]]:
    """Norms and losses of some steps, and of one pass more; bytes, if they are still there, and scales."""
    fake = FakeDevice(order)
    with fake.executing():
        model = _Layers()
        steps = [[batch.bfloat16() for batch in step[0]] for step in make_steps(len(RATES), 1, 2)]
    with on(fake):
        fake.adopt(list(model.parameters()))
        groups = data_parallel_groups()
        groups.dp_cp = dist.ProcessGroup(1, 2)
        config = OptimizerConfig(lr=LR, clip_grad=0.3, reduce_bucket_size=200, param_persistence_threshold=0)
        optimizer = OverlappedDistributedOptimizer([model], config, level, groups)
        optimizer.schedule._can_wait_elsewhere = True
        for flat in _in_8_bits(optimizer):
            flat._can_wait_elsewhere = True
        norms, losses = [], []
        for rate, (first, last) in zip(RATES, steps, strict=True):
            optimizer.zero_grad(rate)
            with optimizer.no_sync():
                losses.append(model(first))
                losses[-1].backward()
            losses.append(model(last))
            losses[-1].backward()
            norms.append(optimizer.step().grad_norm)
        with torch.no_grad():
            losses.append(model(last))
        fake.compute.synchronize()
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    assert all(weight.dtype == torch.float8_e4m3fn for weight in weights)
    gathered = [weight.detach().view(torch.uint8).numpy() for weight in weights]
    scales = [weight.scale_inv.numpy() for weight in weights]
    return norms + [loss.item() for loss in losses], gathered + scales


@pytest.mark.long
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("level", [ZeroStage.OPTIMIZER, ZeroStage.PARAMETERS])
def test_no_order_of_execution_changes_a_bit(level: ZeroStage) -> None:
    expected_numbers, expected_weights = trained(AT_ONCE, level)
    assert np.isfinite(expected_numbers).all() and len(set(expected_numbers)) == len(expected_numbers)
    for order in ORDERS:
        numbers, weights = trained(order, level)
        assert numbers == expected_numbers, order
        for found, right in zip(weights, expected_weights, strict=True):
            assert np.array_equal(found, right), order


def _read_whole(rank: int, world_size: int) -> None:
    model = _Layers()
    optimizer = build_optimizer(model, ZeroStage.OPTIMIZER, reduce_bucket_size=200)
    (step,) = make_steps(1, 2, 1)
    take_step(model, optimizer, [step[rank][0].bfloat16()])
    _fail_without_memory(optimizer, rank)
    _read_in_contexts(model, optimizer)


def _fail_without_memory(optimizer: OverlappedDistributedOptimizer, rank: int) -> None:
    (flat,) = _in_8_bits(optimizer)

    def allocate() -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory here")

    if rank == 1:
        flat.new_whole = allocate  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError if rank else PatchError, match="no memory here"):
        with optimizer.full_weights():
            pytest.fail("weights are not whole")
    vars(flat).pop("new_whole", None)


def _read_in_contexts(model: _Layers, optimizer: OverlappedDistributedOptimizer) -> None:
    weight = model.first.weight
    assert weight.dtype == torch.float8_e4m3fn
    products = [each for each in model.parameters() if hasattr(each, "scale_inv")]
    places = [tensor.data_ptr() for each in products for tensor in (each, each.scale_inv)]
    assert len(products) > 1 and not any(place % 16 for place in places)  # cuBLAS asks for it
    gathered = weight.detach().view(torch.uint8).clone()
    with optimizer.full_weights():
        whole = weight.detach().clone()
        with optimizer.full_weights():
            pass
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, whole)
        assert model.state_dict()["first.weight"].dtype == torch.bfloat16
    assert weight.dtype == torch.float8_e4m3fn and torch.equal(weight.detach().view(torch.uint8), gathered)


def test_whole_weights_last_as_long_as_anyone_reads_and_no_rank_waits_for_one_without_memory() -> None:
    run_distributed(_read_whole, 2, timeout_s=60)
