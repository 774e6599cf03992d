"""The layer specification: upstream's TransformerLayer with our norm and our attention.

Parameter names are those of upstream's local spec (get_gpt_layer_local_spec), and the checkpoint keys
those of its Transformer Engine spec, so either of upstream's models loads what we save.
"""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from patch.config.schema import ModelConfig
from patch.model.attention import CausalAttention
from patch.model.norm import HeadRMSNorm, RMSNorm


def layer_spec(model: ModelConfig) -> ModuleSpec:
    """One layer: norm, attention, norm, gated MLP."""
    head_norm = HeadRMSNorm if model.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=ModuleSpec(module=CausalAttention, params={"backend": model.attention_backend}),
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def block_spec(model: ModelConfig, num_local_layers: int) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage and the norm after the last one."""
    return TransformerBlockSubmodules(layer_specs=[layer_spec(model)] * num_local_layers, layer_norm=RMSNorm)
