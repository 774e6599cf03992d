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
        self._has_freed_memory = True
        """Whether the allocator keeps memory that was freed, so that the next step cannot be measured."""

    def invalidate(self) -> None:
        """Record that memory was freed, which the allocator keeps."""
        self._has_freed_memory = True

    def update(self, max_allocated: int, max_reserved: int) -> bool:
        """Update the estimate after a step.

        Args:
            max_allocated: the most bytes that were allocated in the step.
            max_reserved: the most bytes that torch had reserved in the step.
        Returns:
            whether the caller should empty the allocator's cache, so that the next step can be measured.
        """
        had_freed_memory = self._has_freed_memory
        self._has_freed_memory = False
        self.num_bytes = 0 if had_freed_memory else max_reserved - max_allocated
        return had_freed_memory
