"""Buffers in host memory that updates of chunks on the host need in addition to the chunks' states."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from patch.memory import HOST, Allocator, Event, OffloadDevice
from patch.optimizer.kernels.low_bit_moments import bytes_of, elements_of
from patch.optimizer.states.chunk import BucketShard, Chunk, StateChunk

# The largest share of the chunks on the host that is updated speculatively.
_SPECULATIVE_SHARE = 0.5
# The largest share of the chunks on the host that have input buffers. Copies run in the order of backward.
# With more buffers the gradient that is needed first is copied last, and the host waits for it.
_INPUT_SHARE = 0.35
# The shares of the host memory without states that shadows and input buffers may take.
_SHADOW_MEMORY_SHARE = 0.5
_INPUT_MEMORY_SHARE = 0.25
# The least number of input buffers, and the number of in-place outputs: one is in use, one is copied.
_NUM_ALWAYS = 2


def kept_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of an element's weight of this dtype that the host keeps beside its states.

    Weights are masters (fp32) or their high bits (bf16); fp16's masters are states.
    """
    return 0 if dtype == torch.float16 else dtype.itemsize


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
        has_param: whether the update reads parameters, and the host does not keep them.
    """

    def __init__(self, chunks: HostedChunks, *, has_param: bool) -> None:
        like, allocate = chunks.shards[0], partial(chunks.device.allocate_pinned, chunks.size)
        self.grad = allocate(like.grad.dtype)
        self.param = allocate(like.param.dtype) if has_param else None
        """Parameters that are masters (fp32) or the high bits of masters (bf16), or None."""


class OutputBuffers:
    """Pinned buffers that the update of one chunk writes, or the weights of a chunk that the host keeps."""

    def __init__(self, chunks: HostedChunks) -> None:
        self.param = chunks.device.allocate_pinned(chunks.size, chunks.shards[0].param.dtype)
        self.shadow: dict[str, Chunk] = {}
        """The new states of a speculative update; empty if updates overwrite the old states."""
        self.copied: Event | None = None
        """An event at the end of the last copies from `param` to the device, or None."""
        self.is_current = False
        """Whether `param` has, or gets by a copy in flight, the chunk's weights of the device."""


class HostBuffers:
    """Pools of input and output buffers.

    Args:
        memory: memory of the states of speculative updates.
    """

    def __init__(self, chunks: HostedChunks, memory: Allocator) -> None:
        self._chunks, self._memory, like = chunks, memory, chunks.shards[0]
        reads_param = kept_bytes(like.param.dtype) > 0
        self._keeps_weights = reads_param and memory is HOST
        self._has_param = reads_param and not self._keeps_weights
        self.kept: dict[StateChunk, OutputBuffers] = {}
        """The weights of chunks, which updates in place overwrite; none for fp16 and states on a disk."""
        grad_bytes, param_bytes = like.grad.dtype.itemsize, like.param.dtype.itemsize
        state_bytes = bytes_of(chunks.dtypes) if memory is HOST else 0
        shadow_bytes = chunks.size * (param_bytes + state_bytes)
        self._max_shadows = int(_SHADOW_MEMORY_SHARE * chunks.spare_bytes / shadow_bytes)
        input_bytes = chunks.size * (grad_bytes + param_bytes * self._has_param)
        self._max_inputs = _NUM_ALWAYS + int(_INPUT_MEMORY_SHARE * chunks.spare_bytes) // input_bytes
        self.inputs: deque[InputBuffers] = deque()
        """Input buffers that no update uses."""
        self.outputs: list[OutputBuffers] = []
        """Outputs of in-place updates, which use them in turn."""
        self.shadow_outputs: deque[OutputBuffers] = deque()
        """Outputs of speculative updates that no update of this step uses."""

    def resize(self, hosted: Sequence[StateChunk]) -> None:
        """Allocate or drop buffers for these chunks on the host; call it between two steps."""
        num_chunks = len(hosted)
        self.kept = {
            chunk: self.kept.get(chunk) or OutputBuffers(self._chunks)
            for chunk in hosted
            if self._keeps_weights and not all(self._chunks.shards[r.shard].is_on_host for r in chunk.ranges)
        }
        while len(self.outputs) < min(_NUM_ALWAYS, num_chunks):
            self.outputs.append(OutputBuffers(self._chunks))
        most = max(_NUM_ALWAYS, int(num_chunks * _INPUT_SHARE))
        num_inputs = min(num_chunks, most, self._max_inputs)
        while len(self.inputs) > num_inputs:
            self.inputs.pop()
        while len(self.inputs) < num_inputs:
            self.inputs.append(InputBuffers(self._chunks, has_param=self._has_param))
        num_shadows = min(int(num_chunks * _SPECULATIVE_SHARE), self._max_shadows)
        while len(self.shadow_outputs) > num_shadows:
            self.shadow_outputs.pop()
        while len(self.shadow_outputs) < num_shadows:
            outputs = OutputBuffers(self._chunks)
            outputs.shadow = self._chunks.make_states(self._memory)
            self.shadow_outputs.append(outputs)
