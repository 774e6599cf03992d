"""Causal attention with torch's scaled_dot_product_attention, which needs no S x S mask.

On CUDA (fp16, bf16) packed sequences and sliding windows are computed by torch's varlen_attn. Otherwise
packed sequences are computed one after the other, and with a window of W tokens W queries at a time, so that
a mask is at most W x 2W.

It replaces upstream's DotProductAttention (megatron/core/transformer/dot_product_attention.py), which
materialises the scores and needs Transformer Engine for anything faster. `patch.config.backends` orders the
kernels on CUDA; the CPU has one fused kernel.

Shapes: S sequence, B micro-batch, N query heads, G key/value heads of this TP rank, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

from patch.config.backends import SdpaKernel
from patch.model.packed_sequences import PackedSequences
from patch.model.varlen import attend_varlen, takes_varlen

_KERNELS: dict[SdpaKernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class CausalAttention(torch.nn.Module):
    """The `core_attention` of upstream's SelfAttention, with grouped key/value heads.

    Args:
        config: upstream's; `kv_channels` sets the default scale 1/sqrt(D), `window_size` the window.
        kernels: the kernels to try, the preferred one first (`Backends.sdpa`); () on a CPU, which has one.
        softmax_scale: the scale of the scores instead of 1/sqrt(D).
        The other arguments are upstream's builder protocol.
    """

    pads_values = True
    """Whether kernels get values as wide as queries and keys."""
    may_use_varlen = True
    """Whether packed sequences and windows may be computed by another kernel than whole rows."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        kernels: Sequence[SdpaKernel] = (),
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.layer_number = layer_number
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.backends = [_KERNELS[kernel] for kernel in kernels]
        if self.backends == [SDPBackend.MATH]:
            self.may_use_varlen = False
        self.window = None if config.window_size is None else config.window_size[0] + 1
        """How many tokens a token attends to, including itself; None: itself and all tokens before it."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend causally.

        Values with fewer channels are padded to the width of queries and keys, for every kernel to take them.

        Args:
            query: [S, B, N, D]; key: [S, B, G, D] with G dividing N; value: [S, B, G, V] with V at most D.
            attention_mask, attention_bias: None; upstream's protocol passes them.
            packed_seq_params: the sequences of which the rows consist; None: each row is one.
        Returns:
            [S, B, N * V].
        """
        assert attention_mask is None and attention_bias is None
        width = value.shape[3]
        if width == query.shape[3] or not self.pads_values:
            return self._attend_tokens(query, key, value, packed_seq_params)
        wide = F.pad(value, (0, query.shape[3] - width))
        context = self._attend_tokens(query, key, wide, packed_seq_params)
        return context.unflatten(2, (query.shape[2], -1))[..., :width].flatten(2)

    def _attend_tokens(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_seq_params: Any
    ) -> torch.Tensor:
        """Attend as `forward` does: [S, B, N or G, D] in, [S, B, N * D] out."""
        with sdpa_kernel(self.backends, set_priority=True) if self.backends else nullcontext():
            if packed_seq_params is not None:
                return self._attend_packed(query, key, value, packed_seq_params)
            if self.window is not None and self.window < len(query) and self._takes_varlen(query):
                rows = PackedSequences.of_rows(query.shape[1], len(query), query.device)
                return self._attend_packed(query, key, value, rows)
            context = self._attend_rows(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)))
        return context.permute(2, 0, 1, 3).reshape(context.shape[2], context.shape[0], -1)

    def _attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        """Attend within each sequence: [S, B, N or G, D] in, [S, B, N * D] out."""
        length, rows = query.shape[:2]
        query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        if self._takes_varlen(query):
            context = attend_varlen(query, key, value, packed, scale=self.scale, window=self.window)
        else:
            context = self._attend_each(query, key, value, packed)
        return context.reshape(rows, length, -1).transpose(0, 1).contiguous()

    def _takes_varlen(self, query: torch.Tensor) -> bool:
        return self.may_use_varlen and takes_varlen(query)

    def _attend_each(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        """One sequence after the other: [T, N or G, D] in, [T, N, D] out.

        Splitting and concatenating copies each token once in backward; slices would copy all tokens each.
        Batches of sequences of nearly equal length were not faster, not even at 30 tokens.
        """
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        parts = zip(*(tensor.split(packed.lengths, dim=2) for tensor in heads_first), strict=True)
        return torch.cat([self._attend_rows(*part) for part in parts], dim=2)[0].transpose(0, 1)

    def _attend_rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend causally, or within the window: [B, N or G, S, D] in, [B, N, S, D] out."""
        if self.window is None or self.window >= query.shape[2]:
            return self._attend(query, key, value, None)
        return self._attend_in_window(query, key, value, self.window)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend with the given mask, or causally without one: [B, N or G, S, D] in, [B, N, S, D] out."""
        if query.is_cuda and (mask is not None or query.dtype == torch.float32):
            # Only kernels without grouped heads take these, except one that materialises all scores.
            repeats = query.shape[1] // key.shape[1]
            key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=self.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip

    def _attend_in_window(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
    ) -> torch.Tensor:
        """Let each token attend to the last `window` tokens. The work is S x 2W instead of S x S."""
        first = slice(0, window)
        outputs = [self._attend(query[:, :, first], key[:, :, first], value[:, :, first], None)]
        for start in range(window, query.shape[2], window):
            visible = slice(start - window + 1, start + window)
            queries = query[:, :, start : start + window]
            keys, values = key[:, :, visible], value[:, :, visible]
            ones = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=query.device)
            outputs.append(self._attend(queries, keys, values, ones.triu().tril(window - 1)))
        return torch.cat(outputs, dim=2)
