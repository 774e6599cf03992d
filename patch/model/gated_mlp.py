"""The gated MLP: it keeps the merged gate and up for backward, and computes their activation there again.

Upstream's unfused MLP keeps 5.3 values for each of the F channels: gate and up, silu(gate), up plus an offset
of zero, and the product. This one keeps three: gate and up, and the product, which the second layer needs.
With AC=sel it keeps two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable

from patch.model.kernels import LayerKernels, layer_kernels


class GatedMLP(MLP):
    """Upstream's gated MLP without biases, with another activation."""

    activate: Callable[[torch.Tensor], torch.Tensor]
    """[S, B, 2 F] to [S, B, F]."""

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        """[S, B, H] in; [S, B, H] and no bias out."""
        gate_up, _ = self.linear_fc1(hidden_states)
        output, _ = self.linear_fc2(self.activate(gate_up))
        return output, None


class RecomputingMLP(GatedMLP):
    """With AC=sel: the product is recomputed in backward."""

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        """[S, B, H] in; [S, B, H] and no bias out.

        The memory of the product of gate and up is freed after the second layer has read it. The product is
        recomputed when that layer's gradient arrives.
        """
        gate_up, _ = self.linear_fc1(hidden_states)
        recomputed = CheckpointWithoutOutput()
        product = recomputed.checkpoint(self.activate, gate_up)
        output, _ = self.linear_fc2(product)
        recomputed.discard_output_and_register_recompute(output)
        return output, None


def use_activation(mlp: MLP, activate: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give a finished MLP an activation.

    The spec cannot name the subclasses: upstream's TransformerLayer passes the TP group to MLP itself only
    (transformer_layer.py:354). They have no parameters, so changing the class is enough.

    Args:
        mlp: upstream's.
        activate: see `GatedMLP`.
    """
    is_recomputed = mlp.config.recompute_granularity == "selective"
    mlp.__class__ = RecomputingMLP if is_recomputed else GatedMLP
    mlp.activate = activate


def upstreams_activation(config: TransformerConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """The operations of upstream's `MLP.forward` (mlp.py:218-228), for --precision-align."""

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return config.activation_func(gate) * (up + config.glu_linear_offset)

    return activate


def swiglu(gate_up: torch.Tensor, *, is_fused: bool) -> torch.Tensor:
    """silu(gate) * up, of which backward keeps only the merged gate and up.

    Args:
        gate_up: [..., 2 F].
        is_fused: whether in Triton.
    Returns:
        [..., F].
    """
    return _SwiGlu.apply(gate_up, layer_kernels(is_fused))


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, kernels: LayerKernels) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.kernels = kernels
        return kernels.swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return ctx.kernels.swiglu_backward(gradient, gate_up), None
