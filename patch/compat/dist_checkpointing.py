"""Saving with megatron.core.dist_checkpointing on any device, and an error instead of a hang.

Upstream 0.16.1, all below megatron/core/dist_checkpointing/:

- strategies/filesystem_async.py:49-56 keeps the results of a save in a queue served by a manager process.
  Spawning it imports the main script again: 4 to 12 s at the first save, and a hang where that script
  has no `__main__` guard. A synchronous save reads the queue in the process that filled it.
- strategies/filesystem_async.py:232-321 forks one process for each file and waits without a limit: a child
  that is killed, or that lacks psutil (:366), never answers. Threads write no slower
  (512 MB to memory: 0.6 s against 1.2 s).
- strategies/state_dict_saver.py:212-258 asks for a CUDA device and lets an error of rank 0, while it
  writes `.metadata`, leave the other ranks waiting.
- strategies/common.py:41, validation.py:422: fail on one rank only, with the same end.
- serialization.py:427 writes the small metadata.json on rank 0, then all ranks meet in a barrier, of which
  torch warns where no group is bound to a GPU: it takes the current one, which is the right one.
- strategies/filesystem_async.py:230 calls torch.cuda.synchronize.
- strategies/torch.py:799 and :138 use torch's deprecated load_state_dict and ShardedTensor, of which every
  load would warn the user; tensor_parallel/mappings.py uses collectives that torch 2.13 renamed.

Delete an entry when upstream reports that failure on all ranks, or saves without CUDA. Saving in the
background (`async_sharded_save` with a forked caller) needs a queue between processes and is not covered.
"""

from __future__ import annotations

import logging
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

from patch.compat import unpickle
from patch.compat.cpu import replace_torch
from patch.errors import CheckpointError

_logger = logging.getLogger(__name__)
_save_common = common.TorchCommonSaveStrategy.save_common
_validate_sharding_integrity = state_dict_utils.validate_sharding_integrity

# Beginnings of torch's warnings about names that upstream uses and a user cannot change.
_OLD_NAMES = (
    "`load_state_dict` is deprecated",
    "Please use DTensor instead",
    r"`torch\.distributed\.\w+_tensor` is deprecated",
)


def _write_in_threads(
    transforms: list, use_msc: bool, rank: int, write_buckets: list, results: queue.SimpleQueue
) -> None:
    """Write this rank's files and put {file's index: write results}, or the first error, into `results`."""
    try:
        with ThreadPoolExecutor(max(1, len(write_buckets))) as pool:
            outcomes = pool.map(
                partial(_write_file, transforms, use_msc), range(len(write_buckets)), write_buckets
            )
            results.put(dict(outcomes))
    except Exception as error:  # noqa: BLE001 - it is raised on all ranks by _finalize
        results.put(error)


def _write_file(transforms: list, use_msc: bool, index: int, bucket: Any) -> tuple[int, list]:
    """One file through upstream's own writer, which reports through queues."""
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
    """The full disk behind torch's "unexpected pos 704 vs 598", which is all its zip writer says of it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _on_all_ranks(step: str, function: Callable[[], None]) -> None:
    """Call `function` on every rank; an error on any of them is raised on all (CheckpointException)."""
    _DistWrapper(None, True, 0).all_reduce(step, function, lambda outcomes: None)


def _save_common_together(self: common.TorchCommonSaveStrategy, state: Any, checkpoint_dir: Any) -> None:
    _on_all_ranks("write common.pt", partial(_save_common, self, state, checkpoint_dir))


def _validate_together(global_metadata: Any, common_state_dict: Any = None) -> None:
    _on_all_ranks(
        "validate sharding", partial(_validate_sharding_integrity, global_metadata, common_state_dict)
    )


def _finalize(storage_writer: Any, global_metadata: Any, dist_wrapper: _DistWrapper) -> None:
    """Gather the ranks' write results and write `.metadata`; whatever failed is raised on all ranks."""
    dist_wrapper.all_reduce(
        "write", storage_writer.retrieve_write_results, partial(storage_writer.finish, global_metadata)
    )


def _save_config(config: CheckpointingConfig, checkpoint_dir: str) -> None:
    """Without a metadata.json the folder is no checkpoint, which the caller of `save` looks at."""
    try:
        save_config(config, checkpoint_dir)
    except OSError as error:
        _logger.error("%s/metadata.json could not be written: %s", checkpoint_dir, error)


def apply(cuda: bool) -> None:
    """Mend saving, and let loading unpickle nothing but plain data.

    Raises:
        CheckpointError: psutil is missing, which upstream's writer needs and does not declare.
    """
    if not filesystem_async.HAVE_PSUTIL:
        raise CheckpointError("saving a checkpoint needs psutil, which is not installed: pip install psutil")
    unpickle.apply()
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
