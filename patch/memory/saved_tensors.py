"""Tensors that autograd saves for backward are in host memory until backward needs them.

    saving     forward: what autograd saves inside is a group, whose copies to the host start at the end
    release    forward goes on: the groups' memory on the device is freed when the copies have ended
    fetch      backward comes near: the copies back start
    unpack     backward needs the first tensor of a group: compute waits for the copies

A storage is copied once, and whole, however many saved tensors are views of it. Memory of the device is
allocated and freed in the order of the compute stream. So compute waits for a copy before the memory that it
reads is freed, and a copy back waits for what compute did before with the memory that it writes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from patch.memory.offload_device import Event, OffloadDevice, is_weight

_LEAST_UNIT = 4096


class HostBlocks:
    """Blocks for groups of tensors. There are never more blocks than were in use at the same time.

    Args:
        device: allocates them.
    """

    def __init__(self, device: OffloadDevice) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """A (n,) uint8 block of at least this many bytes; its content is undefined.

        Raises:
            MemoryError: the system cannot pin that much memory.
        """
        large_enough = [index for index, block in enumerate(self._free) if block.numel() >= num_bytes]
        if large_enough:
            return self._free.pop(min(large_enough, key=lambda index: self._free[index].numel()))
        if self._free:  # a new one takes the place of one that is too small
            self._free.pop(max(range(len(self._free)), key=lambda index: self._free[index].numel()))
        # Rounded by up to an eighth, so that groups of nearly equal sizes share blocks.
        unit = max(_LEAST_UNIT, 1 << max(num_bytes.bit_length() - 4, 0))
        return self._device.allocate_pinned(-(-num_bytes // unit) * unit, torch.uint8)

    def give(self, block: torch.Tensor) -> None:
        """Return a block. Copies that start from now on must not overtake those from and to it."""
        self._free.append(block)


_ALIGNMENT = 512
"""Alignment of storages in a block, in bytes, as of torch's own allocations on a GPU."""


class Clock(Protocol):
    """Measures how long compute waits."""

    def waiting(self) -> AbstractContextManager[None]:
        """A context in which compute only waits."""

    def read_ms(self) -> float:
        """Milliseconds of it since the last call."""


class _Storage:
    """A storage that autograd saves.

    Args:
        tensor: (n,), the whole storage, in the type of the first saved tensor in it.
        group: the group that it is in.
    """

    def __init__(self, tensor: torch.Tensor, group: SavedGroup) -> None:
        self.on_device: torch.Tensor | None = tensor
        """(n,); None while only the host has the content."""
        self.on_host: torch.Tensor | None = None
        """(n,), a part of the group's block."""
        self.group, self.num_bytes = group, tensor.nbytes

    def has_memory(self) -> bool:
        """Whether there is memory; what is recomputed has none until backward."""
        return self.on_device is not None and self.on_device.untyped_storage().nbytes() > 0

    def send(self, block: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a part of a host block; the copy to start."""
        assert self.on_device is not None
        self.on_host = block[begin : begin + self.num_bytes].view(self.on_device.dtype)
        return self.on_device, self.on_host

    def fetch(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate memory on the device; the copy to start."""
        assert self.on_host is not None
        self.on_device = torch.empty(len(self.on_host), dtype=self.on_host.dtype, device=device)
        return self.on_host, self.on_device


class _View(NamedTuple):
    """A saved tensor: where it is in its storage. Only autograd refers to it."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """The tensor, whose storage is on the device."""
        assert self.storage.on_device is not None, "the step of this graph has ended"
        whole = self.storage.on_device.view(self.dtype)
        return whole.as_strided(self.size, self.stride, self.offset)


class SavedGroup:
    """The tensors that autograd saved in one `saving`."""

    def __init__(self) -> None:
        self.storages: list[_Storage] = []
        """Offloaded storages, until they are back; then each is freed when backward has used it."""
        self.block: torch.Tensor | None = None
        """Host memory of all of them, until they are back."""
        self.sent: Event | None = None
        """The end of the copies to the host, while the device's memory is not released."""
        self.fetched: Event | None = None
        """The end of the copies back, while compute has not waited for it."""


class SavedTensors:
    """The groups of a process.

    Args:
        device: copies on streams of its own.
        torch_device: where the tensors are.
    """

    def __init__(self, device: OffloadDevice, torch_device: torch.device) -> None:
        self.device = device
        self.clock: Clock | None = None
        """Gets the time that compute waits for copies; if the device copies at once, their time too."""
        self._torch_device = torch_device
        self._blocks = HostBlocks(device)
        self._open: list[SavedGroup] = []
        """Groups with a block, in the order of their `saving`."""
        self._num_bytes = 0

    @contextmanager
    def saving(self, stays: Callable[[torch.Tensor], bool]) -> Iterator[SavedGroup]:
        """A context for a part of forward. At its end the copies of what autograd saved inside start.

        Args:
            stays: whether a saved tensor is to stay on the device; weights do.
        """
        group = SavedGroup()
        storages: dict[int, _Storage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor | _View:
            self.device.count(tensor)
            saved = tensor.detach()  # the tensor itself would refer to its own graph
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
        """Start the copies to the host, except of memory that was given up to be recomputed in backward."""
        group.storages = [storage for storage in storages if storage.has_memory()]
        if not group.storages:
            return
        ends = list(accumulate(_aligned(storage.num_bytes) for storage in group.storages))
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
        """Free the device's memory of groups whose copies have been started; compute waits for the copies.

        Args:
            but: a group whose copies go on beside compute.
        """
        for group in self._open:
            if group.sent is not None and group is not but:
                with self._waiting():
                    group.sent.wait()
                group.sent = None
                for storage in group.storages:
                    storage.on_device = None

    def fetch(self, group: SavedGroup) -> None:
        """Start the copies of a group back, unless its memory was not released."""
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
        """End a forward and backward. What an error left behind is given up: its graph cannot be used."""
        for group in list(self._open):
            for event in (group.sent, group.fetched):
                if event is not None:
                    event.wait()
            self._close(group)

    def pop_bytes(self) -> int:
        """Bytes copied to the host since the last call."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def pop_wait_ms(self) -> float:
        """Milliseconds that compute waited for copies since the last call; 0 without a clock."""
        return 0.0 if self.clock is None else self.clock.read_ms()

    def _unpack(self, saved: torch.Tensor | _View) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        self._need(saved.storage.group)
        return saved.tensor()

    def _need(self, group: SavedGroup) -> None:
        """Make compute wait until a group is on the device."""
        self.fetch(group)
        if group.fetched is not None:
            with self._waiting():
                group.fetched.wait()
            self._close(group)

    def _close(self, group: SavedGroup) -> None:
        """The host's copies are not needed any more, and the rest is up to autograd's references.

        The next copy to the block follows the last one, and what compute has waited for.
        """
        assert group.block is not None
        self._blocks.give(group.block)
        self._open.remove(group)
        for storage in group.storages:
            storage.on_host = None
        group.storages, group.block, group.sent, group.fetched = [], None, None, None

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.waiting()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
