"""The messages of context parallelism over NCCL and gloo: around a ring of neighbours, and all-to-all."""

from __future__ import annotations

import torch
import torch.distributed as dist

from patch.distributed.async_collectives import Pending, start_swap
from patch.distributed.zigzag import Zigzag


class Shift:
    """A tensor that is on its way to the next rank, while another one comes from the rank before."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, pending: Pending) -> None:
        self._sent, self._received, self._pending = sent, received, pending

    def wait(self) -> torch.Tensor:
        """Wait for the tensor from the previous rank of the ring and return it (stream-ordered on CUDA)."""
        self._pending.wait()
        return self._received


class ContextGroup:
    """The ranks that share each sequence, as a ring.

    Args:
        group: megatron-core's context-parallel group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.zigzag = Zigzag.of(group)

    def start_shift(self, tensor: torch.Tensor, *, is_reverse: bool = False) -> Shift:
        """Send a contiguous tensor to the next rank, and receive one of the same shape from the rank before.

        All ranks make these calls in the same order. The tensor must not be changed before `wait`.

        Args:
            tensor: what is sent.
            is_reverse: send to the rank before, and receive from the next one.
        """
        rank, size = self.zigzag
        distance = -1 if is_reverse else 1
        received = torch.empty_like(tensor)
        target, source = (rank + distance) % size, (rank - distance) % size
        pending = start_swap(tensor, received, self._group, target=target, source=source)
        return Shift(tensor, received, pending)

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Part r of [CP, ...] goes to rank r; out: [CP, ...], the part that each rank had for this one."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        return received
