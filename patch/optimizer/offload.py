"""Offload: whether states may leave the device, and where chunks lie now."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from patch.memory import UNLIMITED, DiskMemory, OffloadDevice
from patch.optimizer.chunk import ChunkManager
from patch.optimizer.placement import AutoPlacementPolicy, DeviceMemory, Move, StaticPlacementPolicy


@dataclass(frozen=True)
class Offload:
    """The device that chunks may leave, and the policy that decides which of them do."""

    device: OffloadDevice
    policy: StaticPlacementPolicy | AutoPlacementPolicy
    chunk_size: int = 0
    """Elements of a chunk; 0: `find_best_chunk_size` decides."""
    host_bytes: int = UNLIMITED
    """Host memory that this process may use."""
    disk: DiskMemory | None = None
    """Where states lie that leave the device and have no room in host memory."""
    host_state_bytes: int = UNLIMITED
    """This room, beside a disk."""


class Placement:
    """Which chunks of a rank lie on the device, which on the host.

    Args:
        manager: the chunks, without buffers yet; the policy decides where each of them begins.
        offload: how they are offloaded; None: all stay on the device.
        fixed_bytes: bytes of parameters and gradients on the device.
        on_moved: called when chunks have moved.
    """

    def __init__(
        self, manager: ChunkManager, offload: Offload | None, fixed_bytes: int, on_moved: Callable[[], None]
    ) -> None:
        self._manager, self._offload, self._on_moved = manager, offload, on_moved
        self.fixed_bytes = fixed_bytes
        self.largest_peak = 0
        """The largest of the device's peaks in bytes that this class has read and reset."""
        self.before_move: list[Callable[[], object]] = []
        """Called before chunks move: they cancel the step that has begun, and end the last one's updates."""
        if offload is not None:
            for chunk in manager.chunks:
                chunk.is_on_host = True
            for move in self._wanted_moves():
                move.chunk.is_on_host = move.to_host

    @property
    def is_offloading(self) -> bool:
        """Whether states may leave the device in this run."""
        return self._offload is not None

    @property
    def device(self) -> OffloadDevice | None:
        """The device that states may leave."""
        return self._offload.device if self._offload else None

    @property
    def can_evict(self) -> bool:
        """Whether there are states on the device that may leave it."""
        return self._offload is not None and not all(chunk.is_on_host for chunk in self._manager.chunks)

    def apply(self) -> list[Move]:
        """Let the policy move states between host and device; call between two steps. What has moved."""
        return self._move(self._wanted_moves())

    def evict(self, num_bytes: int) -> list[Move]:
        """Out of memory: move states of at least `num_bytes` to the host, if the device has them.

        A step that has begun is not taken; it may be begun again. What has moved.
        """
        return self._move(
            self._offload.policy.evict(self._manager.chunks, num_bytes) if self._offload else []
        )

    def _wanted_moves(self) -> list[Move]:
        if self._offload is None:
            return []
        memory = DeviceMemory(self._offload.device.usable_bytes(), self.fixed_bytes)
        moves = self._offload.policy.moves(self._manager.chunks, memory)
        return [move for move in moves if not move.chunk.stays_on_host]

    def _move(self, moves: list[Move]) -> list[Move]:
        """Move chunks; moves to the device may still go on when this returns.

        Returns:
            the moves that were made; a chunk for which the device has too little memory stays on the host.
        """
        if self._offload is None or not moves:
            return []
        for prepare in self.before_move:
            prepare()
        done = []
        for move in sorted(moves, key=lambda move: not move.to_host):  # evictions first: they free memory
            try:
                self._manager.move(move.chunk, to_host=move.to_host)
            except torch.OutOfMemoryError:  # enough bytes are free, but not in one piece
                if isinstance(self._offload.policy, AutoPlacementPolicy):
                    self._offload.policy.back_off()
                break
            done.append(move)
        self._on_moved()
        # Reset the peak, so that the next one does not include chunks that have just left.
        self.largest_peak = max(self.largest_peak, self._offload.device.pop_peak_bytes())
        return done

    def count_activations(self) -> AbstractContextManager[None]:
        """A context for forward and backward, in which a simulated device counts saved tensors."""
        return self._offload.device.count_activations() if self._offload else nullcontext()

    def record_memory(self, kind: str) -> None:
        """Record the device's peak since the last call, for the policy `auto`.

        Args:
            kind: what the process did since then: "train", "evaluate" or "save".
        """
        if self._offload and isinstance(self._offload.policy, AutoPlacementPolicy):
            peak = self._offload.device.pop_peak_bytes()
            self.largest_peak = max(self.largest_peak, peak)
            model_bytes = self.fixed_bytes + self._manager.total_bytes(on_host=False)
            self._offload.policy.stats.record(kind, peak, model_bytes)
