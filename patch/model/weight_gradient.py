"""The gradient of a linear layer's weight, added where the optimizer collects gradients.

Autograd rounds the product of each micro-batch to the weight's type; the optimizer then adds it up. If the
optimizer gives a weight a `main_grad_writer` (MainGradWriter), the product itself is added to the optimizer's
memory, without that rounding: on CUDA by the product's epilogue.

Shapes: M rows (tokens), O outputs, I inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch.autograd.function import once_differentiable


class MainGradWriter(Protocol):
    """The attribute `main_grad_writer` of a weight, for one gradient after the other."""

    def open(self) -> tuple[torch.Tensor, bool]:
        """Where the gradient belongs now, in the shape of the weight; whether to overwrite what is there."""

    def stand_in(self) -> torch.Tensor:
        """What backward returns instead of the gradient: zeros, which are not added to it."""


def weight_gradient(weight: torch.Tensor, gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """What backward returns for a weight: the gradient, or a stand-in for one that is in its place already.

    Args:
        weight: [O, I], the object that the layer got in forward, which autograd's copies are not.
        gradient: [M, O] of the output.
        input: [M, I].
    """
    writer: MainGradWriter | None = getattr(weight, "main_grad_writer", None)
    if writer is None:
        return gradient.t() @ input
    total, is_first = writer.open()
    add_product(total, gradient.t(), input, overwrite=is_first)
    return writer.stand_in()


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, overwrite: bool) -> None:
    """total = total + a @ b; a product of 16-bit factors is not rounded before it is added to float32.

    Args:
        total: [O, I], contiguous.
        a: [O, M].
        b: [M, I], of the type of `a`.
        overwrite: whether total = a @ b, whatever is there.
    """
    beta = 0 if overwrite else 1
    if total.dtype == b.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif has_epilogue(total.device, b.dtype, total.dtype):
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    elif total.dtype == torch.float32 and not total.is_cuda:
        torch.addmm(total, a.float(), b.float(), beta=beta, out=total)
    elif overwrite:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


@cache
def has_epilogue(device: torch.device, factor: torch.dtype, total: torch.dtype) -> bool:
    """Whether torch's product can add to this other type: on CUDA from 16 bits to float32."""
    sums = torch.zeros(16, 16, dtype=total, device=device)
    factors = torch.zeros(16, 16, dtype=factor, device=device)
    try:
        torch.addmm(sums, factors, factors, out_dtype=total, out=sums)
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except RuntimeError:  # NotImplementedError, where there is no such kernel, is one
        return False
    return True


class _Accumulating:
    """What both layers below have in common; upstream's classes call `_forward_impl` for the product."""

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        **unused: Any,
    ) -> torch.Tensor:
        if not hasattr(weight, "main_grad_writer"):
            return super()._forward_impl(  # type: ignore[misc]
                input, weight, bias=bias, allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel, tp_group=tp_group, **unused,
            )  # fmt: skip
        output = _Linear.apply(input, weight, sequence_parallel, allreduce_dgrad, tp_group)
        return output if bias is None else output + bias


class AccumulatingColumn(_Accumulating, ColumnParallelLinear):
    """Upstream's layer, whose weight is cut over TP along its rows; its gradient goes to its writer."""


class AccumulatingRow(_Accumulating, RowParallelLinear):
    """Upstream's layer, whose weight is cut over TP along its columns; its gradient goes to its writer."""


class _Linear(torch.autograd.Function):
    """input @ weight.T with upstream's messages, which overlap with the products that upstream's do."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        is_cut: bool,
        sums_gradient: bool,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
        ctx.weight, ctx.is_cut, ctx.sums_gradient, ctx.group = weight, is_cut, sums_gradient, group
        return (_gathered(input, group)[0] if is_cut else input) @ weight.t()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        gathering = None
        whole, shape = input, gradient.shape[:-1] + weight.shape[1:]
        if input is not None and ctx.is_cut:
            whole, gathering = _gathered(input, ctx.group, async_op=True)
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input, summing = (rows @ weight).view(shape), None
        if ctx.is_cut:
            sums = of_input
            of_input = sums.new_empty(len(sums) // dist.get_world_size(ctx.group), *sums.shape[1:])
            summing = dist.reduce_scatter_tensor(of_input, sums, group=ctx.group, async_op=True)
        elif ctx.sums_gradient:
            summing = dist.all_reduce(of_input, group=ctx.group, async_op=True)
        of_weight = None
        if whole is not None:
            if gathering is not None:
                gathering.wait()
            of_weight = weight_gradient(ctx.weight, rows, whole.reshape(-1, whole.shape[-1]))
        if summing is not None:
            summing.wait()
        return of_input, of_weight, None, None, None


def _gathered(
    part: torch.Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """All ranks' parts of a tensor along its first dimension; they are there when the work is done."""
    whole = part.new_empty(len(part) * dist.get_world_size(group), *part.shape[1:])
    work = dist.all_gather_into_tensor(whole, part.contiguous(), group=group, async_op=async_op)
    return whole, work
