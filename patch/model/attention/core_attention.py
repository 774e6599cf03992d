"""Causal attention with torch's scaled_dot_product_attention, which needs no S x S mask.

On CUDA (fp16, bf16) torch's varlen_attn, or the package flash-attn, computes packed sequences and sliding
windows. Elsewhere packed sequences are computed one after the other. A window of W tokens is then computed
for W queries at a time, so that a mask is at most W x 2W.

This replaces megatron-core's DotProductAttention (megatron/core/transformer/dot_product_attention.py), which
materializes the scores and needs Transformer Engine for anything faster. `patch.features.backends` orders the
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
from torch.utils.checkpoint import checkpoint

from patch.features.backends import AttentionKernel
from patch.model.attention.packed_sequences import PackedSequences
from patch.model.attention.varlen import attend_by_package, attend_varlen, takes_package, takes_varlen

_QUERIES = 512
"""Tokens whose capped scores are in memory at a time."""

_KERNELS: dict[AttentionKernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class CausalAttention(torch.nn.Module):
    """The `core_attention` of megatron-core's SelfAttention, with grouped key/value heads.

    Args:
        config: `kv_channels` sets the default scale 1/sqrt(D), `window_size` the window.
        kernels: in order of preference (`Backends.attention`); () on a CPU.
        cap: scores s become cap * tanh(s / cap), by flash-attn 2 or from all scores of _QUERIES tokens at a
            time; no kernel of torch does it.
        has_window: whether this layer has the window.
    """

    pads_values = True
    """Whether values are padded to the width of queries and keys."""
    may_use_varlen = True
    """Whether varlen_attn may compute packed sequences and windows."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        kernels: Sequence[AttentionKernel] = (),
        softmax_scale: float | None = None,
        cap: float | None = None,
        has_window: bool = True,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.layer_number = layer_number
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.backends = [_KERNELS[kernel] for kernel in kernels if kernel in _KERNELS]
        self._has_package, self._is_package_first = "flash_attn" in kernels, kernels[:1] == ("flash_attn",)
        if self.backends == [SDPBackend.MATH] or cap is not None:
            self.may_use_varlen = False
        self.cap = cap
        self.window = config.window_size[0] + 1 if config.window_size and has_window else None
        """Tokens that a token attends to, including itself, or None if it attends to all earlier tokens."""

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
        """Attend causally; the result is [S, B, N * V].

        Values narrower than queries and keys are padded, so that every kernel accepts them.

        Args:
            query, key: [S, B, N, D] and [S, B, G, D] with G dividing N.
            value: [S, B, G, V] with V at most D.
            packed_seq_params: the packed sequences, or None if each row is one sequence.
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
        """[S, B, N or G, D] in, [S, B, N * D] out."""
        is_cut = self.window is not None and self.window < len(query)
        if packed_seq_params is None and self._takes_package(query, is_first=not is_cut and self.cap is None):
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
            context = attend_by_package(query, key, value, None, **self._settings, cap=self.cap)
            return context.transpose(0, 1).flatten(2)
        with sdpa_kernel(self.backends, set_priority=True) if self.backends else nullcontext():
            if packed_seq_params is not None:
                return self._attend_packed(query, key, value, packed_seq_params)
            if is_cut and self._takes_varlen(query):
                rows = PackedSequences.of_rows(query.shape[1], len(query), query.device)
                return self._attend_packed(query, key, value, rows)
            context = self._attend_rows(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)))
        return context.permute(2, 0, 1, 3).reshape(context.shape[2], context.shape[0], -1)

    def _attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        length, rows = query.shape[:2]
        query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        if self._takes_package(query):
            context = attend_by_package(query, key, value, packed, **self._settings, cap=self.cap)
        elif self._takes_varlen(query):
            context = attend_varlen(query, key, value, packed, **self._settings)
        else:
            context = self._attend_each(query, key, value, packed)
        return context.reshape(rows, length, -1).transpose(0, 1).contiguous()

    @property
    def _settings(self) -> dict[str, Any]:
        return {"scale": self.scale, "window": self.window}

    def _takes_package(self, query: torch.Tensor, *, is_first: bool = False) -> bool:
        """Return whether flash-attn 2 attends; with `is_first`, only if no other kernel is preferred."""
        is_used = self._is_package_first if is_first else self._has_package
        return is_used and takes_package(query)

    def _takes_varlen(self, query: torch.Tensor) -> bool:
        return self.may_use_varlen and takes_varlen(query)

    def _attend_each(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        """Attend in one sequence after the other: [T, N or G, D] in, [T, N, D] out."""
        # `split` and `cat` copy each token once in backward; each slice would copy all tokens. Batches of
        # sequences of similar length were not faster, even at 30 tokens.
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        parts = zip(*(tensor.split(packed.lengths, dim=2) for tensor in heads_first), strict=True)
        return torch.cat([self._attend_rows(*part) for part in parts], dim=2)[0].transpose(0, 1)

    def _attend_rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend causally or within the window: [B, N or G, S, D] in, [B, N, S, D] out."""
        if self.cap is not None:
            return self._attend_capped(query, key, value)
        if self.window is None or self.window >= query.shape[2]:
            return self._attend(query, key, value, None)
        return self._attend_in_window(query, key, value, self.window)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend with the mask, or causally if it is None: [B, N or G, S, D] in, [B, N, S, D] out."""
        if query.is_cuda and (mask is not None or query.dtype == torch.float32):
            # For these inputs only the math kernel, which materializes all scores, takes grouped heads.
            repeats = query.shape[1] // key.shape[1]
            key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=self.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip

    def _attend_capped(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend as `_attend_rows`; backward computes the scores again, so that none are kept."""
        outputs, length = [], query.shape[2]
        for start in range(0, length, _QUERIES):
            end = min(start + _QUERIES, length)
            seen = slice(max(0, start - (self.window or length) + 1), end)
            own = query[:, :, start:end], key[:, :, seen], value[:, :, seen]
            first = start - seen.start
            outputs.append(checkpoint(self._from_capped_scores, *own, first, use_reentrant=False))
        return torch.cat(outputs, dim=2)

    def _from_capped_scores(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Attend; the first query is key number `first`."""
        repeats = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
        assert self.cap is not None
        scores = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * (self.scale / self.cap)) * self.cap
        visible = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(first)
        if self.window is not None:
            visible = visible.triu(first - self.window + 1)
        scores = torch.where(visible, scores, torch.finfo(scores.dtype).min)
        return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), value)

    def _attend_in_window(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
    ) -> torch.Tensor:
        first = slice(0, window)
        outputs = [self._attend(query[:, :, first], key[:, :, first], value[:, :, first], None)]
        for start in range(window, query.shape[2], window):
            visible = slice(start - window + 1, start + window)
            queries = query[:, :, start : start + window]
            keys, values = key[:, :, visible], value[:, :, visible]
            ones = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=query.device)
            outputs.append(self._attend(queries, keys, values, ones.triu().tril(window - 1)))
        return torch.cat(outputs, dim=2)
