"""An alarm for tests: any operation on memory of weights that are still on their way is an error.

Unlike the optimizer's own means it sees every operation of torch, below autograd, whoever holds the tensor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves

from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer.sharded_flat import ShardedFlat


class StaleReadError(AssertionError):
    """Somebody read or wrote a weight before its new value was there."""


class _Alarm(TorchDispatchMode):
    def __init__(self, optimizer: OverlappedDistributedOptimizer) -> None:
        super().__init__()
        self._weights = optimizer.param_buffer
        self._names = {id(parameter): name for name, parameter in optimizer._trained.named}
        self._storages = [
            None if isinstance(flat, ShardedFlat) else flat.buffer.untyped_storage().data_ptr()
            for flat in self._weights.flats
        ]
        """Of each domain; weights in shards are NaN before they are there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; torch's guard against that takes longer than the check itself."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence, args: Sequence = (), kwargs: dict | None = None
    ) -> Any:
        # Views read nothing; messages are those that bring the weights.
        if not self._weights.is_settled and func.namespace == "aten" and not func.is_view:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._check(tensor, func)
        return func(*args, **(kwargs or {}))

    def _check(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self._storages or not tensor.numel():
            return
        weights, begin = self._weights, tensor.storage_offset()
        for index in {*weights._pending, *weights._updating}:
            bucket_range = weights._bucket_ranges[index]
            is_here = storage == self._storages[bucket_range.domain]
            for param, member in zip(bucket_range.params, weights._members[index], strict=True):
                if is_here and param.begin <= begin < param.end:
                    raise StaleReadError(f"{func} on {self._names[id(member)]}, which is on its way")


@contextmanager
def no_stale_reads(optimizer: OverlappedDistributedOptimizer) -> Iterator[None]:
    """Raise StaleReadError where this thread touches weights of `optimizer` that are on their way.

    Not on a fake device, itself a dispatch mode: there the optimizer's own copies run in this thread. Nor
    where nothing can be on its way, because a rank updates all weights itself and at once.
    """
    is_sharded = any(domain.num_shards > 1 for domain in optimizer.param_buffer._domains)
    is_needed = (is_sharded or optimizer.placement.is_offloading) and not is_in_torch_dispatch_mode()
    with _Alarm(optimizer) if is_needed else nullcontext():
        yield
