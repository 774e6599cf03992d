"""The layer of Transformer Engine: upstream's specification, with our attention where TE's does not serve.

TE fuses each norm with the linear layer behind it, so names in the model differ from those of spec.py
(`self_attention.linear_qkv.layer_norm_weight` for `input_layernorm.weight`). Keys and shapes in checkpoints
are the same. Import this module only where Transformer Engine is installed: its classes are made from TE's.

TE's modules also give a checkpoint `_extra_state`, a pickle with the scales of delayed fp8 scaling; see
te_scales.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm, set_save_original_input
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from transformer_engine.pytorch import RMSNorm

from patch.config.backends import Backends, SdpaKernel
from patch.config.schema import ModelConfig
from patch.families import traits_of
from patch.model.attention import CausalAttention
from patch.model.context_parallel import ContextParallelAttention
from patch.model.packed_sequences import PackedSequences
from patch.model.rotary_attention import RotaryAttention


class TEAttention(TEDotProductAttention):
    """Upstream's attention by Transformer Engine, and ours for packed rows.

    TE takes packed sequences as one long row (`thd`); our rows keep their shape, see packed_sequences.py.

    Args:
        config, arguments: upstream's builder protocol.
        kernels: of our attention, see CausalAttention. TE chooses by upstream's `attention_backend`.
    """

    def __init__(self, *, config: TransformerConfig, kernels: Sequence[SdpaKernel], **arguments: Any) -> None:
        super().__init__(config=config, **arguments)
        self.of_packed_rows = CausalAttention(config=config, kernels=kernels, **arguments)

    def forward(
        self, *tensors: Any, packed_seq_params: PackedSequences | None = None, **arguments: Any
    ) -> torch.Tensor:
        """Attend causally: see CausalAttention."""
        if packed_seq_params is not None:
            return self.of_packed_rows(*tensors, packed_seq_params=packed_seq_params, **arguments)
        return super().forward(*tensors, **arguments)


class TEHeadNorm(RMSNorm):
    """TE's norm of each query or key head, marked as ours is: its gradient is summed over TP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.tensor_model_parallel_size > 1


def te_block_spec(
    model: ModelConfig, num_local_layers: int, backends: Backends, *, is_context_parallel: bool
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, and the norm after the last layer of the model.

    Args:
        model: decides the norms of heads and the attention.
        num_local_layers: layers of the stage.
        backends: the kernels of our attention.
        is_context_parallel: whether several ranks share each sequence; then the attention is ours.
    """
    has_head_norms = traits_of(model).qk_layernorm
    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=has_head_norms)
    layer.submodules.self_attention.module = RotaryAttention
    layer.submodules.self_attention.params["is_fused"] = backends.is_fused
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(
        module=_core_attention(model, is_context_parallel), params={"kernels": backends.sdpa}
    )
    if has_head_norms:
        attention.q_layernorm = attention.k_layernorm = TEHeadNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_local_layers, layer_norm=TENorm)


def _core_attention(model: ModelConfig, is_context_parallel: bool) -> type[torch.nn.Module]:
    if is_context_parallel:
        return ContextParallelAttention
    return CausalAttention if model.attention_backend == "local" else TEAttention


def keep_original_inputs(layer: TransformerLayer) -> None:
    """Let the MLP's second layer keep its input, which AC=sel recomputes, instead of a copy in 8 bits.

    With delayed scaling TE always keeps the copy.
    """
    if layer.config.fp8_recipe != "delayed":
        set_save_original_input(layer.mlp.linear_fc2)
