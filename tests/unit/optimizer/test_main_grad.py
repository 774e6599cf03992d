"""Gradients that layers add to the grad buffer themselves: the sums of autograd on one process.

One layer is ours; one is plain torch, by the attributes that Transformer Engine reads, in
the order in which it reads them (transformer_engine/pytorch/module/linear.py of 2.11).
"""

from collections.abc import Callable
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
import torch
from distributed_runner import run_distributed
from optimizer_runs import (
    ZERO_STAGES,
    Oracle,
    accumulate,
    assert_same_weights,
    build_optimizer,
    make_steps,
    take_step,
)
from torch.utils.checkpoint import checkpoint

from patch.config.choices import ZeroStage
from patch.model.linear import PLAIN

# Of fp32 weights: a product that adds rounds otherwise than a product and a sum; a last bit is 1.5e-8.
BOUND = 5e-7
SMALL = 300
"""Size of a bucket."""


class _Theirs(torch.autograd.Function):
    reads_mark = True

    @classmethod
    def forward(cls, ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.reads_mark = cls.reads_mark
        ctx.is_fused = hasattr(weight, "__fsdp_param__")
        if ctx.is_fused:
            ctx.get_main_grad = weight.get_main_grad
        return input @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        input, weight = ctx.saved_tensors
        if not ctx.is_fused:
            return gradient @ weight, gradient.t() @ input
        weight.main_grad = main_grad = ctx.get_main_grad()
        own = gradient.t().to(main_grad.dtype) @ input.to(main_grad.dtype)
        main_grad.copy_(own if ctx.reads_mark and weight.overwrite_main_grad else main_grad + own)
        assert not weight.grad_added_to_main_grad
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, torch.nan)  # values that must not be read


class _TheirsIn8Bits(_Theirs):
    """As layernorm_linear.py:871, which asks the 8-bit copy of the weight whether to overwrite."""

    reads_mark = False


class Linear(torch.nn.Linear):
    """A bias stays with autograd."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = PLAIN

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = self.product(input, self.weight)
        return output if self.bias is None else output + self.bias


class TheirLinear(Linear):
    product = staticmethod(_Theirs.apply)


class TheirLinearIn8Bits(Linear):
    product = staticmethod(_TheirsIn8Bits.apply)


class Model(torch.nn.Module):
    """Layers used once, twice in a graph, beside another use, in reentrant checkpoints, for some batches."""

    def __init__(self, num_checkpoints: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self._num_checkpoints = num_checkpoints
        self.first, self.theirs = Linear(23, 31), TheirLinear(31, 23, bias=False)
        self.in_8_bits = TheirLinearIn8Bits(23, 23, bias=False)
        self.twice, self.mixed = Linear(23, 23, bias=False), Linear(23, 23)
        self.nested, self.rare = Linear(23, 23), Linear(23, 23, bias=False)
        self.frozen = Linear(23, 23, bias=False).requires_grad_(False)
        self.gain = torch.nn.Parameter(torch.rand(23))
        self.cut = Linear(23, 3000, bias=False)  # over several buckets

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of inputs [B, 23]."""
        hidden = self.in_8_bits(torch.tanh(self.theirs(torch.tanh(self.first(batch)))))
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(hidden))))
        hidden = torch.tanh(self.frozen(self.mixed(hidden)))
        for _ in range(self._num_checkpoints):
            hidden = checkpoint(lambda x: torch.tanh(self.nested(x)), hidden, use_reentrant=True)
        if batch.sum() > 0:
            hidden = self.rare(hidden)
        own = self.cut(hidden).square().mean() + self.mixed.weight.square().mean()
        return (hidden * self.gain).square().mean() + own


def train(rank: int, zero_stage: ZeroStage, num_micro_batches: int, bucket_size: int) -> None:
    """Three steps of the model and of its oracle; before the second one a backward is done for nothing."""
    build = partial(Model, 1 if zero_stage.shards_gradients else 2)  # there a second one is refused
    model, oracle = build(), Oracle(build(), zero_stage)
    optimizer = build_optimizer(
        model, zero_stage, reduce_bucket_size=bucket_size, gradient_accumulation_fusion=True
    )
    for index, step in enumerate(make_steps(3, 2, num_micro_batches)):
        if index == 1:
            next(model.theirs.parameters()).grad_added_to_main_grad = True  # as after an error
            accumulate(model, optimizer, step[1 - rank])
        take_step(model, optimizer, step[rank])
        oracle.take_step(step)
    buckets = [bucket.range.params for bucket in optimizer.grad_buffer.buckets]
    assert (sum(param.parameter == 0 for param in chain(*buckets)) > 1) == (bucket_size == SMALL)
    with optimizer.full_weights():
        assert_same_weights(model, oracle, atol=BOUND)


def run_all(rank: int, world_size: int) -> None:
    for zero_stage, num_micro_batches, bucket_size in product(ZERO_STAGES, (1, 3), (SMALL, 10**6)):
        train(rank, zero_stage, num_micro_batches, bucket_size)


@pytest.mark.long
def test_sums_are_those_of_one_process_at_every_stage() -> None:
    run_distributed(run_all, 2)


@pytest.mark.usefixtures("one_process")
def test_nothing_is_fused_by_default_on_a_cpu() -> None:
    model = Model(1)
    build_optimizer(model, ZeroStage.NONE)
    assert not hasattr(model.first.weight, "main_grad_writer")
