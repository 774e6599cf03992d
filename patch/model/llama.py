"""The LLaMA model: megatron-core's embedding and TransformerBlock with our layers, split over TP, PP and CP.

    build_llama_model  ->  transformer_config, layer spec, LlamaModel; the weights are not set yet

Names of parameters and keys of checkpoints are those of megatron-core's GPTModel, which may end with 0.20.
Other than there, RoPE frequencies come from the configuration, vocabulary padding does not enter the loss,
and tied embeddings do not need CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
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

from patch.config.backends import Backends
from patch.config.execution import Execution
from patch.config.schema import ModelConfig
from patch.distributed.context_group import Zigzag
from patch.families.adapters import INSIDE
from patch.memory import UNLIMITED, CudaDevice, SavedTensors, SimulatedDevice
from patch.model.activation_layers import follow_offloaded
from patch.model.adapters import add_adapters
from patch.model.backends import backends_on
from patch.model.configuration import transformer_config
from patch.model.eight_bit_product import StepWeights
from patch.model.hf_order import AlignedOutput, sources_of
from patch.model.linear import give_product
from patch.model.loss import (
    LearnedTokens,
    ScoredTokens,
    VocabularyPart,
    aligned_losses,
    hide_padded_vocabulary,
    linear_cross_entropy,
    log_probabilities,
)
from patch.model.packed_sequences import PackedSequences, give_own_positions
from patch.model.rotary import RotaryTable, attention_factor, inverse_frequencies
from patch.model.spec import Blueprint
from patch.model.weight_gradient import RowsOfWeight


class LlamaModel(LanguageModule):
    """One pipeline stage of a LLaMA model.

    Args:
        blueprint: what the model is built from.
        vp_stage: the index of this stage among the stages of its process.
    """

    activation_offload: SavedTensors | None
    """Saved tensors of all stages of the process, with AC=offload; call its `end_step` after each step."""
    step_weights: StepWeights | None
    """8-bit weights of all stages; open `unchanged_weights` while no weight changes."""
    is_adapted: bool = False
    """Whether adapters alone train, and are stored; this stage may have none of them."""
    base: str | None = None
    """With adapters the checksum of all other weights of the model, once it is computed."""

    def __init__(self, blueprint: Blueprint, vp_stage: int) -> None:
        model, groups, traits = blueprint.model, blueprint.groups, blueprint.traits
        stage = vp_stage * groups.pp.size() + groups.pp.rank()
        num_stages = (blueprint.upstream.virtual_pipeline_model_parallel_size or 1) * groups.pp.size()
        padded_vocab_size = model.padded_vocab_size(groups.tp.size())
        super().__init__(config=blueprint.upstream, pg_collection=groups)
        self.vp_stage, self.pre_process, self.post_process = vp_stage, stage == 0, stage == num_stages - 1
        self.model_type = ModelType.encoder_or_decoder  # the schedules ask for it
        self.share_embeddings_and_output_weights = not model.untie_embeddings_and_output_weights
        self.vocab_size = padded_vocab_size
        self._add_layers(blueprint)
        self._is_fused = blueprint.backends.is_fused
        self._has_rope = traits.has_rope
        self.activation_offload, self.step_weights = blueprint.saved, blueprint.step_weights
        follow_offloaded(self.decoder.layers)
        if traits.has_rope:
            is_polar = "rope" in blueprint.aligned and model.kv_lora_rank is not None
            self.rotary_pos_emb = RotaryTable(
                inverse_frequencies(model), attention_factor(model), Zigzag.of(groups.cp), is_polar=is_polar
            )
            own_positions = partial(give_own_positions, table=self.rotary_pos_emb)
            self.decoder.register_forward_pre_hook(own_positions, with_kwargs=True)
        if self.pre_process and self._is_fused:
            # An instance's `forward` precedes its class's: upstream builds this layer itself.
            layer = self.embedding.word_embeddings
            layer.forward = partial(look_up, layer)
        if traits.embedding_norm and self.pre_process:
            # The spec does not cover the embedding. With SP the norm gets the rank's part of the tokens.
            self.embedding.norm = blueprint.norm(self.config, model.hidden_size, model.norm_epsilon)
            self.embedding.register_forward_hook(lambda embedding, inputs, output: embedding.norm(output))
        rows = padded_vocab_size // groups.tp.size()
        _mark_cut_weights(self)
        self.num_vocab_rows = min(max(model.vocab_size - groups.tp.rank() * rows, 0), rows)
        """Rows of the real vocabulary on this TP rank; the rows after them are padding."""
        self._has_aligned_loss = bool(blueprint.aligned) and groups.tp.size() == 1
        if blueprint.aligned and self.post_process:
            give_product(self.output_layer, AlignedOutput(self.num_vocab_rows))

    def _add_layers(self, blueprint: Blueprint) -> None:
        """Add this stage's part of embedding, layers and output layer, under GPTModel's names."""
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=self.config,
                vocab_size=self.vocab_size,
                max_sequence_length=blueprint.model.max_position_embeddings,
                position_embedding_type="rope",  # "none" would be the same: no table of positions
                tp_group=self.tp_group,
            )
        self.decoder = TransformerBlock(
            config=self.config,
            spec=blueprint.stage_spec(self.vp_stage),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=self.pg_collection,
            vp_stage=self.vp_stage,
        )
        if self.post_process:
            self.output_layer = ColumnParallelLinear(
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
                module.finish_init(None)  # layers of Transformer Engine take a recipe for their quantization

    def set_input_tensor(self, input_tensor: list[torch.Tensor | None]) -> None:
        """Take the hidden states [S, B, H] of the stage before, from megatron-core's schedules."""
        (hidden,) = input_tensor
        self.decoder.set_input_tensor(hidden)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: None,
        attention_mask: torch.Tensor | None,
        *,
        labels: torch.Tensor | None = None,
        loss_mask: LearnedTokens | ScoredTokens | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> torch.Tensor:
        """The hidden states [S, B, H] of a stage, or what the last one makes of them. S is of this CP rank.

        Args:
            input_ids: tokens [B, S].
            position_ids: unused; RoPE counts from the first token of a sequence.
            attention_mask: None: attention is causal.
            labels: the tokens [B, S] that are to be predicted.
            loss_mask: which of them are learned, or scored.
            packed_seq_params: the sequences of rows that hold several.
        Returns:
            of the last stage logits [B, S, V / TP] without labels, with them losses [B, S]. With `loss_mask`
            the sum of the learned tokens' losses, or each token's if its gradient is not known, computed
            without all logits at once; of `ScoredTokens` their log-probabilities.
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
        if labels is not None and loss_mask is not None:
            return self.summed_loss(hidden, labels, loss_mask)
        is_tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_tied else None
        logits, _ = self.output_layer(hidden, weight=weight)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def shared_embedding_or_output_weight(self) -> Any:
        """This stage's copy of a tied embedding, a parameter or None, for which megatron-core asks."""
        if self.pre_process:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[()] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Megatron-core's description of the weights, in which GPTModel's output layer has nothing else."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.pop(f"{prefix}output_layer._extra_state", None)
        return state

    def _rotary_table(
        self, hidden: torch.Tensor | None, packed: PackedSequences | None
    ) -> torch.Tensor | None:
        """RoPE's table of a row's tokens; of packed sequences an empty one, `give_own_positions` follows."""
        if not self._has_rope:
            return None
        if packed is not None:
            return self.rotary_pos_emb(0)
        first = hidden if self.decoder.input_tensor is None else self.decoder.input_tensor
        assert first is not None, "the first stage embeds tokens, the others get hidden states"
        over_tp = self.tp_group.size() if self.config.sequence_parallel else 1
        return self.rotary_pos_emb(len(first) * over_tp * self.cp_group.size())

    def summed_loss(
        self, hidden: torch.Tensor, labels: torch.Tensor, learned: LearnedTokens | ScoredTokens
    ) -> torch.Tensor:
        """The sum of the learned tokens' losses, from hidden states [S, B, H], with SP [S / TP, B, H].

        Of scored tokens it is what `log_probabilities` gives.
        """
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=group
            )
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        is_tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        part = VocabularyPart(group.rank() * len(weight), self.num_vocab_rows, group)
        if isinstance(learned, ScoredTokens):
            return log_probabilities(hidden, weight, learned.choices, part)
        return linear_cross_entropy(hidden, weight, labels, learned, part, is_fused=self._is_fused)

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark embedding and output weights for the optimizer.

        Unlike upstream's method (language_module.py:139-254) it does not communicate: both copies of a tied
        embedding get the same values from `initialize_weights`, a conversion or a checkpoint.
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
        """Cross entropy over the real vocabulary.

        Args:
            labels: [B, S].
            logits: [S, B, V / TP], over the padded vocabulary.
        Returns:
            [B, S] float32.
        """
        if self._has_aligned_loss:
            return aligned_losses(labels, logits, self.num_vocab_rows)
        return super().compute_language_model_loss(
            labels, hide_padded_vocabulary(logits, self.num_vocab_rows)
        )


def look_up(layer: VocabParallelEmbedding, tokens: torch.Tensor) -> torch.Tensor:
    """Upstream's lookup (layers.py:259-292); its gradient is added where the optimizer collects it.

    Args:
        layer: the embedding.
        tokens: [B, S].
    Returns:
        [B, S, H]; if the layer scatters, [S / TP, B, H].
    """
    weight, group = layer.weight, layer.tp_group
    if not (hasattr(weight, "main_grad_writer") and weight.requires_grad):
        return VocabParallelEmbedding.forward(layer, tokens)
    rows = RowsOfWeight.apply(tokens - layer.vocab_start_index, weight, group.size() > 1)
    if layer.reduce_scatter_embeddings:
        return reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=group)
    return reduce_from_tensor_model_parallel_region(rows, group=group)


@contextmanager
def unchanged_weights(stages: Sequence[LlamaModel]) -> Iterator[None]:
    """Context in which no weight of these stages changes: their 8-bit weights are made once.

    Gathers of updated weights may still travel, which layers wait for; nothing else may write, not even with
    the same numbers. Without it every product makes its own.
    """
    weights = stages[0].step_weights
    with nullcontext() if weights is None else weights.unchanged():
        yield


def _mark_cut_weights(model: LlamaModel) -> None:
    """Mark the weights that are split over TP. The gradient norm counts the others on one TP rank only.

    megatron-core 0.16 marks them only in its own initialisation (layers.py:244-266, 855-884, 1178-1208),
    later releases always.
    """
    for name, module in model.named_modules():
        if hasattr(getattr(module, "weight", None), "tensor_model_parallel"):
            continue
        if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear)) and module.weight is not None:
            # A gated linear_fc1 stores a rank's part of gate and its part of up, for upstream's resharding.
            stride = 2 if model.config.gated_linear_unit and name.endswith("linear_fc1") else 1
            set_tensor_model_parallel_attributes(module.weight, True, 0, stride)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(module.weight, True, 1, 1)


def build_llama_model(
    model: ModelConfig,
    groups: ProcessGroupCollection,
    device: torch.device,
    execution: Execution,
    *,
    aligned: frozenset[str] | None = None,
) -> list[LlamaModel]:
    """Build the pipeline stages of this rank, in the order in which a batch passes them.

    The weights are not set yet (see `initialize_weights`). The stages share one TransformerConfig.

    Args:
        model: the shape of the whole model.
        groups: megatron-core's process groups: how the model is split (TP, PP), and this rank's part of it.
        device: the device of the weights.
        execution: how the model is computed; a run uses `RunConfig.execution`.
        aligned: the operations (of `sources_of`) in Hugging Face's order; None: all of them with
            `--precision-align`, else none.
    """
    if aligned is None:
        aligned = frozenset(sources_of(model) if model.precision_align is not None else ())
    upstream = transformer_config(model, groups, execution, cuda=device.type == "cuda", aligned=aligned)
    backends = backends_on(device, model, execution, groups, upstream)
    upstream.attention_backend = _te_attention_backend(backends, model)
    kind, step_weights = Blueprint, StepWeights.of(execution)
    if upstream.transformer_impl == "transformer_engine":
        from patch.model.te_spec import EngineBlueprint  # not importable without Transformer Engine

        kind, step_weights = EngineBlueprint, None
    saved = _activation_offload(device) if execution.cpu_offloading else None
    blueprint = kind(model, execution, upstream, groups, backends, aligned, step_weights, saved)
    num_stages = upstream.virtual_pipeline_model_parallel_size or 1
    stages = [LlamaModel(blueprint, vp_stage).to(device) for vp_stage in range(num_stages)]
    for stage in stages if execution.adapter.lora_rank else ():
        add_adapters(stage, model, execution, groups)
    return stages


def _te_attention_backend(backends: Backends, model: ModelConfig) -> AttnBackend:
    """The kernel of Transformer Engine's attention, for which upstream sets environment variables."""
    if backends.transformer_impl == "local" or model.attention_backend == "local":
        return AttnBackend.auto
    if model.attention_backend == "flash" and not backends.has_flash_attention_3:
        return AttnBackend.auto
    return AttnBackend[model.attention_backend]


def _activation_offload(device: torch.device) -> SavedTensors:
    own = CudaDevice(device, "activations") if device.type == "cuda" else SimulatedDevice(UNLIMITED)
    return SavedTensors(own, device)


WEIGHT_PREFIXES = ("decoder.", "embedding.", "output_layer.")
"""Prefixes of the names under which the weights of a GPTModel are stored."""


def sharded_weights(stages: Sequence[LanguageModule], *, adapters: bool | None = None) -> ShardedStateDict:
    """The weights of a rank's stages as megatron-core's dist_checkpointing takes them.

    In a checkpoint, layers are numbered over the whole model. The outer keys only separate the stages,
    because each stage numbers its layers from 0.

    Args:
        stages: all pipeline stages of this rank.
        adapters: only those of adapters, or only the others; None: all.
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
