"""What a save would write, without writing it: megatron-core's strategy with the writing left to the caller.

megatron/core/dist_checkpointing/strategies/torch.py:643 plans and writes in one method, whose writer
(strategies/filesystem_async.py) computes no checksums, forks for a save in the background, and puts all plans
into `.metadata` beside the index. The two private functions that turn megatron-core's shards into those of
torch are used here as that method uses them. Delete when upstream's strategy takes a StorageWriter.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import _DistWrapper


class SavePlanner(SaveShardedStrategy):
    """Give it to `dist_checkpointing.save`, which then writes common.pt and metadata.json alone.

    Afterwards it holds what is to be written.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.values: list[torch.Tensor | io.BytesIO] = []
        """What this rank writes: views of the state's tensors, and opaque objects as files of torch.save."""
        self.index: Metadata | None = None
        """On rank 0: the index of the checkpoint, without `storage_data`."""
        self.keys_by_rank: list[list[MetadataIndex]] = []
        """On rank 0: the keys in `storage_data` of each rank's values, in their order."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether opaque objects are among the values; they are."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Plan; a collective over the whole job. An error on one rank is raised on all.

        Raises:
            CheckpointException: torch's own, which is no Exception: the shards do not make up whole tensors.
        """
        shards, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state = torch_strategies.mcore_to_pyt_state_dict(shards, False)
        planner = torch_strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)

        def plan_rank() -> SavePlan:
            planner.set_up_planner(state, is_coordinator=dist.get_rank() == 0)
            plan = planner.create_local_plan()
            self.values = [planner.resolve_data(item) for item in plan.items]
            return plan

        def plan_all(plans: list[SavePlan]) -> None:
            _, self.index = planner.create_global_plan(plans)
            self.keys_by_rank = [[item.index for item in plan.items] for plan in plans]

        _DistWrapper(None, True, 0).all_reduce("plan", plan_rank, plan_all)
