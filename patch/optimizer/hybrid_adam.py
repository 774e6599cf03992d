"""HybridAdam: optimizer states in chunks on device and host, and their Adam update.

It knows nothing of communication: it is told when the gradient of a bucket shard is final (`grad_ready`), and
says when the shard has its new parameters (`wait_for_update`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from patch.config.schema import OptimizerConfig
from patch.memory import (
    UNLIMITED,
    Joinable,
    OffloadDevice,
    SimulatedDevice,
    StagedCopier,
    TorchAllocator,
)
from patch.optimizer.chunk import ChunkManager, StateChunk, find_best_chunk_size
from patch.optimizer.host_update import HostUpdates, adam_states
from patch.optimizer.kernels import AdamKernel, AdamScalars, UpdateItem, adam_kernel
from patch.optimizer.kernels.numpy_adam import NumpyAdam
from patch.optimizer.layout import BucketShard
from patch.optimizer.param_groups import ParamGroup, group_rates
from patch.optimizer.placement import AutoPlacementPolicy, DeviceMemory, Move, StaticPlacementPolicy

_MASTERS = {
    torch.float32: {},
    torch.bfloat16: {"master_low": torch.int16},
    torch.float16: {"master": torch.float32},
}
"""What the fp32 master of a parameter needs besides the parameter: an fp32 parameter is its own master, a
bf16 parameter is the high bits of its master (see kernels/spec.py), an fp16 parameter has a whole one."""


def state_dtypes(param_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The states of parameters of some type, and their types."""
    return {"exp_avg": torch.float32, "exp_avg_sq": torch.float32} | _MASTERS[param_dtype]


@dataclass(frozen=True)
class Offload:
    """Where chunks may go, and who decides."""

    device: OffloadDevice
    policy: StaticPlacementPolicy | AutoPlacementPolicy
    chunk_size: int = 0
    """Elements of a chunk; 0: searched."""
    host_bytes: int = UNLIMITED
    """Host memory of this process."""


class HybridAdam:
    """Adam states of this rank's bucket shards.

    Args:
        shards: in the order of backward; their tensors stay where they are.
        config: betas, eps, form of weight decay.
        groups: the parameter groups, which the ranges of shards refer to by index.
        offload: None: all states stay on the shards' device; else all parameters have one type.
        fixed_bytes: bytes of parameters and gradients on the device.
    """

    def __init__(
        self,
        shards: Sequence[BucketShard],
        config: OptimizerConfig,
        groups: Sequence[ParamGroup],
        offload: Offload | None = None,
        fixed_bytes: int = 0,
    ) -> None:
        self.shards, self._config, self._groups, self._offload = shards, config, groups, offload
        self.step_count = 0
        self.dtypes: dict[str, torch.dtype] = {}
        """The states and their types; parameters of each type have some of them."""
        for shard in shards:
            self.dtypes |= state_dtypes(shard.param.dtype)
        self.fixed_bytes = fixed_bytes
        self.largest_peak = 0
        """The most bytes that the device ever held, of peaks that this class has read and reset."""
        device = shards[0].param.device
        self._kernel = _device_kernel(device, offload)
        allocator = offload.device if offload else TorchAllocator(device)
        copier = StagedCopier(offload.device) if offload else None
        self.manager = ChunkManager(_chunk_size(shards, offload), allocator, copier)
        self._chunks_of = self._register(shards)
        self.host_updates: HostUpdates | None = None
        if offload:
            self.host_updates = self._build_host_updates(offload)
            for chunk in self.manager.chunks:
                chunk.is_on_host = True
            for move in self.wanted_moves():
                self.manager.chunks[move.chunk.index].is_on_host = move.to_host
        self.manager.allocate(state_dtypes)
        self._scalars: list[AdamScalars] | None = None
        """Of each parameter group, in the step under way."""
        self._shards_awaited: dict[StateChunk, set[int]] = {}
        """Of chunks on the host: the shards whose gradients are not final yet in the step under way."""
        self._resize_host_buffers()
        self.copy_model_params_to_main_params()

    def _register(self, shards: Sequence[BucketShard]) -> list[list[StateChunk]]:
        """Assign all ranges to chunks; the chunks of each shard."""
        for index, shard in enumerate(shards):
            for range_ in shard.ranges:
                # Only updates before the end of backward tell the difference; else one chunk holds all.
                is_later = range_.needs_extra_reduction and self.is_offloading
                elements = range_._replace(needs_extra_reduction=is_later)
                self.manager.register(index, elements, shard.param.dtype)
        self.manager.finish_registration()
        chunks_of: list[list[StateChunk]] = [[] for _ in shards]
        for chunk in self.manager.chunks:
            for index in sorted({range_.shard for range_ in chunk.ranges}):
                chunks_of[index].append(chunk)
        return chunks_of

    def _build_host_updates(self, offload: Offload) -> HostUpdates:
        size = self.manager.size
        chunk_bytes = size * sum(dtype.itemsize for dtype in self.dtypes.values())
        spare_bytes = max(0, offload.host_bytes - chunk_bytes * len(self.manager.chunks))
        return HostUpdates(self.shards, self.dtypes, size, offload.device, spare_bytes)

    def _resize_host_buffers(self) -> None:
        """Make the host's buffers fit the chunks that are on the host now."""
        if self.host_updates is not None:
            self.host_updates.resize_buffers(len(self._chunks_on_host()))

    def _chunks_on_host(self) -> list[StateChunk]:
        return [chunk for chunk in self.manager.chunks if chunk.is_on_host]

    def copy_model_params_to_main_params(self) -> None:
        """Make the model's parameters the masters; call it after parameters were loaded into the model."""
        for chunk in self.manager.chunks:
            chunk.wait_for_transfer()
            if "master_low" in chunk.states:
                chunk.states["master_low"].data.zero_()
            if "master" in chunk.states:
                for r in chunk.ranges:
                    chunk.states["master"].data[r.in_chunk].copy_(self.shards[r.shard].param[r.in_shard])

    def wanted_moves(self) -> list[Move]:
        """What the policy would move now, between two steps."""
        if self._offload is None:
            return []
        memory = DeviceMemory(self._offload.device.usable_bytes(), self.fixed_bytes)
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
        """Moves that free `num_bytes` or more on a device that is out of memory, or all that chunks hold."""
        return self._offload.policy.evict(self.manager.chunks, num_bytes) if self._offload else []

    def move(self, moves: Sequence[Move]) -> list[Move]:
        """Move chunks while no update is under way; chunks to the device may still be on their way after.

        Returns:
            the moves that were made; a chunk for which the device has no room stays on the host.
        """
        if self._offload is None:
            return []
        done = []
        for move in sorted(moves, key=lambda move: not move.to_host):  # evictions first: they make room
            try:
                self.manager.move(self.manager.chunks[move.chunk.index], to_host=move.to_host)
            except torch.OutOfMemoryError:  # enough bytes are free, but not in one piece
                if isinstance(self._offload.policy, AutoPlacementPolicy):
                    self._offload.policy.back_off()
                break
            done.append(move)
        self._resize_host_buffers()
        # The next step's peak is not to count chunks that have just left.
        self.largest_peak = max(self.largest_peak, self._offload.device.pop_peak_bytes())
        return done

    def count_activations(self) -> AbstractContextManager[None]:
        """A context for forward and backward, so that a simulated device counts what they hold."""
        return self._offload.device.count_activations() if self._offload else nullcontext()

    def record_memory(self, kind: str) -> None:
        """Tell the policy `auto` the device's peak since the last call.

        Args:
            kind: what was done meanwhile: "train", "evaluate" or "save".
        """
        if self._offload and isinstance(self._offload.policy, AutoPlacementPolicy):
            peak = self._offload.device.pop_peak_bytes()
            self.largest_peak = max(self.largest_peak, peak)
            model_bytes = self.fixed_bytes + self.manager.total_bytes(on_host=False)
            self._offload.policy.stats.record(kind, peak, model_bytes)

    @property
    def host_seconds(self) -> tuple[float, float]:
        """Since the start: how long the host has updated chunks, and how long others have waited for it."""
        return (self.host_updates.busy_s, self.host_updates.waited_s) if self.host_updates else (0.0, 0.0)

    def start_step(self, lr: float | Sequence[float], grad_scale: float) -> None:
        """Begin a step, before its backward.

        Args:
            lr: learning rate of the step, for all parameter groups or one for each.
            grad_scale: the factor on gradients if they are not clipped.
        """
        self.cancel_step()
        self._scalars = self._scalars_of(lr, grad_scale, self.step_count + 1)
        if self.host_updates is not None:
            self.host_updates.start_step(self._scalars)
            self._shards_awaited = {
                chunk: {range_.shard for range_ in chunk.ranges}
                for chunk in self._chunks_on_host()
                if not chunk.needs_extra_reduction
            }

    def grad_ready(self, index: int, after: Joinable | None = None) -> None:
        """Take note that the gradient of shard `index` is final, except where it needs an extra reduction.

        From now on it may be copied to the host, and be used there in a speculative update.

        Args:
            index: of the shard.
            after: the gradient is final when this is done (None: in the current stream's order).
        """
        for chunk in self._chunks_of[index]:
            awaited = self._shards_awaited.get(chunk)
            if self.host_updates is not None and awaited:
                awaited.remove(index)
                if not awaited:
                    self.host_updates.grads_ready(chunk, after)

    def cancel_step(self) -> None:
        """The step that was begun is not taken."""
        self._shards_awaited = {}
        if self.host_updates is not None:
            self.host_updates.cancel_step()

    def start_update(self, lr: float | Sequence[float], grad_scale: float) -> None:
        """Take the step: all gradients are final. The update of chunks on the host starts in the background.

        Args:
            lr: learning rate of the step, for all parameter groups or one for each.
            grad_scale: factor on the gradients (clipping, and fp16's loss scale undone).
        """
        self.step_count += 1
        self._shards_awaited = {}
        self._scalars = self._scalars_of(lr, grad_scale, self.step_count)
        if self.host_updates is not None:
            self.host_updates.start_updates(self._chunks_on_host()[::-1], self._scalars)

    @torch.no_grad()
    def update(self, indices: Sequence[int]) -> None:
        """Update the elements of some shards whose states are on the device; call `start_update` before."""
        assert self._scalars is not None, "start_update comes first"
        wanted = set(indices)
        chunks = {chunk: None for index in indices for chunk in self._chunks_of[index]}
        items = []
        for chunk in (chunk for chunk in chunks if not chunk.is_on_host):
            chunk.wait_for_transfer()
            for r in (range_ for range_ in chunk.ranges if range_.shard in wanted):
                grad, param, _ = self.shards[r.shard]
                states = adam_states(chunk.states, r.in_chunk, param[r.in_shard])
                items.append(UpdateItem(grad[r.in_shard], states, self._scalars[r.group]))
        self._kernel.update(items)

    def wait_for_update(self, index: int, *, block: bool) -> bool:
        """Make the current stream wait for the new parameters of shard `index`.

        Args:
            index: of the shard.
            block: block this thread until the host has updated them.
        Returns:
            False where the host has not updated them yet and `block` is false.
        """
        if self.host_updates is None:
            return True
        return all(self.host_updates.wait_for_update(chunk, block=block) for chunk in self._chunks_of[index])

    def state(self, name: str, index: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Views of a state of elements [begin, end) of shard `index`, each with its first element.

        They are valid until the next step, or until chunks move.
        """
        for chunk in self._chunks_of[index]:
            yield from chunk.views(name, index, begin, end)

    def _scalars_of(self, lr: float | Sequence[float], grad_scale: float, step: int) -> list[AdamScalars]:
        """The scalars of each parameter group in one step."""
        return [
            AdamScalars(
                lr=rate,
                beta1=self._config.adam_beta1,
                beta2=self._config.adam_beta2,
                eps=self._config.adam_eps,
                weight_decay=group.weight_decay,
                step=step,
                grad_scale=grad_scale,
                decoupled_weight_decay=self._config.decoupled_weight_decay,
            )
            for rate, group in zip(group_rates(lr, self._groups), self._groups, strict=True)
        ]


def _chunk_size(shards: Sequence[BucketShard], offload: Offload | None) -> int:
    numels = [range_.end - range_.begin for shard in shards for range_ in shard.ranges]
    if offload is None:
        return max(1, sum(numels))
    return offload.chunk_size or find_best_chunk_size(numels)


def _device_kernel(device: torch.device, offload: Offload | None) -> AdamKernel:
    """The kernel of chunks on the device.

    A simulated device gets another implementation than the host, so that tests which find equal parameters
    for every placement compare two implementations.
    """
    if offload is not None and isinstance(offload.device, SimulatedDevice):
        return NumpyAdam()
    return adam_kernel(device)
