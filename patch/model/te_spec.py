"""The Transformer Engine layer: megatron-core's specification, with our attention where TE's does not serve.

TE fuses each norm with the next linear layer, so parameter names differ from spec.py
(`self_attention.linear_qkv.layer_norm_weight` for `input_layernorm.weight`). Checkpoint keys and shapes are
the same. Import this module only if Transformer Engine is installed.

TE's modules also add `_extra_state` to a checkpoint, a pickle with the scales of delayed scaling; see
te_scales.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEDotProductAttention,
    TENorm,
    TERowParallelLinear,
    set_save_original_input,
    te_checkpoint,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.pytorch import RMSNorm

from patch.features.backends import AttentionKernel
from patch.model.attention.core_attention import CausalAttention
from patch.model.attention.packed_sequences import PackedSequences
from patch.model.attention.rotary_attention import RotaryAttention
from patch.model.spec import LayerSpecBuilder


class TEAttention(TEDotProductAttention):
    """Transformer Engine's attention, and our attention, with `kernels`, for packed rows.

    TE takes packed sequences as one long row (`thd`); our rows keep their shape, see packed_sequences.py.
    TE reads windows from `config`, and does not cap scores.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        kernels: Sequence[AttentionKernel],
        cap: None,
        has_window: bool,
        **arguments: Any,
    ) -> None:
        super().__init__(config=config, **arguments)
        own: dict[str, Any] = {"kernels": kernels, "cap": cap, "has_window": has_window}
        self.of_packed_rows = CausalAttention(config=config, **own, **arguments)

    def forward(
        self, *tensors: Any, packed_seq_params: PackedSequences | None = None, **arguments: Any
    ) -> torch.Tensor:
        """See CausalAttention."""
        if packed_seq_params is not None:
            return self.of_packed_rows(*tensors, packed_seq_params=packed_seq_params, **arguments)
        return super().forward(*tensors, **arguments)


class TEHeadNorm(RMSNorm):
    """TE's norm of each query or key head; the gradient is summed over TP, as with our HeadRMSNorm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.tensor_model_parallel_size > 1


class _SaveInputRow(TERowParallelLinear):
    """Saves its bfloat16 input, which AC=sel recomputes, for backward, instead of a cast copy."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        set_save_original_input(self)


class TELayerSpecBuilder(LayerSpecBuilder):
    """Layers of Transformer Engine; the MLP, and attention with context parallelism, are ours."""

    def _layer(self, number: int) -> ModuleSpec:
        has_head_norms = self.traits.qk_layernorm
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=has_head_norms)
        layer.submodules.self_attention.module = RotaryAttention
        layer.submodules.self_attention.params["is_fused"] = self.backends.is_fused
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = self._core_attention(number)
        if has_head_norms:
            attention.q_layernorm = attention.k_layernorm = TEHeadNorm
        mlp = layer.submodules.mlp  # a `partial` since megatron-core 0.17
        linear = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
        casts = self.config.casts
        keeps_copy = not casts.layers or casts.has_old_scales  # TE always keeps it then
        if self.upstream.recompute_granularity == "selective" and not keeps_copy:
            linear.linear_fc2 = _SaveInputRow
        layer.submodules.mlp = self._mlp(linear, number)
        return layer

    @property
    def _norms(self) -> tuple[type[torch.nn.Module], type[torch.nn.Module]]:
        return TENorm, TEHeadNorm

    @property
    def _attention(self) -> type[torch.nn.Module]:
        return CausalAttention if self.model.attention_backend == "local" else TEAttention

    @property
    def _recompute(self) -> Callable[..., Any]:
        """With casts, backward must enter TE's context again."""
        if not self.config.casts.layers:
            return super()._recompute

        def recompute(compute: Callable[..., Any], is_distributed: bool, hidden: torch.Tensor) -> Any:
            return te_checkpoint(compute, is_distributed, get_cuda_rng_tracker, self.groups.tp, hidden)

        return recompute
