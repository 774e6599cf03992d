"""The LLaMA model: upstream's GPTModel built from our layer spec, split over TP, PP and CP.

    build_llama_model  ->  transformer_config, layer spec, LlamaModel; the weights are not set yet

LlamaModel changes three things in GPTModel: RoPE frequencies come from the configuration, vocabulary padding
does not enter the loss, and tied embeddings do not need CUDA. Parameter names are upstream's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt.gpt_model import GPTModel
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
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.functional import silu

from patch.compat.corrections import StageLayout
from patch.config.backends import Backends
from patch.config.execution import Execution, Fp8
from patch.config.schema import ModelConfig
from patch.device import torch_dtype
from patch.distributed.context_group import Zigzag
from patch.families import traits_of
from patch.layout.pipeline_stages import smallest_micro_batch_group, split_layers
from patch.memory import UNLIMITED, CudaDevice, SavedTensors, SimulatedDevice
from patch.model.activation_layers import set_activation_layers
from patch.model.backends import backends_on
from patch.model.fp8_linear import use_fp8
from patch.model.fp8_weights import StepWeights
from patch.model.gated_mlp import swiglu, upstreams_activation, use_activation
from patch.model.hf_order import SOURCES, AlignedOutput, batch_first_silu
from patch.model.loss import (
    LearnedTokens,
    VocabularyPart,
    aligned_losses,
    hide_padded_vocabulary,
    linear_cross_entropy,
)
from patch.model.packed_sequences import give_own_positions
from patch.model.rotary import RotaryTable, attention_factor, inverse_frequencies
from patch.model.spec import block_spec, recomputed_modules

_ACTIVATIONS = {"silu": silu}


def transformer_config(
    model: ModelConfig,
    groups: ProcessGroupCollection,
    execution: Execution,
    *,
    cuda: bool,
    aligned: frozenset[str] = frozenset(),
) -> TransformerConfig:
    """Upstream's configuration of a model. Fusions that need CUDA extensions are off.

    Args:
        model: the shape of the whole model.
        groups: megatron-core's process groups, which set the sizes of TP, PP and CP.
        execution: how the model is computed.
        cuda: whether the weights are on a GPU.
        aligned: the operations (of `SOURCES`) in Hugging Face's order.
    """
    tp_size = groups.tp.size()
    dtype, traits = torch_dtype(execution.facts.kept_as), traits_of(model)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        layernorm_epsilon=model.norm_epsilon,
        normalization=traits.normalization,
        gated_linear_unit=traits.gated_linear_unit,
        activation_func=batch_first_silu if "swiglu" in aligned else _ACTIVATIONS[traits.activation],
        add_bias_linear=traits.add_bias_linear,
        add_qkv_bias=traits.add_qkv_bias,
        qk_layernorm=traits.qk_layernorm,
        window_size=model.window_size,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp_size,
        context_parallel_size=groups.cp.size(),
        cp_comm_type=execution.cp_comm_type,
        sequence_parallel=execution.sequence_parallel and tp_size > 1,
        calculate_per_token_loss=True,
        deterministic_mode=execution.deterministic_mode,
        use_cpu_initialization=not cuda,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **_layer_settings(model, execution, aligned, cuda=cuda),
        **_recompute_settings(execution),
        **_pipeline_settings(model.num_layers, groups.pp, execution),
    )


def _layer_settings(
    model: ModelConfig, execution: Execution, aligned: frozenset[str], *, cuda: bool
) -> dict[str, Any]:
    """The fields of upstream's configuration that differ between our layers and Transformer Engine's.

    Of our 8-bit products (fp8_linear.py) upstream knows nothing.
    """
    if model.transformer_impl != "transformer_engine":
        return {
            "transformer_impl": "local",
            "tp_comm_overlap": _overlaps(execution, cuda=cuda),
            "recompute_modules": recomputed_modules(torch_dtype(execution.facts.kept_as), aligned, cuda=cuda),
        }
    # Its norms are parts of its linear layers, its messages overlap only through user buffers (not set up).
    settings = {"transformer_impl": "transformer_engine", "tp_comm_overlap": False, "recompute_modules": []}
    if execution.precision != "fp8":
        return settings
    fp8 = execution.fp8
    return settings | {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "first_last_layers_bf16": fp8.num_first_in_bf16 + fp8.num_last_in_bf16 > 0,
        "num_layers_at_start_in_bf16": fp8.num_first_in_bf16,
        "num_layers_at_end_in_bf16": fp8.num_last_in_bf16,
        "disable_parameter_transpose_cache": not fp8.keeps_weights,
        # Delayed scaling: over replicas too it would be a collective in each forward and backward, for
        # which a rank that repeats a step, or computes one alone (guards), would wait forever.
        "tp_only_amax_red": True,
    }


def _overlaps(execution: Execution, *, cuda: bool) -> bool:
    """Whether messages of tensor parallelism overlap with products: by default where that was measured."""
    return not cuda if execution.tp_comm_overlap is None else execution.tp_comm_overlap


def _recompute_settings(execution: Execution) -> dict[str, Any]:
    """The fields of upstream's configuration for recomputation, except the modules of `selective`."""
    granularity = execution.recompute_granularity
    if granularity != "full":
        return {"recompute_granularity": granularity}
    if execution.recompute_method == "block":  # such layers recompute themselves (activation_layers.py)
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": execution.recompute_num_layers,
    }


def _pipeline_settings(
    num_layers: int, pp: torch.distributed.ProcessGroup, execution: Execution
) -> dict[str, Any]:
    """The fields of upstream's configuration for pipeline stages and their communication."""
    pp_size = pp.size()
    stage_layers = list(execution.stage_layers or split_layers(num_layers, pp_size))
    vp_size = len(stage_layers) // pp_size
    is_interleaved = vp_size > 1
    is_even = len(set(stage_layers)) == 1
    overlaps = is_interleaved and execution.overlap_p2p_communication
    count = execution.num_micro_batches
    group = execution.micro_batch_group or smallest_micro_batch_group(count, pp_size)
    return {
        "pipeline_model_parallel_size": pp_size,
        "pipeline_model_parallel_layout": None if is_even else StageLayout(stage_layers, pp_size, pp.rank()),
        "virtual_pipeline_model_parallel_size": vp_size if is_interleaved else None,
        "microbatch_group_size_per_vp_stage": group if is_interleaved else None,
        # Interleaved over two processes, both neighbours are the same process, and in one batch of sends and
        # receives a gradient could be received as an activation. So they are sent singly, as in Megatron-LM;
        # in batches, which do not overlap, only among three processes (`messages_can_travel`).
        "overlap_p2p_comm": overlaps,
        "overlap_p2p_comm_warmup_flush": overlaps and execution.overlap_p2p_communication_warmup_flush,
        "batch_p2p_comm": not overlaps,
        # Upstream's default makes the host wait for the whole GPU after each batch, because of a fault of old
        # versions of torch (model_parallel_config.py:307): `wait` waited for nothing (pytorch#68866). Since
        # 1.13 (pytorch#82450) it makes the compute stream wait for the batch, as for single messages.
        "batch_p2p_sync": False,
        # A send that overlaps with computation may still read the output when upstream frees it. Over gloo
        # this gave wrong losses.
        "deallocate_pipeline_outputs": not overlaps,
    }


class LlamaModel(GPTModel):
    """One pipeline stage of a LLaMA model.

    Inputs and outputs of `forward` are GPTModel's: tokens and labels [B, S] in; per-token losses [B, S] out,
    or logits [B, S, V / TP] without labels, or hidden states [S, B, H] before the last stage. S counts the
    tokens of this CP rank. With `packed_seq_params` (`PackedSequences`) a row consists of several sequences.
    With labels and `loss_mask` (`LearnedTokens`) the sum of the learned tokens' losses comes out, computed
    without all logits at once.

    Args:
        model: the shape of the whole model.
        upstream: its `transformer_config`.
        groups: megatron-core's process groups.
        aligned: the operations (of `SOURCES`) in Hugging Face's order.
        vp_stage: the index of this stage among the stages of its process.
        fp8: the settings of our 8-bit products; None: products have the weights' type, or are Transformer
            Engine's.
        backends: what serves its operations.
    """

    activation_offload: SavedTensors | None = None
    """Saved tensors of all stages of the process, with AC=offload; call its `end_step` after each step."""

    def __init__(
        self,
        model: ModelConfig,
        upstream: TransformerConfig,
        groups: ProcessGroupCollection,
        aligned: frozenset[str],
        vp_stage: int,
        fp8: Fp8 | None,
        backends: Backends,
    ) -> None:
        stage = vp_stage * groups.pp.size() + groups.pp.rank()
        num_stages = (upstream.virtual_pipeline_model_parallel_size or 1) * groups.pp.size()
        num_layers = get_num_layers_to_build(upstream, vp_stage, groups.pp.rank())
        padded_vocab_size = model.padded_vocab_size(groups.tp.size())
        # On a CPU the messages are in pieces without overlap too, for the same bits.
        has_pieces = groups.tp.size() > 1 and (upstream.tp_comm_overlap or upstream.use_cpu_initialization)
        super().__init__(
            config=upstream,
            transformer_layer_spec=_block_spec(
                model,
                upstream,
                num_layers,
                aligned,
                backends,
                is_context_parallel=groups.cp.size() > 1,
                has_pieces=has_pieces,
            ),
            vocab_size=padded_vocab_size,
            max_sequence_length=model.max_position_embeddings,
            pre_process=stage == 0,
            post_process=stage == num_stages - 1,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=traits_of(model).position_embedding_type,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        self._is_fused = backends.is_fused
        activate = partial(swiglu, is_fused=backends.is_fused)
        for layer in self.decoder.layers:
            use_activation(layer.mlp, upstreams_activation(upstream) if "swiglu" in aligned else activate)
        if upstream.fp8 and upstream.recompute_granularity == "selective":
            _keep_original_inputs(self.decoder.layers)
        self.step_weights: StepWeights | None = None
        """8-bit weights; open `unchanged_weights` while nobody changes a weight."""
        if fp8 is not None:
            self.step_weights = _give_8_bit_products(self.decoder.layers, model.num_layers, fp8)
        self.rotary_pos_emb = RotaryTable(
            inverse_frequencies(model), attention_factor(model), Zigzag.of(groups.cp)
        )
        own_positions = partial(give_own_positions, table=self.rotary_pos_emb)
        self.decoder.register_forward_pre_hook(own_positions, with_kwargs=True)
        rows = padded_vocab_size // groups.tp.size()
        _mark_cut_weights(self)
        self.num_vocab_rows = min(max(model.vocab_size - groups.tp.rank() * rows, 0), rows)
        """Rows of the real vocabulary on this TP rank; the rows after them are padding."""
        self._has_aligned_loss = bool(aligned) and groups.tp.size() == 1
        if aligned and self.post_process:
            # The spec does not cover this layer: GPTModel always builds a ColumnParallelLinear.
            self.output_layer.__class__ = AlignedOutput
            self.output_layer.num_rows = self.num_vocab_rows

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """GPTModel's forward. What is sent to the next stage is made contiguous, as sending requires."""
        output = super().forward(*args, **kwargs)
        return output if self.post_process else output.contiguous()

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        labels: torch.Tensor | None,
        loss_mask: LearnedTokens | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """What follows the layers: GPTModel's, or the summed loss of `loss_mask`."""
        if self.post_process and labels is not None and loss_mask is not None:
            return self.summed_loss(hidden_states, labels, loss_mask)
        return super()._postprocess(hidden_states, *args, labels=labels, loss_mask=loss_mask, **kwargs)

    def summed_loss(self, hidden: torch.Tensor, labels: torch.Tensor, learned: LearnedTokens) -> torch.Tensor:
        """The sum of the learned tokens' losses, from hidden states [S, B, H], with SP [S / TP, B, H]."""
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


def _block_spec(
    model: ModelConfig,
    upstream: TransformerConfig,
    num_layers: int,
    aligned: frozenset[str],
    backends: Backends,
    *,
    is_context_parallel: bool,
    has_pieces: bool,
) -> TransformerBlockSubmodules:
    if upstream.transformer_impl == "transformer_engine":
        from patch.model.te_spec import te_block_spec  # not importable without Transformer Engine

        return te_block_spec(model, num_layers, backends, is_context_parallel=is_context_parallel)
    return block_spec(
        model, num_layers, aligned, backends, is_context_parallel=is_context_parallel, has_pieces=has_pieces
    )


def _keep_original_inputs(layers: Sequence[TransformerLayer]) -> None:
    from patch.model.te_spec import keep_original_inputs  # Transformer Engine alone has 8-bit inputs here

    for layer in layers:
        keep_original_inputs(layer)


def _give_8_bit_products(layers: Sequence[TransformerLayer], num_layers: int, fp8: Fp8) -> StepWeights:
    """Give them to a stage's layers, but to the model's first and last ones that stay in bf16."""
    step_weights = StepWeights(rowwise=fp8.recipe == "rowwise", keeps_values=fp8.keeps_weights)
    for layer in layers:  # upstream numbers the layers of the whole model from 1
        if fp8.num_first_in_bf16 < layer.layer_number <= num_layers - fp8.num_last_in_bf16:
            brings_back = layer.config.recompute_granularity == "selective"
            use_fp8(layer, fp8, step_weights, brings_inputs_back=brings_back)
    return step_weights


@contextmanager
def unchanged_weights(stages: Sequence[LlamaModel]) -> Iterator[None]:
    """Context in which nobody changes a weight of these stages: their 8-bit weights are made once.

    Gathers of updated weights may still travel, which layers wait for; nothing else may write, not even with
    the same numbers. Without it every product makes its own.
    """
    with ExitStack() as stack:
        for stage in stages:
            if stage.step_weights is not None:
                stack.enter_context(stage.step_weights.unchanged())
        yield


def _mark_cut_weights(model: torch.nn.Module) -> None:
    """Mark the weights that are split over TP. The gradient norm counts the others on one TP rank only.

    Upstream marks them only in its own initialisation (layers.py:244-266, 855-884, 1178-1208).
    """
    for name, module in model.named_modules():
        if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear)) and module.weight is not None:
            # linear_fc1 stores a rank's part of gate and its part of up; upstream's resharding needs to know.
            stride = 2 if name.endswith("linear_fc1") else 1
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
        aligned: the operations (of `SOURCES`) in Hugging Face's order; None: all of them with
            `--precision-align`, else none.
    """
    if aligned is None:
        aligned = frozenset(SOURCES) if model.precision_align is not None else frozenset()
    upstream = transformer_config(model, groups, execution, cuda=device.type == "cuda", aligned=aligned)
    backends = backends_on(device, model, execution, groups, upstream)
    upstream.attention_backend = _te_attention_backend(backends, model)
    fp8 = execution.fp8 if execution.precision == "fp8" and not upstream.fp8 else None
    stages = [
        LlamaModel(model, upstream, groups, aligned, vp_stage, fp8, backends).to(device)
        for vp_stage in range(upstream.virtual_pipeline_model_parallel_size or 1)
    ]
    offload = _activation_offload(device) if execution.cpu_offloading else None
    for stage in stages:
        stage.activation_offload = offload
        set_activation_layers(stage, execution, offload)
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


def sharded_weights(stages: Sequence[GPTModel]) -> ShardedStateDict:
    """The weights of a rank's stages as megatron-core's dist_checkpointing takes them.

    In a checkpoint, layers are numbered over the whole model. The outer keys only separate the stages,
    because each stage numbers its layers from 0.
    """
    return {f"stage{index}": stage.sharded_state_dict() for index, stage in enumerate(stages)}
