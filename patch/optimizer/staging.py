"""What gradients are collected in and sent from where a rank keeps its shards only (ZeRO stage `gradients`).

Message m of a step leaves from slot m mod n, on all ranks, whatever the order of their gradients was.
A bucket that opens so early that the message before in its slot has not left is collected in a spare, and
moved into the slot when it leaves: that happens where unused parameters or several domains hold buckets open.
"""

from __future__ import annotations

import torch


class Staging:
    """Slots for the messages of a step, and spares.

    Args:
        like: on the device, of the type of gradients.
        numel: of the largest bucket.
        num_slots: how many messages may be open at a time, from the first gradient until the sum is there.
    """

    def __init__(self, like: torch.Tensor, numel: int, num_slots: int) -> None:
        self._slots = [like.new_empty(numel) for _ in range(num_slots)]
        self._spares: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []
        self._num_messages = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.nbytes for slot in self._slots)

    def reset(self) -> None:
        """Begin a step: nothing is on its way, and spares that an error left with their buckets are back."""
        self._num_messages = 0
        self._spares += self._lent
        self._lent = []

    def next_message(self) -> int:
        """The number of a further message; all ranks ask in one order."""
        self._num_messages += 1
        return self._num_messages - 1

    def is_free(self, message: int, num_open: int) -> bool:
        """Whether the message before in its slot has ended.

        Args:
            message: its number.
            num_open: so many, the newest, have not ended.
        """
        return message - len(self._slots) < self._num_messages - num_open

    def slot(self, message: int) -> torch.Tensor:
        """(numel,) where it leaves from."""
        return self._slots[message % len(self._slots)]

    def is_slot(self, buffer: torch.Tensor) -> bool:
        """Whether the buffer lies in a slot."""
        address = buffer.untyped_storage().data_ptr()
        return any(slot.untyped_storage().data_ptr() == address for slot in self._slots)

    def borrow_spare(self) -> torch.Tensor:
        """(numel,) memory that is in no slot."""
        spare = self._spares.pop() if self._spares else torch.empty_like(self._slots[0])
        self._lent.append(spare)
        return spare

    def give_back(self, spare: torch.Tensor) -> None:
        """Whoever borrowed it has no need of it any more."""
        self._lent = [lent for lent in self._lent if lent is not spare]
        self._spares.append(spare)
