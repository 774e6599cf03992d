"""megatron-core's own checkpoint saver on a machine without a GPU, as other programs use it.

Its planning, files and index stay unchanged. Its writer would start processes, and its end needs a GPU
(strategies/filesystem_async.py:49, 230, 321; strategies/state_dict_saver.py:251). Since 0.17 it writes in
threads, so that only its end and its queue are replaced.
"""

import queue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint.utils import _DistWrapper

from patch.compat import RELEASE
from patch.compat.cpu import replace_torch


def let_upstream_save() -> None:
    """Make `megatron.core.dist_checkpointing.save` work in this process."""
    replace_torch(filesystem_async.__name__)
    if RELEASE >= (0, 17):
        replace_torch(state_dict_saver.__name__)
        filesystem_async.get_write_results_queue = lambda *unused: queue.SimpleQueue()
        return
    filesystem_async._get_write_results_queue = queue.SimpleQueue
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write)
    torch_strategies.save_state_dict_async_finalize = _finalize


def _write(transforms: list, use_msc: bool, rank: int, buckets: list, results: queue.SimpleQueue) -> None:
    """Write this rank's files one after the other with upstream's function for one file."""
    written: queue.SimpleQueue = queue.SimpleQueue()
    pending: queue.Queue = queue.Queue()
    for index, bucket in enumerate(buckets):
        pending.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, index, bucket, written, pending, use_fsync=False, use_msc=use_msc
        )
    results.put(dict(written.get() for _ in buckets))


def _finalize(writer: Any, metadata: Any, job: _DistWrapper) -> None:
    job.all_reduce("write", writer.retrieve_write_results, lambda results: writer.finish(metadata, results))
