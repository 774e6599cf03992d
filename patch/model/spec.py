"""The layer specification: megatron-core's TransformerLayer with our parts, all of which are chosen here.

Parameter names are the names of megatron-core's local spec (get_gpt_layer_local_spec). Checkpoint keys are
the keys of its Transformer Engine spec, so models of both specs load our checkpoints. Each operation can use
Hugging Face's order (hf_numerics/layers.py) without a change of names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.post_training.modelopt.layers import Linear as WholeLinear
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from patch.config.schema import ModelConfig, RunConfig
from patch.families import Traits, expert_layers, family_of, layers_with_rope, layers_with_window, traits_of
from patch.features.backends import Backends
from patch.memory.saved_tensors import SavedTensors
from patch.model.activation_layers import StageOffload, layer_kinds
from patch.model.attention.alibi import AlibiAttention
from patch.model.attention.context_parallel import ContextParallelAttention
from patch.model.attention.core_attention import CausalAttention
from patch.model.attention.latent_attention import (
    AlignedLatentAttention,
    LatentAttention,
    PolarLatentAttention,
)
from patch.model.attention.rotary_attention import RotaryAttention, Turns
from patch.model.experts.layer import ExpertsLayer, LocalExperts, Router, SharedExpert
from patch.model.fp8.product import Fp8Product, StepWeights
from patch.model.hf_numerics.experts import AlignedMoELayer, AlignedRouter
from patch.model.hf_numerics.layers import (
    AlignedAlibi,
    AlignedHeadRMSNorm,
    AlignedLayerNorm,
    AlignedRMSNorm,
    AlignedSdpa,
    EagerAttention,
    HFLinear,
    SeparateGateUp,
    SeparateQKV,
)
from patch.model.linear import PLAIN, Column, Product, Row
from patch.model.mlp import Activation, LayerPart, RecomputableMLP, activation_called, activation_of
from patch.model.nf4_product import Nf4Product
from patch.model.norm import (
    AllHeadsRMSNorm,
    AmaxRMSNorm,
    FusedRMSNorm,
    HeadRMSNorm,
    LayerNorm,
    ResidualAdd,
    RMSNorm,
)

NORMS: dict[tuple[str, bool], tuple[type[torch.nn.Module], type[torch.nn.Module]]] = {
    ("RMSNorm", False): (RMSNorm, HeadRMSNorm),
    ("RMSNorm", True): (AlignedRMSNorm, AlignedHeadRMSNorm),
    ("LayerNorm", False): (LayerNorm, HeadRMSNorm),
    ("LayerNorm", True): (AlignedLayerNorm, HeadRMSNorm),
}
"""Norm of tokens and norm of heads, by `Traits.normalization` and whether in Hugging Face's order."""

_NORM_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Checkpoint keys of norms, which Transformer Engine fuses into linear layers, but not into experts."""


class Products:
    """The products of a model's linear layers, the same object for all stages of a process.

    `is_aligned`: whether operations are in Hugging Face's order. Transformer Engine's layers have their own.
    """

    def __init__(self, config: RunConfig, upstream: TransformerConfig, *, is_aligned: bool) -> None:
        self._base, self._is_aligned = config.adapter.quantize_base, is_aligned
        self._recomputes = upstream.recompute_granularity == "selective"
        is_own = upstream.transformer_impl == "local"
        self._casting = config.casts.layers if is_own else range(0)
        self._step = StepWeights(
            config.training.fp8_format or "hybrid", keeps_weights=config.casts.are_kept,
            param_gather=config.training.fp8_param_gather,
        )  # fmt: skip

    def of(self, number: int, aligned: HFLinear | None, *, is_input_kept: bool) -> Product:
        """Return the product of a linear layer in layer `number` (from 1).

        Args:
            aligned: the product in Hugging Face's order; None: HFLinear.
            is_input_kept: whether another operation keeps the input for backward.
        """
        if self._base:
            return Nf4Product(self._base)
        if self.has_casts(number):
            # With AC=sel, backward recomputes the norms and the MLP's activation.
            return Fp8Product(self._step, keeps_input=is_input_kept or self._recomputes)
        return aligned or HFLinear() if self._is_aligned else PLAIN

    def of_experts(self) -> Product:
        """Return the product of the routed experts, which have one order of operations."""
        return Nf4Product(self._base) if self._base else PLAIN

    def has_casts(self, number: int) -> bool:
        """Return whether layer `number` (from 1) casts the inputs of its products."""
        return number - 1 in self._casting

    def unchanged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which no weight changes, so that each is cast once."""
        return self._step.unchanged()


@dataclass(frozen=True)
class LayerSpecBuilder:
    """The specification of a model, the same for all stages of a process."""

    config: RunConfig
    upstream: TransformerConfig
    """megatron-core's configuration of the model."""
    groups: ProcessGroupCollection
    backends: Backends
    aligned: frozenset[str]
    """The operations (from hf_numerics.layers.sources_of) in Hugging Face's order."""
    products: Products
    """The products of our linear layers."""
    saved: SavedTensors | None
    """Saved tensors of all stages, or None if activations are not offloaded."""

    @property
    def model(self) -> ModelConfig:
        """The model's shape."""
        return self.config.model

    @property
    def traits(self) -> Traits:
        """The traits of the layers."""
        return traits_of(self.model)

    def stage_spec(self, vp_stage: int) -> TransformerBlockSubmodules:
        """Return the layers of a pipeline stage of this process, and the model's last norm."""
        pp_rank = self.groups.pp.rank()
        num_layers = get_num_layers_to_build(self.upstream, vp_stage, pp_rank)
        first = 1 + get_transformer_layer_offset(self.upstream, vp_stage, pp_rank)
        offload = None
        if self.saved is not None:
            offload = StageOffload(self.saved, keeps_input=vp_stage > 0 or pp_rank > 0)
        kinds = layer_kinds(num_layers, self.config.training, offload, self._recompute)
        layers = [
            replace(self._layer(first + index), module=kind, params=params)
            for index, (kind, params) in enumerate(kinds)
        ]
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=self.norm)

    def _layer(self, number: int) -> ModuleSpec:
        """Return the parts of a layer, by its number from 1: norm, attention, norm, MLP."""
        is_separate = "gate_up" in self.aligned and self.traits.gated_linear_unit
        gate_up = SeparateGateUp() if is_separate else HFLinear()
        has_experts, is_latent = number - 1 in expert_layers(self.model), self.model.is_latent
        has_bias = self.model.add_mlp_bias and not has_experts
        fc1 = self._linear(Column, number, gate_up, has_bias=has_bias)
        fc2 = self._linear(Row, number, has_bias=has_bias)
        bda, before = self._bda(), self._norm_before(number)
        mlp, keys = MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2), dict(_NORM_KEYS)
        if has_experts:
            del keys["pre_mlp_layernorm."]
        if is_latent:
            del keys["input_layernorm."]
        return ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=before,
                self_attention=self._latent_attention(number) if is_latent else self._self_attention(number),
                self_attn_bda=bda,
                pre_mlp_layernorm=before,
                mlp=self._experts(mlp) if has_experts else self._mlp(mlp, number),
                mlp_bda=bda,
                sharded_state_dict_keys_map=keys,
            ),
        )

    def _norm_before(self, number: int) -> type[torch.nn.Module]:
        """Return the norm in front of attention and MLP of layer `number` (from 1)."""
        if self.backends.is_norm_fused:
            return AmaxRMSNorm if self.products.has_casts(number) else FusedRMSNorm
        return self.norm if self.traits.norm_placement != "behind" else IdentityOp

    def _bda(self) -> Any:
        """Return the residual sum, with the norms that are behind attention and MLP."""
        multiplier = self.model.residual_multiplier
        norm = self.norm if self.traits.norm_placement != "before" else None
        if norm is None and multiplier == 1.0 and not self.backends.is_norm_fused:
            return get_bias_dropout_add
        params = {"config": self.upstream, "norm": norm, "multiplier": multiplier}
        return ModuleSpec(module=ResidualAdd, params=params)

    def _self_attention(self, number: int) -> ModuleSpec:
        query_norm = key_norm = self._norms[1] if self.traits.qk_layernorm else IdentityOp
        if self.traits.qk_layernorm and self.traits.qk_norm_of == "all heads":
            query_norm, key_norm = (
                ModuleSpec(module=AllHeadsRMSNorm, params={"num_heads": number, "group": self.groups.tp})
                for number in (self.model.num_attention_heads, self.model.num_query_groups)
            )
        qkv = SeparateQKV(self.upstream) if "qkv" in self.aligned else HFLinear()
        of_rope: dict[str, Any] = {}
        if self.traits.has_rope:
            of_rope = {"is_fused": self.backends.is_fused, "turns": self._turns(number - 1)}
        return ModuleSpec(
            module=RotaryAttention if self.traits.has_rope else SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal, **of_rope},
            submodules=SelfAttentionSubmodules(
                linear_qkv=self._linear(Column, number, qkv),
                core_attention=self._core_attention(number),
                # Attention saves its output, which is the input of the projection.
                linear_proj=self._linear(Row, number, is_input_kept=True, has_bias=self.model.add_proj_bias),
                q_layernorm=query_norm,
                k_layernorm=key_norm,
            ),
        )

    def _turns(self, layer: int) -> Turns:
        """Return how RoPE rotates the heads of a layer, by its number from 0."""
        model, channels = self.model, self.model.rotary_channels
        if layer not in layers_with_rope(model):
            return Turns(None, None, channels)
        table = int(model.rotary_base_local is not None and layer in layers_with_window(model))
        of_queries = table if model.llama_4_scaling_beta is None else 1
        return Turns(of_queries, table, channels, is_interleaved=self.traits.rotary_interleaved)

    def _latent_attention(self, number: int) -> ModuleSpec:
        column = self._linear(Column, number)
        kind = AlignedLatentAttention if "rope" in self.aligned else LatentAttention
        if self.is_polar:
            kind = PolarLatentAttention
        return ModuleSpec(
            module=kind,
            params={"attn_mask_type": AttnMaskType.causal, "is_fused": self.backends.is_fused},
            submodules=MLASelfAttentionSubmodules(
                linear_q_proj=column,
                linear_q_down_proj=WholeLinear,
                linear_q_up_proj=column,
                linear_kv_down_proj=WholeLinear,
                linear_kv_up_proj=column,
                core_attention=self._core_attention(number),
                linear_proj=self._linear(Row, number, is_input_kept=True),
                q_layernorm=self.norm,
                kv_layernorm=self.norm,
            ),
        )

    def _linear(
        self,
        kind: type[Column | Row],
        number: int,
        aligned: HFLinear | None = None,
        *,
        is_input_kept: bool = False,
        has_bias: bool = False,
    ) -> ModuleSpec:
        """Return a linear layer of layer `number` (from 1). `aligned`: its product in Hugging Face's order,
        by default HFLinear. `is_input_kept`: another operation keeps the input for backward.
        """
        product = self.products.of(number, aligned, is_input_kept=is_input_kept)
        # On a CPU collectives are chunked even without overlap, for the same bits.
        may_have_pieces = self.upstream.tp_comm_overlap or self.upstream.use_cpu_initialization
        in_pieces = product is PLAIN and self.groups.tp.size() > 1 and may_have_pieces
        return ModuleSpec(
            module=kind, params={"product": product, "in_pieces": in_pieces, "has_bias": has_bias}
        )

    def _mlp(self, submodules: MLPSubmodules, number: int) -> Any:
        params = {
            "activate": self._activation(notes_amax=self.products.has_casts(number)),
            "is_recomputed": self.upstream.recompute_granularity == "selective",
            "num_chunks": self.config.training.mlp_chunks_for_training,
            "tp_group": self.groups.tp,
        }
        return LayerPart(RecomputableMLP, submodules, params)

    def _experts(self, shared: MLPSubmodules) -> Any:
        # `shared`: the shared expert's layers. The dispatcher communicates for the other experts' layers.
        product = {"product": self.products.of_experts()}
        first, second = (ModuleSpec(module=kind, params=product) for kind in (Column, Row))
        own = MLPSubmodules(linear_fc1=first, linear_fc2=second)
        share = 1 / (self.config.num_micro_batches * self.groups.dp.size())
        activate, is_recomputed = self._activation(), self.upstream.recompute_granularity == "selective"
        of_experts = {"activate": activate, "is_grouped": self.backends.is_grouped}
        of_shared = {"activate": activate, "is_recomputed": is_recomputed}
        parts = MoESubmodules(
            experts=ModuleSpec(module=LocalExperts, submodules=own, params=of_experts),
            shared_experts=ModuleSpec(module=SharedExpert, submodules=shared, params=of_shared),
            router=partial(Router, share=share),
        )
        params = {"pg_collection": self.groups}
        if "experts" not in self.aligned:
            return LayerPart(ExpertsLayer, parts, params)
        family, is_normed = family_of(self.model), not self.model.moe_router_pre_softmax
        assert family is not None, "validate_run refuses it"
        parts.router = partial(AlignedRouter, share=share, is_normed=is_normed, own=family.own_of_router)
        params["activate"] = activation_called(self.traits.activation)
        return LayerPart(AlignedMoELayer, parts, params)

    def _activation(self, *, notes_amax: bool = False) -> Activation:
        function, is_fused = self.upstream.activation_func, self.backends.is_fused
        return activation_of(self.traits, function, is_fused=is_fused, notes_amax=notes_amax)

    @property
    def is_polar(self) -> bool:
        """Whether RoPE multiplies complex numbers, as transformers does for DeepSeek-V2."""
        family = family_of(self.model) if "rope" in self.aligned else None
        return family is not None and family.has_polar_rope

    @property
    def norm(self) -> type[torch.nn.Module]:
        """The norm of tokens."""
        return self._norms[0]

    @property
    def _norms(self) -> tuple[type[torch.nn.Module], type[torch.nn.Module]]:
        return NORMS[self.traits.normalization, not self.aligned.isdisjoint({"rmsnorm", "layernorm"})]

    @property
    def _recompute(self) -> Callable[..., Any]:
        return checkpoint

    def _core_attention(self, number: int) -> ModuleSpec:
        is_context_parallel = self.groups.cp.size() > 1
        if "attention" in self.aligned:
            assert not is_context_parallel, "validate_run refuses it"
            if not self.traits.has_rope:
                return ModuleSpec(module=AlignedAlibi)
            return ModuleSpec(module=EagerAttention if self.model.precision_align == "eager" else AlignedSdpa)
        attention = ContextParallelAttention if is_context_parallel else self._attention
        params: dict[str, Any] = {
            "kernels": self.backends.attention,
            "cap": self.model.attn_logit_softcapping,
            "has_window": number - 1 in layers_with_window(self.model),
        }
        if is_context_parallel:
            params["is_fused"] = self.backends.is_fused
        if self.traits.has_rope:
            return ModuleSpec(module=attention, params=params)
        params |= {"attention": attention, "num_channels": self.traits.position_channels}
        return ModuleSpec(module=AlibiAttention, params=params)

    @property
    def _attention(self) -> type[torch.nn.Module]:
        return CausalAttention
