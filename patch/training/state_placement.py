"""Move optimizer states between host and device, before steps and after an OOM error, and log each move.

If some ranks run out of device memory in a step, they move states to the host, and all ranks repeat the step.
If a rank fails in forward or backward, the other ranks still wait for it in their collectives. If each rank
has the whole model (TP = PP = CP = 1), these are the reductions and gathers of our own optimizer. The failed
rank takes part in them with whatever values its buffers contain (`abandon_backward`). A small all-reduce then
tells all ranks that the step does not count.

With TP, PP or CP, the other ranks wait for values that the failed rank cannot compute. A failed collective
cannot be completed either. In both cases the error ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from patch.distributed.async_collectives import CommHandle, WaitClock, read_values, start_all_reduce
from patch.distributed.collectives import on_all_ranks
from patch.logger import get_logger
from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer.states.placement import Move
from patch.text import counted, size_text
from patch.training.guards.error_translation import LostRankError, is_device_error, is_out_of_memory
from patch.training.run_state import random_state, set_random_state

_logger = get_logger(__name__)
_moves_logger = get_logger(f"{__name__}.moves", every_rank=True)
"""Logs on every rank, because each rank moves its own states."""
_EVICTIONS = 4
"""An OOM error does not say how much memory is missing, so 1/4 of all states is evicted per attempt."""


def log_placement(optimizer: OverlappedDistributedOptimizer) -> None:
    """Log the initial placement of optimizer states if the run has offload."""
    if not optimizer.placement.is_offloading:
        return
    report = optimizer.report()
    _logger.info(
        "optimizer offload: %s, %d chunks of %d elements, %s on the host and %s on the device; "
        "offload fraction %.3f",
        optimizer.config.optimizer_offload_policy, report.num_chunks, report.chunk_numel,
        size_text(report.host_bytes), size_text(report.device_bytes), report.offload_fraction,
    )  # fmt: skip
    if folder := optimizer.config.offload_folder:
        _logger.info("optimizer offload: %s more in %s", size_text(report.disk_bytes), folder)


def apply_placement(optimizer: OverlappedDistributedOptimizer) -> None:
    """Let the policy move states before a step, and log the moves and their reasons."""
    before = optimizer.report().offload_fraction
    moves = optimizer.placement.apply()
    if moves:
        _moves_logger.info("%s", _describe(moves, before, optimizer))


def _evict(optimizer: OverlappedDistributedOptimizer, what: str, reason: str) -> None:
    """Move 1 / _EVICTIONS of all states to the host after an OOM error, and log the move."""
    from patch.plan.savings import more_offload  # imports the planner, which a step does not need

    report = optimizer.report()
    num_bytes = report.host_bytes + report.device_bytes + report.disk_bytes
    moves = optimizer.placement.evict(math.ceil(num_bytes / _EVICTIONS))
    _moves_logger.warning(
        "%s ran out of memory (%s) and is done again; %s. To avoid it: %s",
        what, reason, _describe(moves, report.offload_fraction, optimizer), more_offload(optimizer.config),
    )  # fmt: skip


def _describe(moves: list[Move], before: float, optimizer: OverlappedDistributedOptimizer) -> str:
    """Return e.g. "optimizer offload: 3 chunks (1.2 GiB) to the host (WHY); offload fraction 0.2 -> 0.4"."""
    parts = []
    for (to_host, reason, streamed), group in groupby(moves, key=lambda move: move[1:]):
        chunks = [move.chunk for move in group]
        size = size_text(sum(chunk.num_bytes for chunk in chunks))
        target = "to the host" if to_host else "to the device"
        if streamed is not None:
            target = "streamed through the device" if streamed else "no longer streamed"
        parts.append(f"{len(chunks)} chunks ({size}) {target} ({reason})")
    after = optimizer.report().offload_fraction
    return f"optimizer offload: {', '.join(parts)}; offload fraction {before:.3f} -> {after:.3f}"


class OomRetry:
    """The attempts of one step or one evaluation batch.

    The body of a loop over `attempts` is repeated until no rank runs out of memory in it. The body computes
    inside `computing`, and then calls `start_agreement`.

    Args:
        optimizer: the optimizer whose states move to the host if memory runs out.
        what: the name of the work in the log.
        has_backward: whether `abandon_backward` can send the messages that a failed rank has left unsent.
    """

    def __init__(
        self, optimizer: OverlappedDistributedOptimizer, what: str, *, has_backward: bool = True
    ) -> None:
        self._optimizer, self._what = optimizer, what
        self._group = optimizer.groups.dp_cp
        is_whole = self._group.size() == dist.get_world_size() and optimizer.groups.cp.size() == 1
        is_whole &= not any(group.data_parallel_group for group in optimizer.param_groups)
        is_whole &= has_backward or not optimizer.gathers_in_forward
        self._can_agree = optimizer.placement.is_offloading and is_whole
        self._random = random_state() if self._can_agree else {}
        self._error: Exception | None = None
        self._flags, self._pending = torch.zeros(2), CommHandle([])

    def attempts(self) -> Iterator[None]:
        """Yield once per attempt, until an attempt succeeds on all ranks.

        Raises:
            RuntimeError: this rank's out-of-memory error, if any rank has no states left to evict.
            LostRankError: the same on ranks that did not run out of memory.
        """
        yield
        while not self._is_done():
            yield

    @contextmanager
    def computing(self) -> Iterator[list[Any]]:
        """Context that swallows an out-of-memory error if the work can be repeated; see `ran_out`.

        The context yields a list for the results. The work must change neither weights nor optimizer states.
        """
        try:
            with self._optimizer.placement.count_activations():
                yield []
        except Exception as error:
            if not (is_out_of_memory(error) and is_device_error(error) and self._can_retry(error)):
                raise
            self._error = error.with_traceback(None)

    def ran_out(self) -> bool:
        """Return whether this rank ran out of memory in this attempt; if so, empty the CUDA cache."""
        if self._error is not None:
            # Not in `computing`, where the exception still refers to the stack and the tensors in it.
            torch.cuda.empty_cache()
        return self._error is not None

    def _can_retry(self, error: Exception) -> bool:
        if self._can_agree and self._group.size() == 1:
            return self._optimizer.placement.can_evict
        return self._can_agree and not isinstance(error, dist.DistError)

    def start_agreement(self) -> None:
        """Start the all-reduce of this rank's outcome; all ranks of the job must call this."""
        if not self._can_agree:
            return
        device = torch.device("cpu") if self._group.size() == 1 else self._optimizer.device
        self._flags = torch.zeros(2, device=device)
        if self.ran_out():  # a GPU tensor made from a list would wait for the GPU's queued work
            self._flags[0] = 1.0
            self._flags[1] = float(not self._optimizer.placement.can_evict)
        self._pending = start_all_reduce(self._flags, self._group)

    def _is_done(self) -> bool:
        """Return whether the attempt succeeded on all ranks; if not, evict states on ranks out of memory."""
        if not self._can_agree:
            return True
        num_short, num_hopeless = read_values(self._flags, self._pending, WaitClock(self._flags.device))
        if not num_short:
            return True
        if num_hopeless:
            raise on_all_ranks(
                self._error or LostRankError(f"another rank ran out of memory in {self._what}")
            )
        if self._error is not None:
            _evict(self._optimizer, self._what, str(self._error).strip().split("\n")[0])
        _logger.info("%s is done again: %s ran out of memory", self._what, counted(int(num_short), "rank"))
        self._error = None
        set_random_state(self._random)
        return False
