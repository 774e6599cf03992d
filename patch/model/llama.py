"""The LLaMA model: megatron-core's embedding and TransformerBlock with our layers, over TP, PP and CP.

Parameter names and checkpoint keys equal those of megatron-core's GPTModel, which may end with 0.20. Unlike
GPTModel, RoPE frequencies come from the configuration, vocabulary padding is excluded from the loss, and tied
embeddings do not need CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnBackend, ModelType
from megatron.core.transformer.transformer_block import TransformerBlock

from patch.config.schema import ModelConfig, RunConfig
from patch.distributed.context_group import Zigzag
from patch.families import family_called
from patch.families.adapters import INSIDE
from patch.families.selection import Selection
from patch.features.backends import Backends
from patch.memory.cuda_device import CudaDevice
from patch.memory.saved_tensors import SavedTensors
from patch.memory.simulated_device import UNLIMITED, SimulatedDevice
from patch.model.activation_layers import follow_offloaded
from patch.model.adapters import add_adapters
from patch.model.attention.packed_sequences import PackedSequences
from patch.model.attention.rotary import rotary_table
from patch.model.backends import backends_on
from patch.model.configuration import transformer_config
from patch.model.embedding_noise import EmbeddingNoise
from patch.model.frozen import freeze_weights
from patch.model.hf_numerics.layers import AlignedOutput, sources_of
from patch.model.linear import Column
from patch.model.loss import (
    LikeliestTokens,
    LossMask,
    ScoredTokens,
    VocabularyShard,
    aligned_losses,
    answers,
    hide_padded_vocabulary,
    linear_cross_entropy,
)
from patch.model.spec import LayerSpecBuilder, Products
from patch.model.weight_gradient import EmbeddingLookup


class LlamaModel(LanguageModule):
    """One pipeline stage of a LLaMA model; `vp_stage` counts the stages of its process."""

    activation_offload: SavedTensors | None
    """Saved tensors of all stages of the process, with AC=offload; call `end_step` after each step."""
    products: Products
    """The products of all stages; open `unchanged_weights` while no weight changes."""
    is_adapted: bool = False
    """Whether only adapters are trained and stored; this stage may have no adapters."""
    base: str | None = None
    """Checksum of the base weights, or None if there are no adapters or it is not computed yet."""

    def __init__(self, builder: LayerSpecBuilder, vp_stage: int) -> None:
        model, groups, traits = builder.model, builder.groups, builder.traits
        stage = vp_stage * groups.pp.size() + groups.pp.rank()
        num_stages = (builder.upstream.virtual_pipeline_model_parallel_size or 1) * groups.pp.size()
        padded_vocab_size = model.padded_vocab_size(groups.tp.size())
        super().__init__(config=builder.upstream, pg_collection=groups)
        self.vp_stage, self.pre_process, self.post_process = vp_stage, stage == 0, stage == num_stages - 1
        self.model_type = ModelType.encoder_or_decoder  # the schedules ask for it
        self.share_embeddings_and_output_weights = not model.untie_embeddings_and_output_weights
        self.vocab_size = padded_vocab_size
        rows = padded_vocab_size // groups.tp.size()
        self.num_vocab_rows = min(max(model.vocab_size - groups.tp.rank() * rows, 0), rows)
        """Rows of the real vocabulary on this TP rank; later rows are padding."""
        self._add_layers(builder)
        self._is_fused = builder.backends.is_fused
        self._has_rope = traits.has_rope
        self.activation_offload, self.products = builder.saved, builder.products
        follow_offloaded(self.decoder.layers)
        if traits.has_rope:
            self.rotary_pos_emb = rotary_table(model, Zigzag.of(groups.cp), is_polar=builder.is_polar)
        if self.pre_process and self._is_fused:
            # Set on the instance, because megatron-core builds this layer.
            layer = self.embedding.word_embeddings
            layer.forward = partial(look_up, layer)
        if traits.embedding_norm and self.pre_process:
            # The spec does not include the embedding. With SP the norm gets this rank's part of the tokens.
            self.embedding.norm = builder.norm(self.config, model.hidden_size, model.norm_epsilon)
            self.embedding.register_forward_hook(lambda embedding, inputs, output: embedding.norm(output))
        if model.embedding_multiplier != 1.0 and self.pre_process:
            # transformers rounds the factor to the weights' dtype (Gemma), or it is exact there (Granite).
            dtype = builder.upstream.params_dtype
            factor = torch.tensor(model.embedding_multiplier, dtype=dtype, device="cpu").item()
            self.embedding.register_forward_hook(lambda embedding, inputs, output: output * factor)
        self.embedding_noise = EmbeddingNoise()
        if self.pre_process:  # before norm and factor, if they follow transformers' embedding
            is_first = not family_called(model.model_type).scales_embedding
            self.embedding.register_forward_hook(self.embedding_noise, prepend=is_first)
        self._is_output_normalized = model.normalize_output_weight
        self._of_logits, self._cap = 1.0 / model.logits_scaling, model.final_logit_softcapping
        _mark_cut_weights(self)
        self._has_aligned_loss = bool(builder.aligned) and groups.tp.size() == 1

    def _add_layers(self, builder: LayerSpecBuilder) -> None:
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=self.config,
                vocab_size=self.vocab_size,
                max_sequence_length=builder.model.max_position_embeddings,
                position_embedding_type="rope",  # no table of positions, as with "none"
                tp_group=self.tp_group,
            )
        self.decoder = TransformerBlock(
            config=self.config,
            spec=builder.stage_spec(self.vp_stage),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=self.pg_collection,
            vp_stage=self.vp_stage,
        )
        for layer in self.decoder.layers:
            # megatron-core turns autograd on for residual sums: in evaluations norms would save tensors.
            layer.bias_dropout_add_exec_handler = nullcontext
        if self.post_process:
            aligned = partial(Column, product=AlignedOutput(self.num_vocab_rows))
            kind: Callable[..., ColumnParallelLinear] = aligned if builder.aligned else ColumnParallelLinear
            self.output_layer = kind(
                self.config.hidden_size,
                self.vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
                tp_group=self.tp_group,
            )
        self.setup_embeddings_and_output_layer()
        for module in self.modules():
            if hasattr(module, "finish_init"):
                module.finish_init(None)  # Transformer Engine's layers take a quantization recipe

    def set_input_tensor(self, input_tensor: list[torch.Tensor | None]) -> None:
        """Set the hidden states [S, B, H] from the previous stage; megatron-core's schedules call it."""
        (hidden,) = input_tensor
        self.decoder.set_input_tensor(hidden)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: None,
        attention_mask: torch.Tensor | None,
        *,
        labels: torch.Tensor | None = None,
        loss_mask: LossMask | ScoredTokens | LikeliestTokens | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [S, B, H], or the output of the last stage. S counts tokens of this CP
        rank.

        Args:
            input_ids: tokens [B, S].
            position_ids: unused; RoPE counts from the first token of a sequence.
            attention_mask: None, because attention is causal.
            labels: the target tokens [B, S].
            loss_mask: which labels are trained or scored.
            packed_seq_params: the sequences of packed rows.
        Returns:
            On the last stage: logits [B, S, V / TP] without labels, losses [B, S] with labels. With
                `loss_mask` the
            sum of the trained tokens' losses, or each token's loss if the gradient is not known, computed
                without
            all logits at once. With `ScoredTokens` or `LikeliestTokens` their log-probabilities.
        """
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=input_ids, position_ids=position_ids)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=attention_mask,
            rotary_pos_emb=self._rotary_table(hidden, packed_seq_params),
            packed_seq_params=packed_seq_params,
        )
        if not self.post_process:
            return hidden.contiguous()  # as sending it requires
        if self._of_logits != 1.0:
            hidden = hidden * self._of_logits
        if labels is not None and loss_mask is not None:
            return self.summed_loss(hidden, labels, loss_mask)
        logits, _ = self.output_layer(hidden, weight=self._output_weight())
        if self._cap is not None:
            logits = self._cap * torch.tanh(logits / self._cap)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def shared_embedding_or_output_weight(self) -> Any:
        """Return this stage's copy of a tied embedding, or None; megatron-core calls it."""
        if self.pre_process:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def _output_weight(self) -> torch.Tensor:
        """Return the weight [V / TP, H] that multiplies hidden states."""
        is_tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        return F.normalize(weight) if self._is_output_normalized else weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[()] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return megatron-core's description of the weights, without the output layer's `_extra_state`."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.pop(f"{prefix}output_layer._extra_state", None)
        return state

    def _rotary_table(
        self, hidden: torch.Tensor | None, packed: PackedSequences | None
    ) -> torch.Tensor | None:
        """Return RoPE's table; that of packed rows has the positions within each sequence."""
        if not self._has_rope:
            return None
        if packed is not None:
            return self.rotary_pos_emb.at(packed.position_ids.t())
        first = hidden if self.decoder.input_tensor is None else self.decoder.input_tensor
        assert first is not None, "no hidden states: a later stage needs set_input_tensor before forward"
        over_tp = self.tp_group.size() if self.config.sequence_parallel else 1
        return self.rotary_pos_emb(len(first) * over_tp * self.cp_group.size())

    def summed_loss(
        self, hidden: torch.Tensor, labels: torch.Tensor, learned: LossMask | ScoredTokens | LikeliestTokens
    ) -> torch.Tensor:
        """Return the summed loss, or the log-probabilities, from hidden states [S or S / TP (SP), B, H]."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=group
            )
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        weight = self._output_weight()
        part = VocabularyShard(group.rank() * len(weight), self.num_vocab_rows, group, self._cap)
        if not isinstance(learned, LossMask):
            return answers(hidden, weight, learned, part)
        return linear_cross_entropy(hidden, weight, labels, learned, part, is_fused=self._is_fused)

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark embedding and output weights for the optimizer.

        Unlike megatron-core's method (language_module.py:139-254) it does not communicate. Both copies of a
        tied embedding get the same values from `initialize_weights`, a conversion or a checkpoint.
        """
        if self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.post_process and self.output_layer.weight is not None:
            self.output_layer.weight.is_embedding_or_output_parameter = True
        if not self.share_embeddings_and_output_weights or self.pre_process == self.post_process:
            return
        weight = self.shared_embedding_or_output_weight()
        weight.shared_embedding = True
        weight.shared = self.post_process

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy [B, S] over the real vocabulary, from padded logits [S, B, V / TP]."""
        if self._has_aligned_loss:
            return aligned_losses(labels, logits, self.num_vocab_rows)
        return super().compute_language_model_loss(
            labels, hide_padded_vocabulary(logits, self.num_vocab_rows)
        )


def look_up(layer: VocabParallelEmbedding, tokens: torch.Tensor) -> torch.Tensor:
    """Run VocabParallelEmbedding's lookup (layers.py:259-292), with the gradient added to the main gradient.

    Tokens [B, S] in; [B, S, H] out, or [S / TP, B, H] if the layer scatters.
    """
    weight, group = layer.weight, layer.tp_group
    if not (hasattr(weight, "main_grad_writer") and weight.requires_grad):
        return VocabParallelEmbedding.forward(layer, tokens)
    rows = EmbeddingLookup.apply(tokens - layer.vocab_start_index, weight, group.size() > 1)
    if layer.reduce_scatter_embeddings:
        return reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=group)
    return reduce_from_tensor_model_parallel_region(rows, group=group)


def unchanged_weights(stages: Sequence[LlamaModel]) -> AbstractContextManager[None]:
    """Return a context in which no weight of these stages changes: weights are cast once for products.

    All-gathers of updated weights may still be in flight, because layers wait for them. Nothing else may
    write a weight, not even with equal values. Without this context each product casts its own weights.
    """
    return stages[0].products.unchanged_weights()


def _mark_cut_weights(model: LlamaModel) -> None:
    """Mark weights that are sharded over TP; the gradient norm counts all other weights on one TP rank."""
    # megatron-core 0.16 marks them only in its own initialization (layers.py:244-266, 855-884, 1178-1208).
    for name, module in model.named_modules():
        if hasattr(getattr(module, "weight", None), "tensor_model_parallel"):
            continue
        if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear)) and module.weight is not None:
            # A gated linear_fc1 has a part of gate and a part of up; megatron-core's resharding reads it.
            stride = 2 if model.config.gated_linear_unit and name.endswith("linear_fc1") else 1
            set_tensor_model_parallel_attributes(module.weight, True, 0, stride)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(module.weight, True, 1, 1)


def build_llama_model(
    config: RunConfig,
    groups: ProcessGroupCollection,
    device: torch.device,
    *,
    aligned: frozenset[str] | None = None,
) -> list[LlamaModel]:
    """Build the pipeline stages of this rank, in the order in which a batch passes them.

    The weights are not set (see `initialize_weights`). The stages share one TransformerConfig. `aligned` are
    the operations (from `sources_of`) in Hugging Face's order; by default all with `--precision-align`, else
    none.
    """
    model = config.model
    if aligned is None:
        aligned = frozenset(sources_of(model) if model.precision_align is not None else ())
    upstream = transformer_config(config, groups, cuda=device.type == "cuda", aligned=aligned)
    backends = backends_on(device, config, groups, upstream)
    upstream.attention_backend = _te_attention_backend(backends, model)
    kind = LayerSpecBuilder
    if upstream.transformer_impl == "transformer_engine":
        from patch.model.te_spec import TELayerSpecBuilder  # not importable without Transformer Engine

        kind = TELayerSpecBuilder
    saved = _activation_offload(device) if config.training.cpu_offloading else None
    products = Products(config, upstream, is_aligned=bool(aligned))
    builder = kind(config, upstream, groups, backends, aligned, products, saved)
    num_stages = upstream.virtual_pipeline_model_parallel_size or 1
    stages = [LlamaModel(builder, vp_stage).to(device) for vp_stage in range(num_stages)]
    for stage in stages:
        if config.adapter.is_on:
            add_adapters(stage, config, groups)
        elif config.selection != Selection():
            freeze_weights(stage, config)
    return stages


def _te_attention_backend(backends: Backends, model: ModelConfig) -> AttnBackend:
    if backends.transformer_impl == "local" or model.attention_backend == "local":
        return AttnBackend.auto
    has_package = backends.flash != "FA2" or "flash_attn" in backends.attention
    if model.attention_backend == "flash" and not has_package:
        return AttnBackend.auto
    return AttnBackend[model.attention_backend]


def _activation_offload(device: torch.device) -> SavedTensors:
    own = CudaDevice(device, "activations") if device.type == "cuda" else SimulatedDevice(UNLIMITED)
    return SavedTensors(own, device)


WEIGHT_PREFIXES = ("decoder.", "embedding.", "output_layer.")
"""Prefixes of the checkpoint keys of GPTModel's weights."""


def sharded_weights(stages: Sequence[LanguageModule], *, adapters: bool | None = None) -> ShardedStateDict:
    """Return the weights of a rank's stages for megatron-core's dist_checkpointing.

    A checkpoint numbers layers over the whole model. The outer keys only separate the stages, because each
    stage numbers its layers from 0. `adapters` selects only adapters or only base weights; None selects all.
    """
    state = {
        f"stage{index}": stage.sharded_state_dict(metadata={"dp_cp_group": stage.pg_collection.dp_cp})
        for index, stage in enumerate(stages)
    }
    if adapters is None:
        return state
    return {
        stage: {name: entry for name, entry in own.items() if (INSIDE in name) is adapters}
        for stage, own in state.items()
    }
