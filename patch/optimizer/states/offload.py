"""Offload: whether states may leave the device, and where chunks are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from patch.memory.disk import DiskMemory
from patch.memory.offload_device import OffloadDevice
from patch.memory.simulated_device import UNLIMITED
from patch.optimizer.states.chunk import ChunkManager, StateChunk
from patch.optimizer.states.placement import (
    AutoPlacementPolicy,
    DeviceMemory,
    Move,
    StaticPlacementPolicy,
    StreamedShare,
    spread,
)


@dataclass(frozen=True)
class Offload:
    """The device that chunks may leave, and the policy that decides which of them do."""

    device: OffloadDevice
    policy: StaticPlacementPolicy | AutoPlacementPolicy
    chunk_size: int = 0
    """Elements of a chunk, or 0 to use `find_best_chunk_size`."""
    host_bytes: int = UNLIMITED
    """Host memory that this process may use."""
    disk: DiskMemory | None = None
    """Memory of offloaded states that do not fit into host memory, or None."""
    host_state_bytes: int = UNLIMITED
    """Host memory for states, if there is a disk."""
    streamed: float | None = 0.0
    """Share of the chunks on the host that the device updates; None: by measured times (StreamedShare)."""
    streams: OffloadDevice | None = None
    """The same device with other streams for those states; None: `device`."""


class Placement:
    """The placement of a rank's chunks on the device or the host.

    Args:
        manager: the chunks, still without buffers; the policy decides their first placement.
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
        """The largest device peak in bytes so far."""
        self.before_move: list[Callable[[], object]] = []
        """Called before chunks move, to cancel the current step and end the last step's updates."""
        self.streamed_share = StreamedShare() if offload and offload.streamed is None else None
        """Chooses the streamed chunks between steps; None: they are chosen here, or there are none."""
        if offload is not None:
            for chunk in manager.chunks:
                chunk.is_on_host = True
            for move in self._wanted_moves():
                move.chunk.is_on_host = move.to_host
            candidates = self._may_be_streamed()
            for chunk in spread(candidates, round(len(candidates) * (offload.streamed or 0.0))):
                chunk.is_streamed = True

    @property
    def is_offloading(self) -> bool:
        """Return whether states may leave the device in this run."""
        return self._offload is not None

    @property
    def device(self) -> OffloadDevice | None:
        """Return the device that states may leave, or None."""
        return self._offload.device if self._offload else None

    @property
    def can_evict(self) -> bool:
        """Return whether there are states on the device that may leave it."""
        return self._offload is not None and not all(chunk.is_on_host for chunk in self._manager.chunks)

    def apply(self) -> list[Move]:
        """Let the policy move states between host and device, between two steps; return the moves.

        Then the streamed share may change, if it is measured.
        """
        return self._move(self._wanted_moves()) + self._change_streamed()

    def evict(self, num_bytes: int) -> list[Move]:
        """After out-of-memory, cancel the step, and move at least `num_bytes` of states to the host."""
        return self._move(
            self._offload.policy.evict(self._manager.chunks, num_bytes) if self._offload else []
        )

    def _wanted_moves(self) -> list[Move]:
        if self._offload is None:
            return []
        memory = DeviceMemory(self._offload.device.usable_bytes(), self.fixed_bytes)
        moves = self._offload.policy.moves(self._manager.chunks, memory)
        return [move for move in moves if not move.chunk.stays_on_host]

    def _may_be_streamed(self) -> list[StateChunk]:
        on_host = [chunk for chunk in self._manager.chunks if chunk.is_on_host]
        return [chunk for chunk in on_host if not (chunk.stays_on_host or chunk.is_on_disk)]

    def _change_streamed(self) -> list[Move]:
        if self.streamed_share is None:
            return []
        for chunk in self._manager.chunks:  # promoted: should it be evicted, the device has no room to stream
            chunk.is_streamed &= chunk.is_on_host
        try:
            return self._move(self.streamed_share.moves(self._may_be_streamed()))
        except (torch.OutOfMemoryError, MemoryError):  # no buffers on the device, or no pinned memory
            self.streamed_share.has_given_up = True
            return self._move(self.streamed_share.moves(self._may_be_streamed()))

    def _move(self, moves: list[Move]) -> list[Move]:
        """Move chunks until the device has no room; return the moves, which may still run to the device."""
        if self._offload is None or not moves:
            return []
        for prepare in self.before_move:
            prepare()
        done = []
        for move in sorted(moves, key=lambda move: not move.to_host):  # evictions first: they free memory
            try:
                self._manager.move(move.chunk, to_host=move.to_host, is_streamed=move.is_streamed)
            except torch.OutOfMemoryError:  # enough bytes are free, but not contiguous
                if isinstance(self._offload.policy, AutoPlacementPolicy):
                    self._offload.policy.back_off()
                break
            done.append(move)
        self._on_moved()
        # Reset the peak, so that the next peak does not include chunks that have just moved.
        self.largest_peak = max(self.largest_peak, self._offload.device.pop_peak_bytes())
        return done

    def count_activations(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward, in which a simulated device counts saved tensors."""
        return self._offload.device.count_activations() if self._offload else nullcontext()

    def record_memory(self, kind: str) -> None:
        """Record the device's peak in the last "train", "evaluate" or "save" (`kind`) for `auto`."""
        if self._offload and isinstance(self._offload.policy, AutoPlacementPolicy):
            peak = self._offload.device.pop_peak_bytes()
            self.largest_peak = max(self.largest_peak, peak)
            model_bytes = self.fixed_bytes + self._manager.total_bytes(on_host=False)
            self._offload.policy.stats.record(kind, peak, model_bytes)
