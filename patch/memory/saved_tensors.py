"""Tensors that autograd saves for backward, kept in host memory until backward needs them.

    saving     in forward: tensors that autograd saves form a group; at the end its copies to the host start
    release    later in forward: the device memory of groups is freed when the copies have ended
    fetch      early in backward: the copies back start
    unpack     backward needs the first tensor of a group: compute waits for the copies

A storage is copied once as a whole, even if several saved tensors are views of it. Device memory is allocated
and freed in the order of the compute stream. So compute waits for a copy to the host before the source memory
is freed. A copy back waits until compute has finished with its target memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from patch.memory.offload_device import Event, OffloadDevice, is_weight

_LEAST_UNIT = 4096


class HostBlocks:
    """Host blocks for groups of tensors. The number of blocks is at most the peak number in use."""

    def __init__(self, device: OffloadDevice) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []
        """Free blocks by size."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """Take a (n,) uint8 block of at least this many bytes; its content is undefined.

        Raises:
            MemoryError: the system cannot pin that much memory.
        """
        smallest = bisect_left(self._free, num_bytes, key=torch.Tensor.numel)
        if smallest < len(self._free):
            return self._free.pop(smallest)
        if self._free:  # the new block replaces the largest free block, which is too small
            self._free.pop()
        # Round up by at most an eighth, so that groups of nearly equal sizes share blocks.
        unit = max(_LEAST_UNIT, 1 << max(num_bytes.bit_length() - 4, 0))
        return self._device.allocate_pinned(-(-num_bytes // unit) * unit, torch.uint8)

    def give(self, block: torch.Tensor) -> None:
        """Return a block. Later copies must not overtake earlier copies from or to the block."""
        insort(self._free, block, key=torch.Tensor.numel)


_ALIGNMENT = 512
"""Alignment of storages in a block, in bytes; equal to that of torch's CUDA allocations."""


class Clock(Protocol):
    """Measures how long compute waits."""

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which compute only waits."""

    def read_ms(self) -> float:
        """Return the milliseconds that compute waited since the last call."""


class _Storage:
    """A storage that autograd saves: (n,), in the dtype of its first saved tensor."""

    def __init__(self, tensor: torch.Tensor, group: SavedGroup) -> None:
        self.on_device: torch.Tensor | None = tensor
        self.on_host: torch.Tensor | None = None
        """(n,), a part of the group's block, or None if the host has no copy."""
        self.group, self.num_bytes = group, tensor.nbytes

    def has_memory(self) -> bool:
        """Return whether the device has the content; a storage to be recomputed has none until backward."""
        return self.on_device is not None and self.on_device.untyped_storage().nbytes() > 0

    def send(self, block: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.on_device is not None
        self.on_host = block[begin : begin + self.num_bytes].view(self.on_device.dtype)
        return self.on_device, self.on_host

    def fetch(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.on_host is not None
        self.on_device = torch.empty(len(self.on_host), dtype=self.on_host.dtype, device=device)
        return self.on_host, self.on_device


class _View(NamedTuple):
    """A saved tensor as a view of its storage. Only autograd refers to it."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        assert self.storage.on_device is not None, "the step of this graph has ended"
        whole = self.storage.on_device.view(self.dtype)
        return whole.as_strided(self.size, self.stride, self.offset)


class SavedGroup:
    """The tensors that autograd saved in one `saving` context."""

    def __init__(self) -> None:
        self.storages: list[_Storage] = []
        """Offloaded storages, until they are fetched. Then autograd frees each storage after its use."""
        self.block: torch.Tensor | None = None
        self.sent: Event | None = None
        """The end of the copies to the host, or None after the device memory is released."""
        self.fetched: Event | None = None
        """The end of the copies back, or None after compute has waited for them."""


class SavedTensors:
    """All groups of a process, copied by `device`; the tensors are on `torch_device`."""

    def __init__(self, device: OffloadDevice, torch_device: torch.device) -> None:
        self.device = device
        self.clock: Clock | None = None
        """Measures the time that compute waits for copies; with synchronous copies, their time too."""
        self._torch_device = torch_device
        self._blocks = HostBlocks(device)
        self._open: list[SavedGroup] = []
        self._num_bytes = 0

    @contextmanager
    def saving(self, stays: Callable[[torch.Tensor], bool]) -> Iterator[SavedGroup]:
        """Offload the tensors that autograd saves in this context; their copies start when it ends.

        Args:
            stays: returns whether a saved tensor stays on the device. Weights always stay.
        """
        group = SavedGroup()
        storages: dict[int, _Storage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor | _View:
            self.device.count(tensor)
            saved = tensor.detach()  # the original tensor would keep its own graph alive
            if is_weight(tensor) or stays(tensor):
                return saved
            memory = saved.untyped_storage()
            if memory._cdata not in storages:
                whole = saved.as_strided((memory.nbytes() // saved.itemsize,), (1,), 0)
                storages[memory._cdata] = _Storage(whole, group)
            storage = storages[memory._cdata]
            return _View(storage, saved.dtype, saved.size(), saved.stride(), int(saved.storage_offset()))

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield group
        self._send(group, list(storages.values()))

    def _send(self, group: SavedGroup, storages: Sequence[_Storage]) -> None:
        """Start the copies to the host, except of freed storages that backward will recompute."""
        group.storages = [storage for storage in storages if storage.has_memory()]
        if not group.storages:
            return
        ends = list(accumulate(-(-each.num_bytes // _ALIGNMENT) * _ALIGNMENT for each in group.storages))
        group.block = self._blocks.take(ends[-1])
        self._open.append(group)
        copies = [
            storage.send(group.block, begin)
            for storage, begin in zip(group.storages, [0, *ends], strict=False)
        ]
        self._num_bytes += sum(storage.num_bytes for storage in group.storages)
        with self._waiting():
            group.sent = self.device.copy_to_host(copies, self.device.record_event())

    def release(self, *, but: SavedGroup | None = None) -> None:
        """Free the device memory of groups whose copies have started; compute waits for the copies.

        Args:
            but: a group to keep, whose copies overlap with compute.
        """
        for group in self._open:
            if group.sent is not None and group is not but:
                with self._waiting():
                    group.sent.wait()
                group.sent = None
                for storage in group.storages:
                    storage.on_device = None

    def fetch(self, group: SavedGroup) -> None:
        """Start the copies of a group back, unless its device memory was not released."""
        if group.block is None or group.fetched is not None:
            return
        if group.sent is not None:
            self._close(group)
            return
        copies = [storage.fetch(self._torch_device) for storage in group.storages]
        for _, target in copies:
            self.device.count(target)
        with self._waiting():
            group.fetched = self.device.copy_to_device(copies, self.device.record_event())

    def end_step(self) -> None:
        """End a forward and backward, and drop groups that an error left, whose graphs are unusable."""
        for group in list(self._open):
            for event in (group.sent, group.fetched):
                if event is not None:
                    event.wait()
            self._close(group)

    def pop_bytes(self) -> int:
        """Return the bytes copied to the host since the last call."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def pop_wait_ms(self) -> float:
        """Return the milliseconds that compute waited for copies since the last call; 0 without a clock."""
        return 0.0 if self.clock is None else self.clock.read_ms()

    def _unpack(self, saved: torch.Tensor | _View) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        self._need(saved.storage.group)
        return saved.tensor()

    def _need(self, group: SavedGroup) -> None:
        self.fetch(group)
        if group.fetched is not None:
            with self._waiting():
                group.fetched.wait()
            self._close(group)

    def _close(self, group: SavedGroup) -> None:
        """Give back the host block. Later copies to the block follow the last copy from it."""
        assert group.block is not None
        self._blocks.give(group.block)
        self._open.remove(group)
        for storage in group.storages:
            storage.on_host = None
        group.storages, group.block, group.sent, group.fetched = [], None, None, None

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.waiting()
