"""Selective recomputation (`AC=sel`): backward recomputes what is large and cheap, but no matrix product.

    norms        their outputs (upstream's `layernorm`), except in fp32 on a CPU and with --precision-align
    activation   silu(gate), up plus its offset, and their product: three of an MLP's five widths (this file)
    attention    only with --precision-align, where the eager one keeps its scores (upstream's `core_attn`)

Fused attention keeps no scores, so recomputing it, as upstream does by default, saves nothing.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP


def recomputed_modules(dtype: torch.dtype, aligned: Set[str], *, cuda: bool) -> list[str]:
    """Upstream's `recompute_modules` for AC=sel.

    Norms are left out if torch computes them by several operations, each of which adds a gradient to the
    norm's input. If they were recomputed, these gradients would be summed before the residual's gradient is
    added instead of after it, which gives other bits.

    Args:
        dtype: the dtype of activations.
        aligned: the operations (of `SOURCES`) in Hugging Face's order.
        cuda: whether the model is on a GPU.
    """
    is_one_operation = "rmsnorm" not in aligned and (cuda or dtype != torch.float32)
    attention = ["core_attn"] if "attention" in aligned else []
    return [*attention, "layernorm"] if is_one_operation else attention


class RecomputingMLP(MLP):
    """Upstream's gated MLP with an activation that is recomputed in backward."""

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        """[S, B, H] in; [S, B, H] and no bias out.

        The memory of the product of gate and up is freed after the second layer has read it. The product is
        recomputed when that layer's gradient arrives.
        """
        gate_up, _ = self.linear_fc1(hidden_states)
        recomputed = CheckpointWithoutOutput()
        product = recomputed.checkpoint(self._activate, gate_up)
        output, _ = self.linear_fc2(product)
        recomputed.discard_output_and_register_recompute(output)
        return output, None

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[S, B, 2 F] to [S, B, F], by the operations of upstream's `MLP.forward` (mlp.py:218-228)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.config.activation_func(gate) * (up + self.config.glu_linear_offset)
