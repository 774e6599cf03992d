"""What torch's allocator reserves on a GPU beyond what is allocated: memory that no chunk can have."""

from __future__ import annotations


class Fragments:
    """Learns it from an allocator's counts, step by step.

    What is reserved stays reserved when it is given up, so a count tells of fragments only where all that was
    given up before has been returned to the device.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """In the last step whose counts told of it."""
        self._is_kept = True

    def forget(self) -> None:
        """Memory was given up that the allocator keeps for itself."""
        self._is_kept = True

    def learn(self, max_allocated: int, max_reserved: int) -> bool:
        """Take in the largest counts of a step.

        Returns:
            whether the allocator is to return to the device what it keeps, so that the next step tells.
        """
        was_kept, self._is_kept = self._is_kept, False
        self.num_bytes = 0 if was_kept else max_reserved - max_allocated
        return was_kept
