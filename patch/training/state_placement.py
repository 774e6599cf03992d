"""Moves optimizer states between host and device, before steps and after an OOM error, and logs each move."""

from __future__ import annotations

import math
from itertools import groupby

from patch.logger import get_logger
from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer.placement import Move
from patch.storage.sizes import size_text

_logger = get_logger(__name__)
_moves_logger = get_logger(f"{__name__}.moves", every_rank=True)
"""Logs on every rank, because each rank moves its own states."""
_EVICTIONS = 4
"""An OOM error does not say how much memory is missing, so 1/4 of all states is evicted per attempt."""


def log_placement(optimizer: OverlappedDistributedOptimizer) -> None:
    """Log the first placement of optimizer states, in a run with offload."""
    if not optimizer.is_offloading:
        return
    report = optimizer.report()
    _logger.info(
        "optimizer offload: %s, %d chunks of %d elements, %s on the host and %s on the device; "
        "offload fraction %.3f",
        optimizer.config.optimizer_offload_policy, report.num_chunks, report.chunk_numel,
        size_text(report.host_bytes), size_text(report.device_bytes), report.offload_fraction,
    )  # fmt: skip


def apply_placement(optimizer: OverlappedDistributedOptimizer) -> None:
    """Let the policy move states before a step, and log what it moved and why."""
    before = optimizer.offload_fraction
    moves = optimizer.apply_placement()
    if moves:
        _moves_logger.info("%s", _describe(moves, before, optimizer))


def evict(optimizer: OverlappedDistributedOptimizer, what: str, reason: str) -> None:
    """Move a part of all states to the host after an OOM error, and log it.

    Args:
        optimizer: the optimizer whose states move.
        what: the work that ran out of memory and is repeated, for the log.
        reason: the first line of the error, for the log.
    """
    from patch.plan.savings import more_offload  # with it the planner, which a step does not need

    report = optimizer.report()
    moves = optimizer.evict(math.ceil((report.host_bytes + report.device_bytes) / _EVICTIONS))
    _moves_logger.warning(
        "%s ran out of memory (%s) and is done again; %s. To avoid it: %s",
        what, reason, _describe(moves, report.offload_fraction, optimizer), more_offload(optimizer.config),
    )  # fmt: skip


def _describe(moves: list[Move], before: float, optimizer: OverlappedDistributedOptimizer) -> str:
    """Such as: 3 chunks (1.20 GiB) to the host (REASON); offload fraction 0.250 -> 0.500."""
    parts = []
    for (to_host, reason), group in groupby(moves, key=lambda move: (move.to_host, move.reason)):
        chunks = [move.chunk for move in group]
        size = size_text(sum(chunk.num_bytes for chunk in chunks))
        target = "host" if to_host else "device"
        parts.append(f"{len(chunks)} chunks ({size}) to the {target} ({reason})")
    after = optimizer.offload_fraction
    return f"optimizer offload: {', '.join(parts)}; offload fraction {before:.3f} -> {after:.3f}"
