"""Work that runs out of the device's memory on some ranks is done again by all, once states have left.

A rank that fails in the midst of forward or backward leaves the others waiting for its part in their
collectives. Where each rank holds the whole model (TP = PP = CP = 1) these are the reductions and gathers of
our own optimizer: the rank goes on with them, whatever its buffers hold (`abandon_backward`), and all ranks
learn in one more small message that the step does not count. Layers cut over TP, and stages of PP, wait for
activations that the rank cannot give, and a collective that failed itself cannot be matched: there the error
ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from patch.device import streams_of
from patch.distributed.async_collectives import Pending, WaitClock, start_all_reduce
from patch.logger import get_logger
from patch.optimizer import OverlappedDistributedOptimizer
from patch.training.error_translation import LostRankError, is_out_of_memory
from patch.training.memory_advice import is_device_error
from patch.training.run_state import random_state, set_random_state
from patch.training.state_placement import evict

_log = get_logger(__name__)
_T = TypeVar("_T")


class OomRetry:
    """One step, or one batch of an evaluation: `attempt` and `start_agreement`, until `is_done`.

    Args:
        optimizer: whose states may leave the device.
        what: names the work in the log.
    """

    def __init__(self, optimizer: OverlappedDistributedOptimizer, what: str) -> None:
        self._optimizer, self._what = optimizer, what
        self._group = optimizer.groups.dp_cp
        self._can_agree = optimizer.is_offloading and self._group.size() == dist.get_world_size()
        self._random = random_state() if self._can_agree else {}
        self._error: Exception | None = None
        self._flags, self._pending = torch.zeros(2), Pending([])

    def attempt(self, work: Callable[[], _T], otherwise: Callable[[], _T]) -> _T:
        """Do `work`, or `otherwise` where it ran out of memory and the ranks can agree to do it again.

        Args:
            work: updates nothing; its batches are in memory.
            otherwise: this rank's part in the messages that the other ranks' work expects.
        Raises:
            Exception: what `work` raised, where it is something else, or where nothing can be done.
        """
        try:
            with self._optimizer.activations():
                return work()
        except Exception as error:
            if not (is_out_of_memory(error) and is_device_error(error) and self._can_retry(error)):
                raise
            self._error = error.with_traceback(None)
        # Outside the handler: the error held the stack, and with it what the attempt had allocated.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return otherwise()

    def _can_retry(self, error: Exception) -> bool:
        if self._can_agree and self._group.size() == 1:
            return self._optimizer.can_evict
        return self._can_agree and not isinstance(error, dist.DistError)

    def start_agreement(self) -> None:
        """Tell the other ranks how this one's attempt went; returns at once. All ranks of a job call it."""
        if not self._can_agree:
            return
        device = torch.device("cpu") if self._group.size() == 1 else self._optimizer.device
        self._flags = torch.zeros(2, device=device)
        if self._error is not None:  # from lists a tensor on a GPU would wait for what the GPU has to do
            self._flags[0] = 1.0
            self._flags[1] = float(not self._optimizer.can_evict)
        self._pending = start_all_reduce(self._flags, self._group)

    def is_done(self) -> bool:
        """Whether all ranks have what they need; else those that ran out of memory have evicted states.

        Raises:
            torch.OutOfMemoryError: this rank has no states left that could leave. LostRankError: another.
        """
        if not self._can_agree:
            return True
        num_short, num_hopeless = read_sums(self._flags, self._pending)
        if not num_short:
            return True
        if num_hopeless:
            raise self._error or LostRankError(f"another rank ran out of memory in {self._what}")
        if self._error is not None:
            evict(self._optimizer, self._what, str(self._error).strip().split("\n")[0])
        _log.info("%s is done again: %d rank(s) ran out of memory", self._what, num_short)
        self._error = None
        set_random_state(self._random)
        return False


def read_sums(sums: torch.Tensor, pending: Pending) -> list[float]:
    """The values of a small reduction that is under way; what a GPU has yet to compute is not waited for."""
    streams = streams_of(sums.device)
    with streams.stream(streams.Stream(sums.device)):
        pending.wait(WaitClock(sums.device))
        return sums.tolist()
