"""megatron-core's self-attention with RoPE by a table of cosines and sines, computed once per micro-batch.

megatron-core computes cosines and sines for q and k in each layer and rotates by a dozen operations. It keeps
views of the merged QKV product for backward. Here one step splits and rotates the merged product, so backward
needs only attention's q, k and v. The bits are megatron-core's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch.autograd.function import once_differentiable

from patch.model.kernels import LayerKernels, layer_kernels


class TableAttention(Attention):
    """Mixin before an attention class: `rotary_pos_emb` is a table of `RotaryTable`."""

    def __init__(self, *arguments: Any, is_fused: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._kernels = layer_kernels(is_fused)
        self._table: torch.Tensor | None = None
        """[2, S, B or 1, 1, D / 2] during forward, or None; D counts the rotated channels."""

    def forward(
        self, hidden_states: torch.Tensor, *arguments: Any, rotary_pos_emb: torch.Tensor, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run megatron-core's forward without its own RoPE."""
        self._table = rotary_pos_emb
        try:
            return super().forward(hidden_states, *arguments, **named)
        finally:
            self._table = None


class RotaryAttention(TableAttention, SelfAttention):
    """SelfAttention that splits and rotates q and k in one step."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._has_head_norms = not isinstance(self.q_layernorm, IdentityOp | None)

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated q [S, B, N, D], rotated k and v [S, B, G, D] from hidden states [S, B, H]."""
        assert self._table is not None, "called by forward only"
        if self._has_head_norms:  # the norms are between split and rotation
            query, key, value = super().get_query_key_value_tensors(hidden_states)
            query, key = (ApplyRotary.apply(heads, self._table, self._kernels) for heads in (query, key))
            return query, key, value
        mixed, _ = super().get_query_key_value_tensors(hidden_states, split_qkv=False)
        return _SplitAndApplyRotary.apply(mixed, self._table, self._kernels)


class ApplyRotary(torch.autograd.Function):
    """Rotation of heads [S, B, heads, D] by a table."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, table: torch.Tensor, kernels: LayerKernels) -> torch.Tensor:
        """See LayerKernels."""
        ctx.save_for_backward(table)
        ctx.kernels = kernels
        return kernels.rotate(heads, table, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient, rotated back."""
        (table,) = ctx.saved_tensors
        return ctx.kernels.rotate(gradient, table, back=True), None, None


class _SplitAndApplyRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, table: torch.Tensor, kernels: LayerKernels
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(table)
        ctx.kernels = kernels
        return kernels.split_qkv(mixed, table)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        (table,) = ctx.saved_tensors
        return ctx.kernels.join_qkv(query, key, value, table), None, None
