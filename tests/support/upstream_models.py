"""megatron-core's own model of a stage, and properties of a model that do not depend on weight values."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from patch.checks.layout import SPLIT_ACCOUNTING_FLAGS
from patch.config import RunConfig
from patch.families import traits_of
from patch.model.configuration import transformer_config

MARKS = (
    "tensor_model_parallel", "partition_dim", "partition_stride", "allreduce",
    "is_embedding_or_output_parameter", "shared", "shared_embedding",
)  # fmt: skip
OURS = ("layernorm", "self_attention", "core_attention", ".mlp", "rotary_pos_emb")
"""Suffixes of the names of modules that are ours instead of upstream's."""

OWN_LINEAR = {"Column": "ColumnParallelLinear", "Row": "RowParallelLinear"}
"""Our subclass -> upstream's class."""


@contextmanager
def te_constructors() -> Iterator[None]:
    """Within the context, Transformer Engine's modules can be built on the CPU of a machine without a GPU.

    Their constructor asserts that there is a GPU (transformer_engine/pytorch/module/base.py:606), which
    parameters on a CPU do not need. Only this check is replaced.
    """
    with mock.patch("torch.cuda.is_available", lambda: True):
        yield


def described(model: GPTModel) -> dict[str, dict]:
    """Return the properties of a stage that do not depend on the values of its weights."""
    sharded = model.sharded_state_dict()
    apply_factories(sharded)
    shards = list(nested_values(sharded))
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    modules = {
        name: OWN_LINEAR.get(type(module).__name__, type(module).__name__)
        for name, module in model.named_modules()
        if ".core_attention." not in name
    }
    return {
        "parameters": {
            name: (tuple(weight.shape), weight.dtype) for name, weight in model.named_parameters()
        },
        "state": {
            name: None if value is None else tuple(value.shape) for name, value in model.state_dict().items()
        },
        "marks": {
            name: {mark: getattr(weight, mark, False) for mark in MARKS}
            for name, weight in model.named_parameters()
        },
        "modules": {
            name: "ours" if name.endswith(OURS) and kind != "IdentityOp" else kind
            for name, kind in modules.items()
            if name
        },
        "tensors": {
            (shard.key, shard.global_offset): (
                shard.global_shape, shard.local_shape, shard.axis_fragmentations, shard.replica_id,
                shard.prepend_axis_num, shard.dtype, shard.allow_shape_mismatch,
            )
            for shard in tensors
        },
        "objects": {
            shard.unique_key: shard.replica_id for shard in shards if not isinstance(shard, ShardedTensor)
        },
    }  # fmt: skip


class Upstream(GPTModel):
    """Upstream's model without one step: it copies a tied embedding to the last stage on a GPU."""

    def _is_in_embd_group(self) -> bool:
        return False


def upstream_stage(
    config: RunConfig,
    groups: ProcessGroupCollection,
    vp_stage: int,
    spec: TransformerBlockSubmodules | None = None,
) -> Upstream:
    """Return upstream's model of a stage, initialized by upstream, which also sets parameter attributes.

    Args:
        vp_stage: index of the stage among the stages of its process.
        spec: layer spec, or None for upstream's local spec.
    """
    model = config.model
    upstream = dataclasses.replace(
        transformer_config(config, groups, cuda=False), perform_initialization=True,
        init_method_std=model.init_method_std, init_method=None, output_layer_init_method=None,
        embedding_init_method=None, embedding_init_method_std=None,
    )  # fmt: skip
    _let_upstream_cut(upstream, config)
    stage = vp_stage * groups.pp.size() + groups.pp.rank()
    spec = spec or get_gpt_decoder_block_spec(
        upstream, use_transformer_engine=False, normalization=traits_of(model).normalization,
        vp_stage=vp_stage, pp_rank=groups.pp.rank(),
    )  # fmt: skip
    return Upstream(
        config=upstream,
        transformer_layer_spec=spec,
        vocab_size=config.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == config.virtual_pipeline_size * groups.pp.size() - 1,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        pg_collection=groups,
        vp_stage=vp_stage,
    )


def _let_upstream_cut(upstream: TransformerConfig, config: RunConfig) -> None:
    """Give upstream its own flags for uneven pipelines. Interleaved layouts need its global state."""
    parallel, pp_size = config.parallel, config.parallel.pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(
        upstream.virtual_pipeline_model_parallel_size
    )
    if parallel.pipeline_model_parallel_layout is not None:
        upstream.pipeline_model_parallel_layout = PipelineParallelLayerLayout(
            parallel.pipeline_model_parallel_layout, pp_size
        )
    elif parallel.account_for_loss_in_pipeline_split:
        upstream.pipeline_model_parallel_layout = None
        for field in SPLIT_ACCOUNTING_FLAGS:
            setattr(upstream, field, True)
