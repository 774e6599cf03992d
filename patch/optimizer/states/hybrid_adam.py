"""HybridAdam: optimizer states in chunks on device and host, and their Adam update.

It runs no communication. The caller reports when the gradient of a bucket shard is final (`grad_ready`), and
waits for the shard's new parameters (`wait_for_update`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch

from patch.compat.torch_internals import region
from patch.config.choices import MOMENT_BLOCK
from patch.config.schema import OptimizerConfig
from patch.features.optimizers import OF_MATRICES, optimizer_of
from patch.memory.disk import write_values
from patch.memory.offload_device import Joinable, PinnedAllocator, TorchAllocator
from patch.memory.simulated_device import SimulatedDevice
from patch.memory.staged_copy import StagedCopier
from patch.optimizer.kernels import adam_kernel
from patch.optimizer.kernels.low_bit_moments import DTYPES, bytes_of, scale_name
from patch.optimizer.kernels.numpy_adam import NumpyAdam
from patch.optimizer.kernels.spec import AdamKernel, AdamScalars, PreparedUpdate
from patch.optimizer.param_groups import ParamGroup, group_rates
from patch.optimizer.states.chunk import BucketShard, ChunkManager, StateChunk, find_best_chunk_size
from patch.optimizer.states.disk_update import DiskUpdates
from patch.optimizer.states.host_buffers import HostedChunks
from patch.optimizer.states.host_update import HostUpdates, item_of
from patch.optimizer.states.offload import Offload, Placement
from patch.optimizer.states.streamed_update import StreamedUpdates

_MASTERS = {
    torch.float32: {},
    torch.bfloat16: {"master_low": torch.int16},
    torch.float16: {"master": torch.float32},
}
"""States of a parameter's fp32 master, by the parameter's dtype. An fp32 parameter is its own master, a bf16
parameter is the high bits of its master (see kernels/spec.py), an fp16 parameter has a separate master."""


def state_dtypes(
    config: OptimizerConfig, param_dtype: torch.dtype, are_whole_matrices: bool = False
) -> dict[str, torch.dtype]:
    """Return the names and dtypes of the states of parameters of some dtype."""
    kinds = OF_MATRICES if are_whole_matrices else optimizer_of(config).moments(config)
    moments = {name: DTYPES[kind] for name, kind in kinds.items()}
    scaled = [name for name, dtype in moments.items() if dtype == torch.uint8]
    return moments | {scale_name(name): torch.float32 for name in scaled} | _MASTERS[param_dtype]


class OptimizerReport(NamedTuple):
    """Where optimizer states are on this rank, and the cost of offload."""

    num_chunks: int
    chunk_numel: int
    host_bytes: int
    device_bytes: int
    """Bytes of states in host memory, and on the device."""
    offload_fraction: float
    """Share of the elements whose states are not on the device."""
    largest_peak: int
    """The peak device bytes that `record_memory` ever saw."""
    disk_bytes: int = 0
    """Bytes of states on the host's disk."""
    disk_moved_bytes: int = 0
    disk_wait_s: float = 0.0
    """Bytes that updates read from and wrote to the disk since the start, and seconds waited for the disk."""
    speculation_failure_rate: float | None = None
    """Recent share of steps whose speculative updates were wrong, e.g. by clipping; None without offload."""


class HybridAdam:
    """Adam states of this rank's bucket shards.

    Args:
        shards: the bucket shards in the order of backward; their tensors are not moved.
        groups: the parameter groups, to which the ranges of shards refer by index.
        offload: how states are offloaded, which needs one dtype of parameters; None: no state leaves the
            device.
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
        self.shards, self._config, self._groups = shards, config, groups
        self.step_count = 0
        self.dtypes: dict[str, torch.dtype] = {}
        """The dtype of each state, by its name; parameters of one dtype have only some of the states."""
        for shard, group in product(shards, sorted(groups, key=lambda group: group.orthogonalizes)):
            self.dtypes |= state_dtypes(config, shard.param.dtype, group.orthogonalizes)
        on_device = (shard.grad.device for shard in shards if not shard.is_on_host)
        device = next(on_device, torch.device("cpu"))
        self._kernel = _device_kernel(device, offload)
        allocator = offload.device if offload else TorchAllocator(device)
        copier = StagedCopier(offload.device) if offload else None
        places = (
            (offload.disk, offload.host_state_bytes, PinnedAllocator(offload.device)) if offload else ()
        )
        chunk_size = _chunk_size(shards, offload)
        if torch.uint8 in self.dtypes.values():  # a chunk ends at the end of a block
            chunk_size = -(-chunk_size // MOMENT_BLOCK) * MOMENT_BLOCK
        self.manager = ChunkManager(chunk_size, allocator, copier, *places)
        self._chunks_of = self._register(shards, are_moved=offload is not None)
        self.host_updates, self.disk_updates, self.streamed_updates = self._build_updates(offload)
        """Updates by the host of chunks in its memory and of chunks on disk, and by the device of chunks in
        host memory. None if there are none."""
        every = self.host_updates, self.disk_updates, self.streamed_updates
        self._all_updates = [updates for updates in every if updates is not None]
        self.placement = Placement(self.manager, offload, fixed_bytes, self._resize_host_buffers)
        self.placement.before_move.append(self.cancel_step)
        self.manager.allocate()
        self._scalars: list[AdamScalars] | None = None
        self._prepared: dict[tuple[int, ...], PreparedUpdate] = {}
        """The updates of shards whose states are on the device, made again when chunks have moved."""
        self._shards_awaited: dict[StateChunk, set[int]] = {}
        """For each chunk on the host: its shards whose gradients are not final yet in the current step."""
        self._reductions: dict[StateChunk, list[Joinable]] = {}
        """Reductions of each chunk's shards that were reported. Buffer groups have separate communicators, so
        the last reduction to start may not be the last to end."""
        self._resize_host_buffers()
        self.copy_model_params_to_main_params()

    def _register(self, shards: Sequence[BucketShard], *, are_moved: bool) -> list[list[StateChunk]]:
        for index, shard in enumerate(shards):
            for range_ in shard.ranges:
                # Only updates during backward need separate chunks.
                needs_own_chunk = range_.needs_extra_reduction and are_moved
                elements = range_._replace(needs_extra_reduction=needs_own_chunk)
                is_whole = self._groups[range_.group].orthogonalizes
                dtypes = state_dtypes(self._config, shard.param.dtype, is_whole)
                self.manager.register(index, elements, dtypes)
        self.manager.finish_registration()
        chunks_of: list[list[StateChunk]] = [[] for _ in shards]
        for chunk in self.manager.chunks:
            chunk.stays_on_host = any(shards[range_.shard].is_on_host for range_ in chunk.ranges)
            for index in sorted({range_.shard for range_ in chunk.ranges}):
                chunks_of[index].append(chunk)
        return chunks_of

    def _build_updates(
        self, offload: Offload | None
    ) -> tuple[HostUpdates | None, DiskUpdates | None, StreamedUpdates | None]:
        if offload is None:
            return None, None, None
        size = self.manager.size
        host_bytes = int(size * bytes_of(self.dtypes)) * len(self.manager.chunks)
        state_bytes = min(host_bytes, offload.host_state_bytes)
        there = sum(shard.param.nbytes + shard.grad.nbytes for shard in self.shards if shard.is_on_host)
        spare_bytes = max(0, offload.host_bytes - there - state_bytes)
        updated: dict[str, torch.dtype] = {}
        for shard in self.shards:
            updated |= state_dtypes(self._config, shard.param.dtype)
        chunks = HostedChunks(self.shards, updated, size, offload.device, spare_bytes)
        streamed, disk = None, None
        if offload.streamed != 0:
            on_device = chunks._replace(device=offload.streams or offload.device)
            streamed = StreamedUpdates(on_device, self._kernel)
        if offload.disk is not None:
            chunks = chunks._replace(spare_bytes=spare_bytes // 2)
            disk = DiskUpdates(chunks, offload.disk)
        return HostUpdates(chunks), disk, streamed

    def _resize_host_buffers(self) -> None:
        self._prepared.clear()
        for updates in self._all_updates:
            updates.resize_buffers(self._chunks_of_updates(updates))

    def _updates_of(self, chunk: StateChunk) -> HostUpdates | StreamedUpdates | None:
        """Return what updates a chunk on the host, or None for a chunk on the device."""
        if not chunk.is_on_host:
            return None
        if chunk.is_on_disk:
            return self.disk_updates
        return self.streamed_updates if chunk.is_streamed else self.host_updates

    def _chunks_of_updates(self, updates: HostUpdates | StreamedUpdates) -> list[StateChunk]:
        return [chunk for chunk in self.manager.chunks if self._updates_of(chunk) is updates]

    def copy_model_params_to_main_params(self) -> None:
        """Set the masters to the model's parameters; call it after parameters were loaded into the model."""
        self.forget_host_weights()
        for chunk in self.manager.chunks:
            chunk.wait_for_transfer()
            if "master_low" in chunk.states:
                write_values(chunk.states["master_low"].data, torch.zeros((), dtype=torch.int16))
            if "master" in chunk.states:
                for r in chunk.ranges:
                    master = chunk.states["master"].data[r.in_chunk]
                    write_values(master, self.shards[r.shard].param[r.in_shard])

    def forget_host_weights(self) -> None:
        """Read all weights from the device in the next step, because they may be written there before."""
        if self.host_updates is not None:
            self.host_updates.forget_weights()

    def report(self) -> OptimizerReport:
        """Report where states are, and the cost of offload."""
        disk_bytes, of_disk = self.manager.disk_bytes, self.disk_updates
        return OptimizerReport(
            num_chunks=len(self.manager.chunks),
            chunk_numel=self.manager.size,
            host_bytes=self.manager.total_bytes(on_host=True) - disk_bytes,
            device_bytes=self.manager.total_bytes(on_host=False),
            offload_fraction=self.manager.offload_fraction,
            largest_peak=self.placement.largest_peak,
            disk_bytes=disk_bytes,
            disk_moved_bytes=of_disk.disk.num_bytes_moved if of_disk else 0,
            disk_wait_s=of_disk.disk_wait_s if of_disk else 0.0,
            speculation_failure_rate=self.host_updates.failure_rate if self.host_updates else None,
        )

    def start_step(self, lr: float | Sequence[float], grad_scale: float) -> None:
        """Begin a step before its backward; `grad_scale` is the factor on gradients that are not clipped."""
        self.cancel_step()
        self._scalars = self._scalars_of(lr, grad_scale, self.step_count + 1)
        for updates in self._all_updates:
            updates.start_step(self._scalars)
        self._shards_awaited = {
            chunk: {range_.shard for range_ in chunk.ranges}
            for chunk in self.manager.chunks
            if chunk.is_on_host and not chunk.needs_extra_reduction
        }

    def grad_ready(self, index: int, after: Joinable | None = None) -> None:
        """Report that the gradient of shard `index` is final, except where it needs an extra reduction.

        From now on it may be copied to the host and used in a speculative update. It is final after the work
        `after`, or without it after the current stream's work.
        """
        for chunk in self._chunks_of[index]:
            awaited = self._shards_awaited.get(chunk)
            updates = self._updates_of(chunk)
            if updates is not None and awaited:
                awaited.remove(index)
                if after is not None:
                    self._reductions.setdefault(chunk, []).append(after)
                if not awaited:
                    updates.grads_ready(chunk, self._reductions.pop(chunk, []))

    def cancel_step(self) -> None:
        """Cancel the current step: nothing is updated."""
        self._shards_awaited, self._reductions = {}, {}
        for updates in self._all_updates:
            updates.cancel_step()

    def start_update(self, lr: float | Sequence[float], grad_scale: float) -> None:
        """Start the update when all gradients are final. Chunks on the host are updated in the background.

        Args:
            grad_scale: factor on the gradients: clipping, and the inverse of fp16's loss scale.
        """
        self.step_count += 1
        self._shards_awaited, self._reductions = {}, {}
        self._scalars = self._scalars_of(lr, grad_scale, self.step_count)
        for updates in self._all_updates:
            updates.start_updates(self._chunks_of_updates(updates)[::-1], self._scalars)
        share, host, streamed = self.placement.streamed_share, self.host_updates, self.streamed_updates
        if share and host and streamed:
            share.steps.append((host.late, streamed.late))

    @torch.no_grad()
    def update(self, indices: Sequence[int]) -> None:
        """Update the elements of some shards whose states are on the device; call `start_update` before."""
        assert self._scalars is not None, "call start_update first"
        key = tuple(indices)
        if key not in self._prepared:
            self._prepared[key] = self._prepare(indices, self._scalars)
        with region("update of buckets %s", key):
            self._prepared[key](self._scalars)

    def _prepare(self, indices: Sequence[int], scalars: Sequence[AdamScalars]) -> PreparedUpdate:
        wanted, groups, items = set(indices), [], []
        for chunk in dict.fromkeys(chunk for index in indices for chunk in self._chunks_of[index]):
            if chunk.is_on_host:
                continue
            chunk.wait_for_transfer()
            for r in chunk.ranges:
                if r.shard in wanted:
                    items.append(item_of(chunk.states, r, self.shards[r.shard], scalars))
                    groups.append(r.group)
        return self._kernel.prepare(items, groups)

    def wait_for_update(self, index: int, *, block: bool) -> bool:
        """Make the current stream wait for the new parameters of shard `index`.

        Returns:
            False if the host has not updated the shard yet and `block` is False.
        """
        return all(
            updates.wait_for_update(chunk, block=block)
            for chunk in self._chunks_of[index]
            for updates in self._all_updates
        )

    def state(self, name: str, index: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield views of a state of elements [begin, end) of a shard, as (first element in the shard, view).

        They are valid until the next step, or until chunks move. On a disk, use `on_host` and `write_values`.
        """
        for chunk in self._chunks_of[index]:
            yield from chunk.views(name, index, begin, end)

    def _scalars_of(self, lr: float | Sequence[float], grad_scale: float, step: int) -> list[AdamScalars]:
        config = self._config
        return [
            AdamScalars(
                lr=rate,
                beta1=getattr(config, optimizer_of(config).first_decay),
                beta2=config.adam_beta2,
                eps=config.adam_eps,
                weight_decay=group.weight_decay,
                step=step,
                grad_scale=1.0 if group.orthogonalizes else grad_scale,  # gradients are already directions
                decoupled_weight_decay=config.decoupled_weight_decay,
            )
            for rate, group in zip(group_rates(lr, self._groups), self._groups, strict=True)
        ]


def _chunk_size(shards: Sequence[BucketShard], offload: Offload | None) -> int:
    numels = [range_.end - range_.begin for shard in shards for range_ in shard.ranges]
    if offload is None:
        return max(1, sum(numels))
    return offload.chunk_size or find_best_chunk_size(numels)


def _device_kernel(device: torch.device, offload: Offload | None) -> AdamKernel:
    """Return the device's kernel; a simulated device differs from the host, so that tests compare both."""
    if offload is not None and isinstance(offload.device, SimulatedDevice):
        return NumpyAdam()
    return adam_kernel(device)
