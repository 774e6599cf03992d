"""What may be asked of a model, ours or upstream's, without its values."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt.gpt_model import GPTModel

MARKS = (
    "tensor_model_parallel", "partition_dim", "partition_stride", "allreduce",
    "is_embedding_or_output_parameter", "shared", "shared_embedding",
)  # fmt: skip
OURS = ("layernorm", "self_attention", "core_attention", ".mlp", "rotary_pos_emb")
"""Ends of the names of modules that are ours instead of upstream's."""

OWN_LINEAR = {"Column": "ColumnParallelLinear", "Row": "RowParallelLinear"}
"""Subclasses of upstream's."""


@contextmanager
def te_constructors() -> Iterator[None]:
    """A context in which Transformer Engine's modules can be built on a machine without a GPU, on the CPU.

    Their constructor asserts that there is one (transformer_engine/pytorch/module/base.py:606); for
    parameters on a CPU nothing else of it needs one. Only that question is answered.
    """
    with mock.patch("torch.cuda.is_available", lambda: True):
        yield


def described(model: GPTModel) -> dict[str, dict]:
    """What may be asked of a stage without its weights' values."""
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
