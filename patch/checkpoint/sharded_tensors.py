"""The tensors and objects of a sharded state dict, with factories expanded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

# A small tensor's file record (torch.save's zip) is about 1.6 kB, its line in the index 0.4 kB.
_OVERHEAD = 2048


def shards_of(sharded_state: dict[str, Any]) -> list[ShardedBase]:
    """This rank's ShardedTensors and ShardedObjects. A factory (fc1: gate and up) is expanded to shards."""
    shards: list[ShardedBase] = []
    for value in nested_values(sharded_state):
        if isinstance(value, ShardedTensorFactory):
            shards += shards_of({"built": value.build()})
        elif isinstance(value, ShardedBase):
            shards.append(value)
    return shards


def copied(sharded_state: dict[str, Any]) -> dict[str, Any]:
    """A copy of the nesting and the shards that shares the tensors.

    Upstream changes what it is given: it expands factories in place, and adds a leading axis to the data of
    stacked layers.
    """
    return dict_list_map_outplace(
        lambda value: copy.copy(value) if isinstance(value, ShardedBase) else value, sharded_state
    )


def index_key(shard: ShardedBase) -> str:
    """The shard's key in the checkpoint's index."""
    return shard.unique_key if isinstance(shard, ShardedObject) else shard.key


def bytes_to_write(shards: list[ShardedBase]) -> int:
    """Bytes of the tensors that this rank writes. Replicas count once; objects are small and ignored."""
    written = [
        shard for shard in shards if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id)
    ]
    return sum(_nbytes(shard.data) + _OVERHEAD for shard in written)


def _nbytes(tensor: torch.Tensor | None) -> int:
    assert tensor is not None, "a state dict to save holds its tensors"
    return tensor.numel() * tensor.element_size()
