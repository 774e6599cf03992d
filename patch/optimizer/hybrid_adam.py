"""HybridAdam: optimizer states in chunks on device and host, and their Adam update.

The half of the optimizer that knows nothing of communication: it is told when a shard's gradient is final
and answers when the shard has its new weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from patch.config.schema import OptimizerConfig
from patch.distributed.async_collectives import Pending
from patch.memory import UNLIMITED, OffloadDevice, SimulatedDevice, StagedCopier, TorchAllocator
from patch.optimizer.chunk import ChunkManager, StateChunk, find_best_chunk_size
from patch.optimizer.host_update import HostUpdates, kernel_states
from patch.optimizer.kernels import AdamKernel, AdamScalars, Segment, adam_kernel
from patch.optimizer.kernels.numpy_adam import NumpyAdam
from patch.optimizer.layout import BucketShard
from patch.optimizer.placement import AutoPlacementPolicy, Memory, Move, StaticPlacementPolicy

_MASTERS = {
    torch.float32: {},
    torch.bfloat16: {"master_low": torch.int16},
    torch.float16: {"master": torch.float32},
}
"""What a weight's fp32 master needs besides the weight: an fp32 weight is its master, a bf16 weight the high
bits of it (see kernels/spec.py), an fp16 weight no part of it."""


@dataclass(frozen=True)
class Offload:
    """Where chunks may go, and who decides."""

    device: OffloadDevice
    policy: StaticPlacementPolicy | AutoPlacementPolicy
    chunk_size: int = 0
    """In elements; 0: searched."""
    host_bytes: int = UNLIMITED
    """Host memory of this process."""


class HybridAdam:
    """Adam states of this rank's shards.

    Args:
        shards: in the order of backward; their tensors stay where they are.
        config: betas, eps, decay.
        offload: None: all states stay on the shards' device.
        fixed_bytes: of weights and gradients on the device.
    """

    def __init__(
        self,
        shards: Sequence[BucketShard],
        config: OptimizerConfig,
        offload: Offload | None = None,
        fixed_bytes: int = 0,
    ) -> None:
        self.shards, self._config, self._offload = shards, config, offload
        self.step_count = 0
        moments = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
        self.dtypes: dict[str, torch.dtype] = moments | _MASTERS[shards[0].param.dtype]
        """The states and their types."""
        device = shards[0].param.device
        self._kernel = _device_kernel(device, offload)
        allocator = offload.device if offload else TorchAllocator(device)
        copier = StagedCopier(offload.device) if offload else None
        self.manager = ChunkManager(_chunk_size(shards, offload), allocator, copier)
        for index, shard in enumerate(shards):
            for begin, end, is_decayed, is_late in shard.ranges:
                # Where nothing is updated early, no gradient is late: one chunk holds all.
                is_late = is_late and offload is not None
                self.manager.register(index, begin, end, is_decayed=is_decayed, is_late=is_late)
        self.manager.close()
        self._chunks_of: list[list[StateChunk]] = [[] for _ in shards]
        for chunk in self.manager.chunks:
            for index in sorted({segment.shard for segment in chunk.segments}):
                self._chunks_of[index].append(chunk)
        self.host_updates: HostUpdates | None = None
        self.fixed_bytes = fixed_bytes
        self.largest_peak = 0
        """The most that was ever recorded by `record_memory`, which starts torch's own count anew."""
        if offload:
            chunk_bytes = self.manager.size * sum(dtype.itemsize for dtype in self.dtypes.values())
            spare_bytes = max(0, offload.host_bytes - chunk_bytes * len(self.manager.chunks))
            self.host_updates = HostUpdates(
                shards, self.dtypes, self.manager.size, offload.device, spare_bytes
            )
            for chunk in self.manager.chunks:
                chunk.is_on_host = True
            for move in self.wanted_moves():
                self.manager.chunks[move.chunk.index].is_on_host = move.to_host
        self.manager.allocate(self.dtypes)
        self._scalars: AdamScalars | None = None
        self._missing: dict[StateChunk, set[int]] = {}
        self._prepare_host()
        self.refresh_masters()

    def _prepare_host(self) -> None:
        """Be ready for the chunks that are on the host now."""
        if self.host_updates is not None:
            self.host_updates.prepare(len(self._on_host()))

    def _on_host(self) -> list[StateChunk]:
        return [chunk for chunk in self.manager.chunks if chunk.is_on_host]

    def refresh_masters(self) -> None:
        """Take the model's weights as masters; call after weights were loaded into the model."""
        for chunk in self.manager.chunks:
            chunk.settle()
            if "master_low" in chunk.states:
                chunk.states["master_low"].data.zero_()
            for s in chunk.segments if "master" in chunk.states else ():
                chunk.states["master"].data[s.place].copy_(self.shards[s.shard].param[s.begin : s.end])

    def wanted_moves(self) -> list[Move]:
        """What the policy would move now, between two steps."""
        if self._offload is None:
            return []
        memory = Memory(self._offload.device.usable_bytes(), self.fixed_bytes)
        return self._offload.policy.moves(self.manager.chunks, memory)

    @property
    def is_offloading(self) -> bool:
        """Whether states may leave the device in this run."""
        return self._offload is not None

    @property
    def can_evict(self) -> bool:
        """Whether there are states on the device that may leave it."""
        return self._offload is not None and not all(chunk.is_on_host for chunk in self.manager.chunks)

    def evictions(self, num_bytes: int) -> list[Move]:
        """What is to leave a device that is out of memory: chunks of `num_bytes` or more, if it has them."""
        return self._offload.policy.evict(self.manager.chunks, num_bytes) if self._offload else []

    def move(self, moves: Sequence[Move]) -> list[Move]:
        """Move chunks while no update is under way; what goes to the device may still be on its way after.

        Returns:
            the moves that were made; chunks stay for which the device has no room after all.
        """
        if self._offload is None:
            return []
        done = []
        for move in sorted(moves, key=lambda move: not move.to_host):  # room is made before it is used
            try:
                self.manager.move(self.manager.chunks[move.chunk.index], to_host=move.to_host)
            except torch.OutOfMemoryError:  # fragments: enough is free, but not in one piece
                if isinstance(self._offload.policy, AutoPlacementPolicy):
                    self._offload.policy.back_off()
                break
            done.append(move)
        self._prepare_host()
        # A peak with what has left is none of the next step's.
        self.largest_peak = max(self.largest_peak, self._offload.device.pop_peak_bytes())
        return done

    def activations(self) -> AbstractContextManager[None]:
        """Around forward and backward, so that a simulated device sees what they hold."""
        return self._offload.device.count_activations() if self._offload else nullcontext()

    def record_memory(self, kind: str) -> None:
        """Note for `auto` what the device held at most since the last call: in a "train" step, and so on."""
        if self._offload and isinstance(self._offload.policy, AutoPlacementPolicy):
            peak = self._offload.device.pop_peak_bytes()
            self.largest_peak = max(self.largest_peak, peak)
            model_bytes = self.fixed_bytes + self.manager.total_bytes(on_host=False)
            self._offload.policy.stats.record(kind, peak, model_bytes)

    @property
    def host_seconds(self) -> tuple[float, float]:
        """Since the start: how long the host updated chunks, and how long somebody waited for it."""
        return (self.host_updates.busy_s, self.host_updates.waited_s) if self.host_updates else (0.0, 0.0)

    def start_step(self, lr: float, grad_scale: float) -> None:
        """Begin a step, before its backward.

        Args:
            lr: rate of the step. grad_scale: the factor on gradients where they are not clipped.
        """
        self.cancel()
        self._scalars = self._scalars_of(lr, grad_scale, self.step_count + 1)
        if self.host_updates is not None:
            self.host_updates.expect(self._scalars)
            self._missing = {
                chunk: {segment.shard for segment in chunk.segments}
                for chunk in self._on_host()
                if not chunk.is_late
            }

    def gradient_ready(self, index: int, after: Pending | None = None) -> None:
        """Take note that the gradient of shard `index` is final, late ranges aside, once `after` is done.

        From now on it may travel to the host, and be updated there speculatively.
        """
        for chunk in self._chunks_of[index]:
            missing = self._missing.get(chunk)
            if self.host_updates is not None and missing:
                missing.remove(index)
                if not missing:
                    self.host_updates.bring(chunk, after)

    def cancel(self) -> None:
        """The step that was begun is not taken."""
        self._missing = {}
        if self.host_updates is not None:
            self.host_updates.cancel()

    def start_update(self, lr: float, grad_scale: float) -> None:
        """Take the step: all gradients are final. Chunks on the host are updated from here on.

        Args:
            lr: rate of this step. grad_scale: factor on the gradient (clipping, fp16's scale undone).
        """
        self.step_count += 1
        self._missing = {}
        self._scalars = self._scalars_of(lr, grad_scale, self.step_count)
        if self.host_updates is not None:
            self.host_updates.start(self._on_host()[::-1], self._scalars)

    @torch.no_grad()
    def update(self, indices: Sequence[int]) -> None:
        """Update the parts of some shards whose states are on the device."""
        assert self._scalars is not None, "start_update comes first"
        wanted = set(indices)
        chunks = {chunk: None for index in indices for chunk in self._chunks_of[index]}
        segments = []
        for chunk in (chunk for chunk in chunks if not chunk.is_on_host):
            chunk.settle()
            for s in (segment for segment in chunk.segments if segment.shard in wanted):
                gradient, weight, _ = self.shards[s.shard]
                states = kernel_states(chunk.states, s.place, weight[s.begin : s.end])
                segments.append(Segment(gradient[s.begin : s.end], states, s.is_decayed))
        self._kernel.update(segments, self._scalars)

    def arrive(self, index: int, *, block: bool) -> bool:
        """Let the current stream wait for the new weights of shard `index`.

        Returns:
            False where they are not written yet and not `block`.
        """
        if self.host_updates is None:
            return True
        return all(self.host_updates.arrive(chunk, block=block) for chunk in self._chunks_of[index])

    def state(self, name: str, index: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Views of a state of elements [begin, end) of shard `index`, each with its first element.

        They are good until the next step, or until chunks move.
        """
        for chunk in self._chunks_of[index]:
            yield from chunk.views(name, index, begin, end)

    def _scalars_of(self, lr: float, grad_scale: float, step: int) -> AdamScalars:
        return AdamScalars(
            lr=lr,
            beta1=self._config.adam_beta1,
            beta2=self._config.adam_beta2,
            eps=self._config.adam_eps,
            weight_decay=self._config.weight_decay,
            step=step,
            grad_scale=grad_scale,
            is_decoupled=self._config.decoupled_weight_decay,
        )


def _chunk_size(shards: Sequence[BucketShard], offload: Offload | None) -> int:
    numels = [r.end - r.begin for shard in shards for r in shard.ranges]
    if offload is None:
        return max(1, sum(numels))
    return offload.chunk_size or find_best_chunk_size(numels)


def _device_kernel(device: torch.device, offload: Offload | None) -> AdamKernel:
    """The kernel of chunks on the device.

    A simulated device gets another implementation than the host, so that tests which find equal weights for
    every placement compare two implementations.
    """
    if offload is not None and isinstance(offload.device, SimulatedDevice):
        return NumpyAdam()
    return adam_kernel(device)
