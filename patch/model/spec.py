"""The layer specification: upstream's TransformerLayer with our norm and our attention.

Parameter names are those of upstream's local spec (get_gpt_layer_local_spec), and checkpoint keys are those
of its Transformer Engine spec, so models of both specs load what we save. Each operation can be switched to
Hugging Face's order (hf_order.py) separately; this changes no name.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from patch.config.backends import Backends
from patch.config.schema import ModelConfig
from patch.families import traits_of
from patch.model.attention import CausalAttention
from patch.model.context_parallel import ContextParallelAttention
from patch.model.hf_order import (
    AlignedHeadRMSNorm,
    AlignedRMSNorm,
    AlignedSdpa,
    BatchFirstColumn,
    BatchFirstRow,
    EagerAttention,
    SeparateGateUp,
    SeparateQKV,
)
from patch.model.norm import HeadRMSNorm, RMSNorm
from patch.model.overlapped_linear import OverlappedColumn, OverlappedRow
from patch.model.rotary_attention import RotaryAttention
from patch.model.weight_gradient import AccumulatingColumn, AccumulatingRow


def layer_spec(
    model: ModelConfig,
    aligned: frozenset[str],
    backends: Backends,
    *,
    is_context_parallel: bool = False,
    has_pieces: bool = False,
) -> ModuleSpec:
    """One layer: norm, attention, norm, gated MLP.

    Args:
        model: decides the norms of heads and the attention.
        aligned: the operations (of hf_order.SOURCES) in Hugging Face's order.
        backends: what serves its operations.
        is_context_parallel: whether several ranks share each sequence.
        has_pieces: whether the messages of tensor parallelism are cut in pieces (overlapped_linear.py).
    """
    norm = _norm(aligned)
    head_norm = _head_norm(model, aligned)
    column, row = _linear(aligned, has_pieces)
    attention = ModuleSpec(
        module=RotaryAttention,
        params={"attn_mask_type": AttnMaskType.causal, "is_fused": backends.is_fused},
        submodules=SelfAttentionSubmodules(
            linear_qkv=SeparateQKV if "qkv" in aligned else column,
            core_attention=_core_attention(model, "attention" in aligned, backends, is_context_parallel),
            linear_proj=row,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(
            linear_fc1=SeparateGateUp if "gate_up" in aligned else column, linear_fc2=row
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def _linear(
    aligned: frozenset[str], has_pieces: bool
) -> tuple[type[ColumnParallelLinear], type[RowParallelLinear]]:
    if aligned:
        return BatchFirstColumn, BatchFirstRow
    return (OverlappedColumn, OverlappedRow) if has_pieces else (AccumulatingColumn, AccumulatingRow)


def _norm(aligned: frozenset[str]) -> type[RMSNorm]:
    return AlignedRMSNorm if "rmsnorm" in aligned else RMSNorm


def _head_norm(model: ModelConfig, aligned: frozenset[str]) -> type[torch.nn.Module]:
    if not traits_of(model).qk_layernorm:
        return IdentityOp
    return AlignedHeadRMSNorm if "rmsnorm" in aligned else HeadRMSNorm


def _core_attention(
    model: ModelConfig, is_aligned: bool, backends: Backends, is_context_parallel: bool
) -> ModuleSpec:
    if is_aligned:
        assert not is_context_parallel, "validate_run refuses it"
        return ModuleSpec(module=EagerAttention if model.precision_align == "eager" else AlignedSdpa)
    attention = ContextParallelAttention if is_context_parallel else CausalAttention
    return ModuleSpec(module=attention, params={"kernels": backends.sdpa})


def block_spec(
    model: ModelConfig, num_local_layers: int, aligned: frozenset[str], backends: Backends, **layer: bool
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, and the norm after the last layer of the model.

    Args:
        model: see `layer_spec`.
        num_local_layers: layers of the stage.
        aligned, backends, layer: see `layer_spec`.
    """
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(model, aligned, backends, **layer)] * num_local_layers,
        layer_norm=_norm(aligned),
    )


def recomputed_modules(dtype: torch.dtype, aligned: Set[str], *, cuda: bool) -> list[str]:
    """Upstream's `recompute_modules` for AC=sel: what is large and cheap, but no matrix product.

        norms        outputs (upstream's `layernorm`), except in fp32 on a CPU and with --precision-align
        activation   the product of silu(gate) and up: one of an MLP's three widths (gated_mlp.py)
        attention    only with --precision-align, where the eager one keeps its scores (`core_attn`)

    Fused attention keeps no scores, so recomputing it, as upstream does by default, saves nothing.
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
