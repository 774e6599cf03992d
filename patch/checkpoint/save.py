"""Saves checkpoints into a temporary folder, which is then renamed; errors leave earlier ones intact."""

from __future__ import annotations

import json
import shutil
from collections import ChainMap
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from patch.checkpoint.failures import checkpoint_failures
from patch.checkpoint.folder import iteration_folder, open_staging, publish, staged_checkpoint
from patch.checkpoint.manifest import contents_of_rank, write_manifest
from patch.checkpoint.retention import delete_set_aside
from patch.checkpoint.sharded_tensors import bytes_to_write, copied, shards_of
from patch.distributed.collectives import all_gather_object
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.storage.checksums import Content
from patch.storage.lock import check_held
from patch.storage.names import is_complete
from patch.storage.sizes import size_text

_logger = get_logger(__name__)


def save_checkpoint(
    root: Path, iteration: int, sharded_state: dict[str, Any], common: dict[str, Any]
) -> None:
    """Write one checkpoint with all ranks; its folder gets its name only when it is complete.

    Args:
        root: the folder of a run's checkpoints, shared by all ranks; created if missing.
        iteration: the number of finished optimizer steps. A checkpoint of the same iteration is replaced.
        sharded_state: sections of sharded state dicts ("model", "optimizer", "random"); it is not changed.
            The model's keys are upstream's; the keys of another section begin with the section's name.
        common: values of plain (JSON) types, the same on every rank; rank 0 writes them.

    Raises:
        CheckpointError: on all ranks, if any rank could not write; the new checkpoint is removed.
    """
    assert not set(common) & set(sharded_state), "common keys and section names share one dict"
    target = iteration_folder(root, iteration)
    staged = staged_checkpoint(target)
    try:
        with checkpoint_failures(f"checkpoint {target} was not started"):
            json.dumps(common)
            num_bytes = bytes_to_write(shards_of(sharded_state))
        needed = sum(all_gather_object(num_bytes))
        with checkpoint_failures(f"checkpoint {target} was not started"):
            if dist.get_rank() == 0:
                open_staging(target)
                _check_space(target, needed)
        with checkpoint_failures(f"checkpoint {target} was not written, earlier ones are untouched"):
            dist_checkpointing.save({**copied(sharded_state), **common}, str(staged.partial))
            written = contents_of_rank(staged.partial, dist.get_rank())
        contents = dict(ChainMap(*all_gather_object(written)))
        with checkpoint_failures(f"checkpoint {target} was not written, earlier ones are untouched"):
            if dist.get_rank() == 0:
                _publish(target, iteration, contents)
    except CheckpointError:
        if dist.get_rank() == 0:
            staged.discard()
        raise
    _logger.info("saved %s", target)


def _check_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed:  # what the last save superseded is still being deleted, perhaps
        delete_set_aside(target.parent)
        free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise CheckpointError(
            f"checkpoint {target} needs {size_text(needed)}, {target.parent} has {size_text(free)} free; "
            "remove older checkpoints there (--save-retain-last does so after each save) or choose another "
            "folder",
            field="output_path",
        )


def _publish(target: Path, iteration: int, contents: dict[str, Content]) -> None:
    partial = staged_checkpoint(target).partial
    if not is_complete(partial):
        raise CheckpointError(f"checkpoint {target} was not written: its last file, metadata.json, failed")
    write_manifest(partial, iteration, contents)
    check_held(target)
    publish(target)
