"""Buffers in memory of NCCL that is registered with the groups that send them: --use-nccl-ub.

NCCL then sends from the buffers and receives into them without a copy of its own, and uses fewer of the
GPU's processors. It asks for an order (allocate, meet, register, use, deregister, free) and for two things
that no rank can see alone: in a message either all ranks of a group pass registered memory or none does, and
all pass the same offset in it. So every buffer has a segment of its own, what is registered is decided by the
layout, which all ranks share, and a rank that cannot register does not go on.

Registration is local: no rank waits for another in it. Only the meeting is collective, in the order of the
groups, which is that of their messages; and the end, when all ranks of the job have registered, or all fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

from patch.compat.nccl import backend_of, fixed_segments
from patch.distributed.collectives import all_or_none
from patch.errors import ConfigError


class Pool(Protocol):
    """Memory that can be registered, and what is done with it."""

    def allocating(self) -> AbstractContextManager[None]:
        """Context in which this thread allocates from it."""

    def meet(self, group: dist.ProcessGroup) -> None:
        """Connect the group's ranks, which all call it: communicators begin with their first message."""

    def register(self, group: dist.ProcessGroup) -> None:
        """Register all that was allocated with this rank's communicator of the group."""

    def deregister(self, group: dist.ProcessGroup) -> None:
        """Undo `register` when all that was sent has arrived."""

    def free(self) -> None:
        """Give the memory back as soon as no tensor lies in it."""


class RegisteredMemory:
    """Memory of a pool, registered with groups until `release`.

    All that is registered in this process is held until then, whatever happens to the tensors: torch
    would deregister what it frees, and fail where the group has been destroyed before.

    Args:
        pool: empty; None: it is ordinary memory, and nothing is registered.
        groups: with several ranks each, in the same order on all ranks that they have in common.
        is_wanted: whether ranks of the job register at all, this one or others; the same on all.
    """

    _registered: ClassVar[list[RegisteredMemory]] = []

    def __init__(self, pool: Pool | None, groups: Sequence[dist.ProcessGroup], *, is_wanted: bool) -> None:
        self._pool, self._groups, self._is_wanted = pool, list(dict.fromkeys(groups)), is_wanted
        self._num_registered = 0

    def allocating(self) -> AbstractContextManager[None]:
        """Context in which this thread allocates what is to be registered."""
        assert not self._num_registered, "allocate before `register`"
        return nullcontext() if self._pool is None else self._pool.allocating()

    def register(self) -> None:
        """Register all that was allocated with every group; all ranks of the job call it.

        Raises:
            Exception: one rank could not; PatchError on the others.
        """
        if not self._is_wanted:
            return
        with all_or_none():
            if self._pool is not None:
                self._register(self._pool)

    def _register(self, pool: Pool) -> None:
        self._registered.append(self)
        for group in self._groups:  # all before the first registration, whose failure leaves no rank waiting
            pool.meet(group)
        for group in self._groups:
            pool.register(group)
            self._num_registered += 1

    def release(self) -> None:
        """Deregister everything, then free the pool; a second call does nothing."""
        if self._pool is None or self not in self._registered:
            return
        self._registered.remove(self)
        for group in reversed(self._groups[: self._num_registered]):
            self._pool.deregister(group)
        self._pool.free()

    @classmethod
    def release_all(cls) -> None:
        """Release all that is registered in this process: call before groups are destroyed."""
        for memory in cls._registered[:]:
            memory.release()


class NcclPool:
    """A pool of ncclMemAlloc's memory.

    Args:
        group: any of the groups.
        device: of this rank.
    Raises:
        ConfigError: the group does not send over NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if device.type != "cuda" or dist.get_backend(group) != "nccl":
            got = f"tensors on {device.type} over {dist.get_backend(group)}"
            raise ConfigError(f"got true with {got}, expected a GPU and NCCL, or false", field="use_nccl_ub")
        self._device = device
        with torch.cuda.device(device):
            # Not split: a segment for each buffer, so that offsets in it are the same on all ranks.
            allocator = backend_of(group, device).mem_allocator
            self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool(allocator, no_split=True)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Context in which this thread allocates from it."""
        with fixed_segments(os.environ), torch.cuda.use_mem_pool(self._open(), self._device):
            yield

    def meet(self, group: dist.ProcessGroup) -> None:
        """Send a first message."""
        dist.all_reduce(torch.zeros(1, device=self._device), group=group)

    def register(self, group: dist.ProcessGroup) -> None:
        """Register every segment."""
        backend_of(group, self._device).register_mem_pool(self._open())

    def deregister(self, group: dist.ProcessGroup) -> None:
        """Deregister every segment, when the device has nothing more to do."""
        torch.cuda.synchronize(self._device)
        backend_of(group, self._device).deregister_mem_pool(self._open())

    def free(self) -> None:
        """Drop the pool."""
        self._pool = None

    def _open(self) -> torch.cuda.MemPool:
        assert self._pool is not None, "the pool was freed"
        return self._pool
