"""Gradients of one step in one flat float32 buffer, and how ranks bring them together.

Backward adds each micro-batch's gradient to the parameter's part of the buffer. After the last
micro-batch `reduce` makes them final:

    sequence-parallel norms   summed over TP (each rank saw a part of the tokens), coalesced
    tied embedding            summed over the first and the last pipeline stage
    everything                summed over data-parallel ranks in one all-reduce

Sums, not means: the loss is divided by the step's token count before the first forward, so nothing is
rescaled afterwards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection


class GradientBuffer:
    """Flat gradients of a list of parameters, in the list's order.

    Args:
        parameters: all on one device.
        groups: tp, embd, mp and dp_cp are used.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], groups: ProcessGroupCollection) -> None:
        self.groups = groups
        numels = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(numels), dtype=torch.float32, device=parameters[0].device)
        views = self.flat.split(numels)
        self.of = {
            parameter: view.view(parameter.shape) for parameter, view in zip(parameters, views, strict=True)
        }
        """Each parameter's gradient: float32, the parameter's shape, a view of `flat`."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulate)

    def zero(self) -> None:
        """Forget the last step's gradients."""
        self.flat.zero_()

    @torch.no_grad()
    def reduce(self) -> None:
        """Make every gradient that of the global batch, equal on all data-parallel ranks."""
        norms = [grad for p, grad in self.of.items() if getattr(p, "sequence_parallel", False)]
        if norms and self.groups.tp.size() > 1:
            coalesced = torch.cat([grad.flatten() for grad in norms])
            dist.all_reduce(coalesced, group=self.groups.tp)
            for grad, summed in zip(norms, coalesced.split([grad.numel() for grad in norms]), strict=True):
                grad.copy_(summed.view(grad.shape))
        for parameter, grad in self.of.items():
            if getattr(parameter, "shared_embedding", False):
                dist.all_reduce(grad, group=self.groups.embd)
        if self.groups.dp_cp.size() > 1:
            dist.all_reduce(self.flat, group=self.groups.dp_cp)

    @torch.no_grad()
    def norm(self) -> float:
        """Global L2 norm over the whole model, each weight counted once; sums in float64.

        Weights held by several ranks are left out on all but one: norms on TP ranks above 0, and the
        last stage's copy of a tied embedding.
        """
        counted = [grad for parameter, grad in self.of.items() if self._is_counted(parameter)]
        squares = [torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2 for grad in counted]
        total = torch.stack(squares).sum() if squares else self.flat.new_zeros((), dtype=torch.float64)
        dist.all_reduce(total, group=self.groups.mp)
        return total.sqrt().item()

    def _is_counted(self, parameter: torch.nn.Parameter) -> bool:
        is_copy = getattr(parameter, "shared", False)
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        return not is_copy and (is_cut or self.groups.tp.rank() == 0)

    def _accumulate(self, parameter: torch.nn.Parameter) -> None:
        """Add what autograd left in `.grad` to the float32 buffer, and free it."""
        assert parameter.grad is not None
        self.of[parameter].add_(parameter.grad)
        parameter.grad = None
