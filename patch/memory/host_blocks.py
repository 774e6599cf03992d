"""A pool of blocks of pinned host memory that are used again: pinning takes longer than copying."""

from __future__ import annotations

import torch

from patch.memory.offload_device import OffloadDevice

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
