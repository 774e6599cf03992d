"""What `AC=sel` computes again in backward: what is large and cheap, no matrix product among it.

    norms        their outputs (upstream's `layernorm`); neither in fp32 on a CPU nor aligned
    activation   silu(gate), the summand of up, and their product: three of an MLP's five widths (here)
    attention    aligned alone, because the eager one holds its scores (upstream's `core_attn`)

Fused attention holds no scores: to recompute it, as upstream does by default, saves nothing.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP


def recomputed_modules(dtype: torch.dtype, aligned: Set[str], *, cuda: bool) -> list[str]:
    """Upstream's `recompute_modules` of AC=sel.

    A norm is left out where torch makes it of several operations, each with a gradient for the norm's input:
    recomputed, they would be added up before the residual's gradient, not after it, to other bits.

    Args:
        dtype: of activations. aligned: sources in Hugging Face's order of operations.
    """
    is_one_operation = "rmsnorm" not in aligned and (cuda or dtype != torch.float32)
    attention = ["core_attn"] if "attention" in aligned else []
    return [*attention, "layernorm"] if is_one_operation else attention


class RecomputingMLP(MLP):
    """Upstream's gated MLP, which computes the activation again when backward comes to it."""

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        """[S, B, H] in; [S, B, H] and no bias out.

        The product of gate and up loses its memory once the second layer has read it, and gets it back when
        that layer's gradient comes.
        """
        gate_up, _ = self.linear_fc1(hidden_states)
        recomputed = CheckpointWithoutOutput()
        product = recomputed.checkpoint(self._activate, gate_up)
        output, _ = self.linear_fc2(product)
        recomputed.discard_output_and_register_recompute(output)
        return output, None

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[S, B, 2 F] to [S, B, F], in the operations of upstream's `MLP.forward` (mlp.py:218-228)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.config.activation_func(gate) * (up + self.config.glu_linear_offset)
