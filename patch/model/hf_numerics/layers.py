"""Hugging Face's order of operations, where the fast order gives other bits (`--precision-align`).

Each class replaces a module with the same parameters, or the product of a linear layer. On the CPU at TP=1
logits, loss and every weight gradient are bitwise equal to transformers. `llama-patch align` measures how
much each fast form differs. RoPE (unfused), residual and embedding need no such class, because their fast
forms have Hugging Face's order.

Matrix products use batch-first memory as in Hugging Face, because the gradient of a weight is a sum over
tokens in memory order. Shapes: S sequence, B micro-batch, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, Self

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from patch.families import ModelConfig, expert_layers, is_llama_like, traits_of
from patch.model.attention.alibi import slopes
from patch.model.attention.core_attention import CausalAttention
from patch.model.linear import NO_COLLECTIVES, Product, TPCollectives
from patch.model.norm import HeadRMSNorm, LayerNorm, RMSNorm

SOURCES = ("rmsnorm", "rope", "swiglu", "qkv", "gate_up", "attention")
"""LLaMA's operations whose fast form may differ from Hugging Face's. RoPE's only form has that order."""

_OF_BLOOM = ("layernorm", "gelu", "attention")
_OF_LATENTS = ("rmsnorm", "rope", "swiglu", "gate_up", "attention")


def sources_of(model: ModelConfig) -> tuple[str, ...]:
    """Return the operations of a model that have a form in Hugging Face's order; empty for other models."""
    if traits_of(model).is_bloom_like:
        return _OF_BLOOM
    if not is_llama_like(model):
        return ()
    sources = _OF_LATENTS if model.is_latent else SOURCES
    return (*sources, "experts") if expert_layers(model) else sources


class AlignedRMSNorm(RMSNorm):
    """RMSNorm that rounds to the weight's dtype before it multiplies by the weight."""

    def forward(self, hidden_sbh: torch.Tensor) -> torch.Tensor:
        """Normalize [S, B, ...] over the last dimension; same shape and dtype.

        The input is not copied, so that autograd sums its three gradients (residual, product, square) in
        Hugging Face's order. The gradient of the weight is a batch-first sum over tokens.
        """
        wide = hidden_sbh.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        batch_first = normed.to(hidden_sbh.dtype).transpose(0, 1).contiguous()
        return (self.weight * batch_first).transpose(0, 1)


class AlignedHeadRMSNorm(AlignedRMSNorm, HeadRMSNorm):
    """AlignedRMSNorm of each query or key head."""

    def forward(self, heads_sbnd: torch.Tensor) -> torch.Tensor:
        """Normalize [S, B, N, D]. The gradient of the weight is a sum in the memory order [B, N, S]."""
        heads_bnsd = super().forward(heads_sbnd).permute(1, 2, 0, 3)
        if heads_bnsd.requires_grad:
            heads_bnsd.register_hook(torch.Tensor.contiguous)
        return heads_bnsd.permute(2, 0, 1, 3)


class AlignedLayerNorm(LayerNorm):
    """LayerNorm whose gradients of weight and bias are batch-first sums over tokens."""

    def forward(self, hidden_sbh: torch.Tensor) -> torch.Tensor:
        """Normalize [S, B, H]; same shape and dtype."""
        return super().forward(hidden_sbh.transpose(0, 1).contiguous()).transpose(0, 1)


class HFLinear(Product):
    """Batch-first products by autograd, with megatron-core's collectives; with TP > 1 a row layer's sum
    differs.

    Adapters are computed with the products. Autograd then sums the gradients of the input in PEFT's order:
    the last part first, and in each part the adapter before the weight.
    """

    adapt: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Adds the adapter of a part to its output, from the layer's input; None: the layer has no adapters."""

    adds_bias = True
    num_parts = 1
    """The number of products; a merged weight has one product per Hugging Face tensor."""

    def of(self, weight: torch.nn.Parameter | None) -> Self:
        """See Product; each layer may adapt its own output."""
        return copy(self)

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        messages: TPCollectives = NO_COLLECTIVES,
    ) -> torch.Tensor:
        """See Product."""
        if messages.is_cut:
            input = gather_from_sequence_parallel_region(
                input.contiguous(), tensor_parallel_output_grad=True, group=messages.group
            )
        batch_first = input.transpose(0, 1).contiguous()
        if messages.sums_gradient:
            batch_first = copy_to_tensor_model_parallel_region(batch_first, group=messages.group)
        return self.multiply(batch_first, weight, bias).transpose(0, 1)

    def multiply(
        self, hidden_bsh: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply [B, S, inputs] by each part of the weight; [B, S, outputs] out."""
        outputs: list[torch.Tensor] = []
        biases = [None] * self.num_parts if bias is None else self._split(bias)
        for number, of_part in enumerate(zip(self._split(weight), biases, strict=True)):
            output = F.linear(hidden_bsh, *of_part)
            outputs.append(output if self.adapt is None else self.adapt(number, output, hidden_bsh))
        return self._merge(outputs)

    def _split(self, merged: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each part of a weight or a bias."""
        return [merged] if self.num_parts == 1 else list(merged.chunk(self.num_parts))

    def _merge(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class SeparateQKV(HFLinear):
    """Three products of one merged parameter: the input's gradient is a sum of three rounded gradients."""

    num_parts = 3

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._queries = config.num_attention_heads // config.num_query_groups
        self._head_size = config.kv_channels

    def _split(self, merged: torch.Tensor) -> list[torch.Tensor]:
        heads = merged.unflatten(0, (-1, self._queries + 2, self._head_size))
        return [rows.flatten(0, 2) for rows in heads.split([self._queries, 1, 1], dim=1)]

    def _merge(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """Return the queries, the key and the value of each group."""
        groups = outputs[1].shape[-1] // self._head_size
        return torch.cat([output.unflatten(-1, (groups, -1)) for output in outputs], dim=-1).flatten(-2)


class SeparateGateUp(HFLinear):
    """Two products of one merged parameter, for the same reason as in SeparateQKV."""

    num_parts = 2


def batch_first_silu(gate_sbf: torch.Tensor) -> torch.Tensor:
    """Return SiLU of [S, B, F], computed on a contiguous batch-first copy.

    On the gate half of merged rows, torch's vectorized exp would process the end of each row with its scalar
    version, which gives other bits.
    """
    return F.silu(gate_sbf.transpose(0, 1).contiguous()).transpose(0, 1)


def bloom_gelu(hidden: torch.Tensor) -> torch.Tensor:
    """Return transformers' GELU of BLOOM, which has its own backward formula."""
    from transformers.models.bloom.modeling_bloom import GeLUFunction  # it takes a second to import

    return GeLUFunction.apply(hidden)


class AlignedOutput(HFLinear):
    """The output layer's product without padding rows, because a product's bits depend on the number of rows.

    `num_rows` counts rows of the real vocabulary on this TP rank.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows

    def multiply(
        self, hidden_bsh: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """[B, S, H] in; [B, S, V / TP] out, with zeros for the padding of the vocabulary."""
        logits = F.linear(hidden_bsh, weight[: self._num_rows])
        return F.pad(logits, (0, weight.shape[0] - self._num_rows))


class AlignedSdpa(CausalAttention):
    """transformers' call of scaled_dot_product_attention, with one S x S mask if there is a window."""

    may_use_varlen = pads_values = False

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if query.shape[2] == self.window:  # equals the causal mask, but a mask selects another kernel
            return self._attend_in_window(query, key, value, self.window)
        return super()._attend(query, key, value, mask)

    def _attend_in_window(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
    ) -> torch.Tensor:
        visible = _visible(query, window)
        key, value = _repeat(query, key), _repeat(query, value)
        return F.scaled_dot_product_attention(query, key, value, visible, scale=self.scale)


class EagerAttention(CausalAttention):
    """transformers' eager attention: scale rounded scores, add a mask, compute the softmax in float32."""

    may_use_varlen = pads_values = False

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        return self._attend_in_window(query, key, value, query.shape[2])

    def _attend_in_window(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
    ) -> torch.Tensor:
        key, value = _repeat(query, key), _repeat(query, value)
        visible = _visible(query, window)
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, lowest)
        weights = F.softmax(self._scores(query, key) + mask, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, value)

    def _scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.matmul(query, key.transpose(2, 3)) * self.scale


class AlignedAlibi(EagerAttention):
    """transformers' attention of BLOOM: scores are added to slope x key position, rounded."""

    slopes: torch.Tensor

    def __init__(
        self, *, config: TransformerConfig, pg_collection: ProcessGroupCollection, **named: Any
    ) -> None:
        super().__init__(config=config, **named)
        tp = pg_collection.tp
        own = slopes(config.num_attention_heads).chunk(tp.size())[tp.rank()]
        self.register_buffer("slopes", own[:, None, None], persistent=False)

    def _scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(key.shape[2], device=key.device)
        alibi = (self.slopes * positions).repeat(len(key), 1, 1).to(key.dtype)
        keys = key.flatten(0, 1).transpose(1, 2)
        return alibi.baddbmm(query.flatten(0, 1), keys, alpha=self.scale).unflatten(0, query.shape[:2])


def _repeat(query: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Repeat each key or value head for the queries of its group: [B, G, S, D] to [B, N, S, D]."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _visible(query: torch.Tensor, window: int) -> torch.Tensor:
    """Return [S, S] bool: whether a token attends to another, the last `window` tokens including itself."""
    length = query.shape[2]
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
