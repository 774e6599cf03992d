"""Buffers in host memory that updates of chunks on the host need in addition to the chunks' states."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from patch.memory.offload_device import HOST, Allocator, Event, OffloadDevice
from patch.optimizer.kernels.low_bit_moments import bytes_of, elements_of
from patch.optimizer.states.chunk import BucketShard, Chunk, StateChunk

_Buffer = TypeVar("_Buffer")

# The largest share of the chunks on the host that is updated speculatively.
_SPECULATIVE_SHARE = 0.5
# The largest share of the chunks on the host that have input buffers. Copies run in the order of backward.
# With more buffers the gradient that is needed first is copied last, and the host waits for it.
_INPUT_SHARE = 0.35
# The shares of the host memory without states that shadows with kept weights, and input buffers, may take.
_SHADOW_MEMORY_SHARE = 0.5
_INPUT_MEMORY_SHARE = 0.25
# The least number of input buffers, and the number of in-place outputs: one is in use, one is copied.
_NUM_ALWAYS = 2


class HostedChunks(NamedTuple):
    """Facts of chunks in host memory or on a disk, which all their updates need."""

    shards: Sequence[BucketShard]
    """The bucket shards, whose gradients and parameters are on the device and have the same dtypes."""
    dtypes: Mapping[str, torch.dtype]
    """The dtypes of the updated states."""
    size: int
    """Elements of a chunk."""
    device: OffloadDevice
    spare_bytes: int
    """Host memory of this process without the states."""

    def make_states(self, memory: Allocator, states: dict[str, Chunk] | None = None) -> dict[str, Chunk]:
        """Allocate buffers in `memory` for the states of any chunk.

        `states` gets them one by one, so that the caller can free them if memory runs out.
        """
        states = {} if states is None else states
        for name, dtype in self.dtypes.items():
            states[name] = Chunk(self.size // elements_of(name), memory, dtype)
        return states


class InputBuffers:
    """Pinned copies of the gradients, and parameters, that the update of one chunk reads.

    Args:
        has_param: whether an update reads parameters that the host does not keep.
    """

    def __init__(self, chunks: HostedChunks, *, has_param: bool) -> None:
        like, allocate = chunks.shards[0], partial(chunks.device.allocate_pinned, chunks.size)
        self.grad = allocate(like.grad.dtype)
        self.param = allocate(like.param.dtype) if has_param else None
        """Parameters that are masters (fp32) or the high bits of masters (bf16), or None."""
        self.is_current = False
        """Always False: each update copies them."""


class OutputBuffers:
    """Pinned buffers that the update of one chunk writes, or the weights of a chunk that the host keeps."""

    def __init__(self, chunks: HostedChunks, shadows: Allocator | None = None) -> None:
        self.param = chunks.device.allocate_pinned(chunks.size, chunks.shards[0].param.dtype)
        self.shadow = {} if shadows is None else chunks.make_states(shadows)
        """The new states of a speculative update; empty if updates overwrite the old states."""
        self.copied: Event | None = None
        """An event at the end of the last copies from `param` to the device, or None."""
        self.is_current = False
        """Whether `param` has, or gets by a copy in flight, the chunk's weights of the device."""


def fit_pool(pool: MutableSequence[_Buffer], number: int, make: Callable[[], _Buffer]) -> None:
    """Drop or make buffers until a pool has this number."""
    while len(pool) > number:
        pool.pop()
    while len(pool) < number:
        pool.append(make())


class HostBuffers:
    """Pools of input and output buffers.

    Args:
        memory: memory of the states of speculative updates.
    """

    def __init__(self, chunks: HostedChunks, memory: Allocator) -> None:
        self._chunks, self._memory, like = chunks, memory, chunks.shards[0]
        self._reads_param = like.param.dtype != torch.float16  # its masters are states
        self.kept: dict[StateChunk, OutputBuffers] = {}
        """The weights of chunks, which updates in place overwrite; none for fp16 and states on a disk."""
        self._weight_bytes = chunks.size * like.param.dtype.itemsize
        self._grad_bytes = chunks.size * like.grad.dtype.itemsize
        state_bytes = bytes_of(chunks.dtypes) if memory is HOST else 0
        self._shadow_bytes = self._weight_bytes + chunks.size * state_bytes
        self._room = int(_SHADOW_MEMORY_SHARE * chunks.spare_bytes)
        self._max_kept = self._room // self._weight_bytes if self._reads_param and memory is HOST else 0
        self.inputs: deque[InputBuffers] = deque()
        """Input buffers that no update uses."""
        self.outputs: list[OutputBuffers] = []
        """Outputs of in-place updates, which use them in turn."""
        self.shadow_outputs: deque[OutputBuffers] = deque()
        """Outputs of speculative updates that no update of this step uses."""

    def weights_of(self, chunk: StateChunk, inputs: InputBuffers) -> InputBuffers | OutputBuffers:
        """Return what holds the weights that a chunk's update reads: the kept ones, or the inputs."""
        return self.kept.get(chunk, inputs)

    def resize(self, hosted: Sequence[StateChunk]) -> None:
        """Allocate or drop buffers for these chunks on the host; call it between two steps."""
        num_chunks, shards = len(hosted), self._chunks.shards
        copied = [chunk for chunk in hosted if not all(shards[r.shard].is_on_host for r in chunk.ranges)]
        wanted = copied[: self._max_kept]
        # Weights of chunks that leave become old, so they go even if memory runs out below.
        self.kept = {chunk: self.kept[chunk] for chunk in wanted if chunk in self.kept}
        try:
            for chunk in wanted:
                if chunk not in self.kept:
                    self.kept[chunk] = OutputBuffers(self._chunks)
        except MemoryError:  # a step can do without them
            self._max_kept, self.kept = 0, {}
        fit_pool(self.outputs, min(_NUM_ALWAYS, num_chunks), partial(OutputBuffers, self._chunks))
        has_param = self._reads_param and len(self.kept) < len(copied)
        if self.inputs and (self.inputs[0].param is not None) != has_param:
            self.inputs.clear()
        input_bytes = self._grad_bytes + self._weight_bytes * has_param
        most = _NUM_ALWAYS + int(_INPUT_MEMORY_SHARE * self._chunks.spare_bytes) // input_bytes
        num_inputs = min(num_chunks, max(_NUM_ALWAYS, int(num_chunks * _INPUT_SHARE)), most)
        fit_pool(self.inputs, num_inputs, partial(InputBuffers, self._chunks, has_param=has_param))
        most = int((self._room - len(self.kept) * self._weight_bytes) / self._shadow_bytes)
        num_shadows = min(int(num_chunks * _SPECULATIVE_SHARE), most)
        fit_pool(self.shadow_outputs, num_shadows, partial(OutputBuffers, self._chunks, self._memory))
