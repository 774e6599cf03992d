"""How much memory torch's caching allocator reserves on a GPU beyond what is allocated."""

from __future__ import annotations


class Fragmentation:
    """An estimate of the bytes lost to fragmentation, from the allocator's statistics of each step.

    The allocator keeps memory that was freed, so reserved minus allocated measures fragmentation only in a
    step before which all freed memory has been returned to the device.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes lost in the last step that could be measured."""
        self._holds_freed_memory = True

    def invalidate(self) -> None:
        """Take note that memory was freed which the allocator keeps."""
        self._holds_freed_memory = True

    def update(self, max_allocated: int, max_reserved: int) -> bool:
        """Take in the peak statistics of a step, in bytes.

        Returns:
            whether the caller should empty the allocator's cache, so that the next step can be measured.
        """
        held_freed_memory, self._holds_freed_memory = self._holds_freed_memory, False
        self.num_bytes = 0 if held_freed_memory else max_reserved - max_allocated
        return held_freed_memory
