"""A load by megatron-core with another reader of torch's DCP.

megatron/core/dist_checkpointing/strategies/torch.py:754 chooses its reader by a private function. Delete when
its strategy takes a StorageReader.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint import StorageReader


@contextmanager
def reading_with(reader: StorageReader) -> Iterator[None]:
    """Context of a load by megatron-core, which reads with `reader`; it is one for the whole process."""
    before = torch_strategies._get_filesystem_reader

    def chosen(checkpoint_dir: Any, cache_metadata: bool = False) -> StorageReader:
        return reader

    torch_strategies._get_filesystem_reader = chosen
    try:
        yield
    finally:
        torch_strategies._get_filesystem_reader = before
