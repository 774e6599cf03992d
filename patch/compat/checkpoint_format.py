"""The checkpoint format of megatron-core and torch: the plan of a save, and the place of a record.

This is megatron-core's planning without its writing: megatron/core/dist_checkpointing/serialization.py:402
and strategies/torch.py:643 plan and write together. Their writer (strategies/filesystem_async.py) needs a
GPU, starts processes, computes no checksums, waits forever if one rank fails, and puts all plans into
`.metadata` beside the index. The private functions that turn megatron-core's shards into torch's are used as
upstream uses them. Delete when upstream's strategy takes a StorageWriter, and all ranks report errors.

Parts of torch's format without a public name; delete when they have one:

- torch/distributed/checkpoint/filesystem.py:75 `_StorageInfo`: the position of a record in a .distcp file.
  The pickled `.metadata` of torch and megatron-core contains objects of this class, so code that writes the
  format needs it.
- torch/distributed/checkpoint/utils.py:427 `_create_file_view`: a part of a file as a file object.
"""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import _create_file_view, _DistWrapper

from patch.compat.release import RELEASE
from patch.storage.names import COMMON_FILE, COMMON_KEY, METADATA_JSON_FILE

StorageInfo = _StorageInfo
create_file_view = _create_file_view


COMMON_IS_OBJECT = RELEASE >= (0, 19)
"""Whether the installed megatron-core writes plain values among the tensors; 0.19 reads both forms."""


def common_files(common: dict[str, Any]) -> dict[str, bytes]:
    """Return the contents of metadata.json and, if the release has it, common.pt, by name."""
    description = dataclasses.asdict(CheckpointingConfig("torch_dist", 1))
    files = {METADATA_JSON_FILE: json.dumps(description).encode()}
    if not COMMON_IS_OBJECT:
        stream = io.BytesIO()
        torch.save(common, stream)
        files[COMMON_FILE] = stream.getvalue()
    return files


class SavePlanner:
    """Plans which rank writes which values of a state: `split`, then `plan`."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor | io.BytesIO] = []
        """The values that this rank writes: views of tensors, and objects as files of torch.save."""
        self.index: Metadata | None = None
        """On rank 0: the index of the checkpoint, without `storage_data`."""
        self.keys_by_rank: list[list[MetadataIndex]] = []
        """On rank 0: the keys in `storage_data` of each rank's values, in their order."""
        self.small_files: dict[str, bytes] = {}
        """On rank 0: see `common_files`."""
        self._shards: dict[str, Any] = {}

    def split(self, state: dict[str, Any]) -> None:
        """Separate the shards from the values that all ranks have in common; a collective.

        Args:
            state: shards and plain values, nested in any way; its factories are expanded in place.
        Raises:
            CheckpointingException: on rank 0 only, if the shards of all ranks do not make up whole tensors.
        """
        self._shards, common = save_preprocess(state)
        if COMMON_IS_OBJECT:  # rank 0 writes it
            name, rank = COMMON_KEY.partition("/")[0], dist.get_rank()
            self._shards[name] = ShardedObject(name, common, (1,), (0,), replica_id=rank)
        if dist.get_rank() == 0:
            self.small_files = common_files(common)

    def plan(self) -> None:
        """Plan which rank writes which values; a collective. An error on one rank is raised on all.

        Raises:
            RuntimeError: on all ranks, the error of the first rank that failed.
        """
        shards, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(self._shards, True)
        self._shards = {}
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

        try:
            _DistWrapper(None, True, 0).all_reduce("plan", plan_rank, plan_all)
        except CheckpointException as error:  # torch derives it from BaseException, not from Exception
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            raise RuntimeError(f"rank {rank}: {type(cause).__name__}: {cause}") from error
