"""Optimizer states move between host and device, before steps and out of memory; every move is logged."""

from __future__ import annotations

from itertools import groupby

from patch.logger import get_logger
from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer.placement import Move
from patch.storage.sizes import size_text
from patch.training.memory_advice import more_offload

_log = get_logger(__name__)
_moves = get_logger(f"{__name__}.moves", every_rank=True)
"""Each rank decides for itself."""
_EVICTIONS = 4
"""By how much memory is short, nobody says: this part of all states leaves, and again if it is too little."""


def log_placement(optimizer: OverlappedDistributedOptimizer) -> None:
    """Log where states begin, in a run that may offload them."""
    if not optimizer.is_offloading:
        return
    report = optimizer.report()
    _log.info(
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
        _moves.info("%s", _describe(moves, before, optimizer))


def evict(optimizer: OverlappedDistributedOptimizer, what: str, reason: str) -> None:
    """Move a part of all states to the host, because `what` ran out of memory and is to be done again."""
    report = optimizer.report()
    moves = optimizer.evict(-(-(report.host_bytes + report.device_bytes) // _EVICTIONS))
    _moves.warning(
        "%s ran out of memory (%s) and is done again; %s. To avoid it: %s",
        what, reason, _describe(moves, report.offload_fraction, optimizer), more_offload(optimizer.config),
    )  # fmt: skip


def _describe(moves: list[Move], before: float, optimizer: OverlappedDistributedOptimizer) -> str:
    """3 chunks (1.20 GiB) to the host (0.40 GiB short of the largest peak); offload fraction 0.25 -> 0.50."""
    parts = []
    for (to_host, reason), group in groupby(moves, key=lambda move: (move.to_host, move.reason)):
        chunks = [move.chunk for move in group]
        size = size_text(sum(chunk.num_bytes for chunk in chunks))
        place = "host" if to_host else "device"
        parts.append(f"{len(chunks)} chunks ({size}) to the {place} ({reason})")
    after = optimizer.offload_fraction
    return f"optimizer offload: {', '.join(parts)}; offload fraction {before:.3f} -> {after:.3f}"
