"""Context-parallel group whose ranks are threads of one process. Messages are passed in memory.

It tests what is computed and in which order. Other tests make the same calls over gloo, between processes.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from patch.distributed.context_group import ContextGroup, Zigzag

TIMEOUT_S = 60


class Mail:
    """State that the threads of a group share."""

    def __init__(self, size: int) -> None:
        self.messages: dict[tuple[int, int], SimpleQueue] = {}
        """(receiving rank, number of the message) -> queue."""
        self.parts: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


class _Shift:
    def __init__(self, group: "ThreadGroup", number: int) -> None:
        self._group, self._number = group, number

    def wait(self) -> torch.Tensor:
        self._group.events.append(f"wait {self._number}")
        return self._group.inbox(self._group.zigzag.rank, self._number).get(timeout=TIMEOUT_S)


class ThreadGroup(ContextGroup):
    def __init__(self, rank: int, size: int, mail: Mail) -> None:
        self.zigzag = Zigzag(rank, size)
        self.events: list[str] = []
        """Actions of this rank, in order."""
        self.num_sent_bytes = 0
        self._mail, self._num_shifts = mail, 0

    def inbox(self, rank: int, number: int) -> SimpleQueue:
        return self._mail.messages.setdefault((rank, number), SimpleQueue())

    def start_shift(self, tensor: torch.Tensor, *, is_reverse: bool = False) -> Any:
        assert tensor.is_contiguous()
        number, self._num_shifts = self._num_shifts, self._num_shifts + 1
        self.events.append(f"start {number}")
        self.num_sent_bytes += tensor.nbytes
        target = (self.zigzag.rank + (-1 if is_reverse else 1)) % self.zigzag.size
        self.inbox(target, number).put(tensor.clone())
        return _Shift(self, number)

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        assert parts.is_contiguous()
        rank, size = self.zigzag
        self.num_sent_bytes += parts.nbytes * (size - 1) // size
        self._mail.parts[rank] = parts
        self._mail.barrier.wait(TIMEOUT_S)
        received = torch.stack([other[rank] for other in self._mail.parts])
        self._mail.barrier.wait(TIMEOUT_S)
        return received


def run_ranks(size: int, body: Callable[[ThreadGroup], Any]) -> list:
    """Call `body` with the group of each rank, in one thread per rank; return the results by rank."""
    mail = Mail(size)
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(ThreadGroup(rank, size, mail))
        except BaseException as error:  # noqa: BLE001 - raised below
            outcomes[rank] = error
            mail.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S * 2)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
