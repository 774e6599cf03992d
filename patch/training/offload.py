"""Optimizer states in host memory, as a run sees them: built, placed between steps, and out of memory.

Every decision is logged: what moved and why, and the step time predicted for it beside the measured one.
"""

from __future__ import annotations

import logging
from itertools import groupby

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import RunConfig
from patch.device import usable_memory
from patch.logger import get_logger
from patch.memory import UNLIMITED, CudaDevice, OffloadDevice, SimulatedDevice
from patch.model import LlamaModel
from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer.hybrid_adam import HybridAdam, Offload
from patch.optimizer.placement import AutoPlacementPolicy, Move, StaticPlacementPolicy
from patch.storage.sizes import size_text
from patch.training.memory_advice import more_offload

_log = get_logger(__name__)
_moves = get_logger(f"{__name__}.moves")
_moves.setLevel(logging.INFO)  # on every rank: each decides for itself
_EVICTIONS = 4
"""By how much memory is short, nobody says: this part of all states leaves, and again if it is too little."""


def build_optimizer(
    stages: list[LlamaModel], config: RunConfig, groups: ProcessGroupCollection
) -> OverlappedDistributedOptimizer:
    """The optimizer of a run, known to its stages, with its states where the flags of offload say.

    Raises:
        torch.OutOfMemoryError: --simulated-device-memory holds no more than a part of what must be there.
    """
    offload = _build_offload(config, next(stages[0].parameters()).device)
    level = config.zero_stage.name.lower()
    optimizer = OverlappedDistributedOptimizer(stages, config.optimizer, level, groups, offload)
    optimizer.connect(stages[0].config)
    if offload is not None:
        if isinstance(offload.device, SimulatedDevice):
            offload.device.reserve(optimizer.adam.fixed_bytes)
        _log.info("%s", _describe_start(str(config.optimizer.optimizer_offload_policy), optimizer))
    return optimizer


def _describe_start(policy: str, optimizer: OverlappedDistributedOptimizer) -> str:
    """What the policy begins with."""
    manager = optimizer.adam.manager
    host, device = (size_text(manager.total_bytes(on_host=on_host)) for on_host in (True, False))
    return (
        f"optimizer offload: {policy}, {len(manager.chunks)} chunks of {manager.size} elements, {host} on "
        f"the host and {device} on the device; offload fraction {manager.offload_fraction:.3f}"
    )


def _build_offload(run: RunConfig, device: torch.device) -> Offload | None:
    config = run.optimizer
    if config.optimizer_offload_policy is None:
        return None
    offload_device: OffloadDevice
    if device.type == "cuda":
        offload_device = CudaDevice(device)
    else:
        offload_device = SimulatedDevice(config.simulated_device_memory or UNLIMITED)
    policy: StaticPlacementPolicy | AutoPlacementPolicy
    if config.optimizer_offload_policy == "static":
        policy = StaticPlacementPolicy(config.optimizer_offload_fraction)
    else:
        policy = AutoPlacementPolicy(config.optimizer_offload_auto_threshold)
    host_bytes = usable_memory() // run.parallel.nproc_per_node
    return Offload(offload_device, policy, config.optimizer_offload_chunk_size or 0, host_bytes)


def place(optimizer: OverlappedDistributedOptimizer) -> None:
    """Let the policy move states before a step, and log what it moved and why."""
    before = optimizer.adam.manager.offload_fraction
    moves = optimizer.place()
    if moves:
        _moves.info("%s", _describe(moves, before, optimizer))


def make_room(optimizer: OverlappedDistributedOptimizer, what: str, reason: str) -> None:
    """Move a part of all states to the host, because `what` ran out of memory and is to be done again."""
    manager = optimizer.adam.manager
    before = manager.offload_fraction
    num_bytes = manager.total_bytes(on_host=True) + manager.total_bytes(on_host=False)
    moves = optimizer.make_room(-(-num_bytes // _EVICTIONS))
    _moves.warning(
        "%s ran out of memory (%s) and is done again; %s. To avoid it: %s",
        what, reason, _describe(moves, before, optimizer), more_offload(optimizer.config),
    )  # fmt: skip


def _describe(moves: list[Move], before: float, optimizer: OverlappedDistributedOptimizer) -> str:
    """3 chunks (1.20 GiB) to the host (0.40 GiB short of the largest peak); offload fraction 0.25 -> 0.50."""
    parts = []
    for (to_host, reason), group in groupby(moves, key=lambda move: (move.to_host, move.reason)):
        chunks = [move.chunk for move in group]
        size = size_text(sum(chunk.num_bytes for chunk in chunks))
        place = "host" if to_host else "device"
        parts.append(f"{len(chunks)} chunks ({size}) to the {place} ({reason})")
    after = optimizer.adam.manager.offload_fraction
    return f"optimizer offload: {', '.join(parts)}; offload fraction {before:.3f} -> {after:.3f}"


class StepTimes:
    """Tells in the log how long steps were to take at another offloaded fraction, and how long they take.

    The host hid part of its work behind the device's, and will hide as much of any other amount; what is
    beyond that is waited for. The update on the device is left out: it is short.
    """

    def __init__(self, adam: HybridAdam) -> None:
        self._adam = adam
        self._fraction = self._adam.manager.offload_fraction
        self._before: tuple[float, float, float] | None = None
        """Of the last step without a move before it: seconds, of these waited, seconds of the host's work."""
        self._counted = self._adam.host_seconds
        self._predicted: float | None = None

    def note(self, seconds: float) -> None:
        """Take in a step that lasted this long."""
        busy, waited = self._adam.host_seconds
        step = (seconds, waited - self._counted[1], busy - self._counted[0])
        self._counted = (busy, waited)
        fraction = self._adam.manager.offload_fraction
        if fraction != self._fraction:  # this step holds the move itself: the next one counts
            self._predicted = self._predict(fraction)
            self._fraction = fraction
            return
        if self._predicted is not None and self._before is not None:
            _log.info(
                "optimizer offload: fraction %.3f: %.1f ms predicted, %.1f ms measured, %.1f ms before",
                fraction, self._predicted * 1e3, seconds * 1e3, self._before[0] * 1e3,
            )  # fmt: skip
            self._predicted = None
        self._before = step

    def _predict(self, fraction: float) -> float | None:
        if self._before is None or not self._fraction:
            return None
        seconds, waited, busy = self._before
        hidden = max(0.0, busy - waited)
        return seconds - waited + max(0.0, busy * fraction / self._fraction - hidden)
