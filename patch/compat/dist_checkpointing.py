"""Saving with megatron.core.dist_checkpointing on any device, and an error instead of a hang.

Upstream 0.16.1, all below megatron/core/dist_checkpointing/:

- strategies/filesystem_async.py:49-56 keeps the results of a save in a queue served by a manager process.
  Spawning it imports the main script again: 4 to 12 s at the first save, and a hang where that script
  has no `__main__` guard. A synchronous save reads the queue in the process that filled it.
- strategies/filesystem_async.py:232-321 forks one process for each file and waits without a time limit: a
  child that is killed, or that lacks psutil (:366), never answers. Threads are not slower
  (512 MB to memory: 0.6 s against 1.2 s).
- strategies/state_dict_saver.py:212-258 needs a CUDA device; and when rank 0 fails to write `.metadata`, the
  other ranks wait forever.
- strategies/common.py:41, validation.py:422: an error on one rank only, with the same result.
- serialization.py:427 writes the small metadata.json on rank 0; then all ranks enter a barrier, for which
  torch warns that no group is bound to a GPU. It uses the current GPU, which is the right one.
- strategies/filesystem_async.py:230 calls torch.cuda.synchronize.
- strategies/torch.py:799 and :138 use torch's deprecated load_state_dict and ShardedTensor, which would warn
  the user at every load; tensor_parallel/mappings.py uses collectives that torch 2.13 renamed.

Delete an entry when megatron-core reports that failure on all ranks, or saves without CUDA. Saving in the
background (`async_sharded_save` with a forked caller) needs a queue between processes and does not work.
"""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from megatron.core.dist_checkpointing import serialization, state_dict_utils
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import common, filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint.utils import _DistWrapper

from patch.compat.cpu import replace_torch
from patch.errors import CheckpointError
from patch.logger import get_logger

_logger = get_logger(__name__)
_save_common = common.TorchCommonSaveStrategy.save_common
_validate_sharding_integrity = state_dict_utils.validate_sharding_integrity

# The beginnings of torch's warnings about names that megatron-core uses and a user cannot change.
_OLD_NAMES = (
    "`load_state_dict` is deprecated",
    "Please use DTensor instead",
    r"`torch\.distributed\.\w+_tensor` is deprecated",
)


def _write_in_threads(
    transforms: list, use_msc: bool, rank: int, write_buckets: list, results: queue.SimpleQueue
) -> None:
    """Write this rank's files and put {index of a file: its write results}, or an error, into `results`.

    The arguments are those of `write_preloaded_data_multiproc`, which this function replaces.
    """
    try:
        with ThreadPoolExecutor(max(1, len(write_buckets))) as pool:
            outcomes = pool.map(
                partial(_write_file, transforms, use_msc), range(len(write_buckets)), write_buckets
            )
            results.put(dict(outcomes))
    except Exception as error:  # noqa: BLE001 - `_finalize` raises it on all ranks
        results.put(error)


def _write_file(transforms: list, use_msc: bool, index: int, bucket: Any) -> tuple[int, list]:
    """Write one file with megatron-core's own writer, which returns its results in queues."""
    pending: queue.Queue = queue.Queue()
    pending.put(index)
    written: queue.SimpleQueue = queue.SimpleQueue()
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(
        transforms, index, bucket, written, pending, use_fsync=True, use_msc=use_msc
    )
    _, outcome = written.get()
    if isinstance(outcome, Exception):
        raise _operating_system_error(outcome) or outcome
    return index, outcome


def _operating_system_error(error: BaseException | None) -> OSError | None:
    """The OSError, such as a full disk, behind the "unexpected pos 704 vs 598" of torch's zip writer."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _on_all_ranks(step: str, function: Callable[[], None]) -> None:
    """Call `function` on every rank; an error on one of them is raised on all (CheckpointException)."""
    _DistWrapper(None, True, 0).all_reduce(step, function, lambda outcomes: None)


def _save_common_together(self: common.TorchCommonSaveStrategy, state: Any, checkpoint_dir: Any) -> None:
    _on_all_ranks("write common.pt", partial(_save_common, self, state, checkpoint_dir))


def _validate_together(global_metadata: Any, common_state_dict: Any = None) -> None:
    _on_all_ranks(
        "validate sharding", partial(_validate_sharding_integrity, global_metadata, common_state_dict)
    )


def _finalize(storage_writer: Any, global_metadata: Any, dist_wrapper: _DistWrapper) -> None:
    """Gather the ranks' write results and write `.metadata`; any error is raised on all ranks."""
    dist_wrapper.all_reduce(
        "write", storage_writer.retrieve_write_results, partial(storage_writer.finish, global_metadata)
    )


def _save_config(config: CheckpointingConfig, checkpoint_dir: str) -> None:
    """Write metadata.json, or log why not: without it the folder is not complete, as the caller checks."""
    try:
        save_config(config, checkpoint_dir)
    except OSError as error:
        _logger.error("%s/metadata.json could not be written: %s", checkpoint_dir, error)


def apply(cuda: bool) -> None:
    """Correct saving.

    Args:
        cuda: whether this process computes on a GPU.
    Raises:
        CheckpointError: psutil is not installed; megatron-core's writer needs it and does not declare it.
    """
    if not filesystem_async.HAVE_PSUTIL:
        raise CheckpointError("saving a checkpoint needs psutil, which is not installed: pip install psutil")
    filesystem_async._get_write_results_queue = queue.SimpleQueue
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_in_threads)
    torch_strategies.save_state_dict_async_finalize = _finalize
    common.TorchCommonSaveStrategy.save_common = _save_common_together
    state_dict_utils.validate_sharding_integrity = _validate_together
    serialization.save_config = _save_config
    for message in _OLD_NAMES:
        warnings.filterwarnings("ignore", message, FutureWarning)
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context", UserWarning)
    if not cuda:
        replace_torch(filesystem_async.__name__)
