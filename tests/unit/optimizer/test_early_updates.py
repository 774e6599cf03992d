"""What the host does while backward runs, and in which order after it, on a fake device.

Chunks of one shard each, all on the host. The host queues the whole backward before the device has begun.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_device import LATE, Event, FakeDevice
from fake_offload import FakeOffloadDevice, HostKernel, on

from patch.config.schema import OptimizerConfig
from patch.distributed.async_collectives import CommHandle
from patch.memory.simulated_device import UNLIMITED
from patch.optimizer.param_groups import ParamGroup
from patch.optimizer.states import host_buffers, host_update
from patch.optimizer.states.chunk import BucketShard, ShardRange
from patch.optimizer.states.hybrid_adam import HybridAdam
from patch.optimizer.states.offload import Offload
from patch.optimizer.states.placement import StaticPlacementPolicy

NUM_CHUNKS, SIZE, LR = 12, 100, 1e-3
STATES, WEIGHTS = NUM_CHUNKS * SIZE * 10, NUM_CHUNKS * SIZE * 2
"""Bytes of the states, and of the weights that the host keeps."""
RING, MANY = 0.0, 0.25
"""Shares of the spare host memory that inputs take: two that go round, or one for each third chunk."""
NUM_EARLY, COPY = 4, 3
"""Chunks whose inputs come in backward, with MANY; entries of the queue for each: a wait and two copies."""


class Job:
    """An optimizer of bf16 weights, and what its backward does."""

    def __init__(
        self,
        fake: FakeDevice,
        kernel: HostKernel,
        host_bytes: int = UNLIMITED,
        chunk_size: int = SIZE,
        offload: Offload | None = None,
    ) -> None:
        self.fake, self.kernel = fake, kernel
        self.groups = [dist.ProcessGroup(1, 2) for _ in range(2)]
        numel = NUM_CHUNKS * SIZE
        with fake.executing():
            self.gradient, self.weight = torch.zeros(numel), torch.ones(numel).bfloat16()
        fake.adopt([self.gradient, self.weight])
        places = [slice(SIZE * index, SIZE * (index + 1)) for index in range(NUM_CHUNKS)]
        shards = [
            BucketShard(self.gradient[place], self.weight[place], [ShardRange(0, SIZE, 0, False)])
            for place in places
        ]
        default = Offload(FakeOffloadDevice(fake), StaticPlacementPolicy(1.0), chunk_size, host_bytes)
        offload = offload or default
        self.adam = HybridAdam(shards, OptimizerConfig(lr=LR), [ParamGroup([], 0.1)], offload)
        self.down = default.device._d2h_stream

    def backward(self, *, is_reduced: bool) -> list[Event]:
        """Queue it; the points of the compute stream at which a chunk's gradient is there."""
        self.adam.start_step(LR, 1.0)
        points = []
        for index, shard in enumerate(self.adam.shards):
            shard.grad.fill_(index + 1.0)
            after = CommHandle([])
            if is_reduced:
                after = self.fake.start_all_reduce(shard.grad, self.groups[index % 2])
            self.adam.grad_ready(index, after)
            points.append(self.fake.compute.record_event())
        return points

    def run_worker(self) -> None:
        """Its next job."""
        self.adam.host_updates._worker.run_next()

    def run_early(self) -> int:
        """All jobs that the worker has in backward; how many chunks it updates."""
        before = len(self.kernel.numels)
        while self.adam.host_updates._worker.jobs:
            self.run_worker()
        return len(self.kernel.numels) - before

    def step(self, scale: float = 1.0) -> None:
        self.adam.start_update(LR, scale)
        for index in range(NUM_CHUNKS):
            self.adam.wait_for_update(index, block=True)


@contextmanager
def job(host_bytes: int = UNLIMITED, share: float = MANY, chunk_size: int = SIZE) -> Iterator[Job]:
    fake = FakeDevice(LATE)
    with on(fake) as kernel, mock.patch.object(host_buffers, "_INPUT_MEMORY_SHARE", share):
        yield Job(fake, kernel, host_bytes, chunk_size)


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("share", [RING, MANY])
def test_a_chunk_waits_for_its_own_gradient_only(share: float, is_reduced: bool) -> None:
    """A stream is a queue: told to wait for a later gradient, it holds up whatever it gets afterwards."""
    with job(share=share) as a:
        points = a.backward(is_reduced=is_reduced)
        for index in range(NUM_CHUNKS // 2):
            a.run_worker()
            assert a.kernel.numels == [SIZE] * (index + 1)
            assert points[index].query() and not points[index + 1].query()


def test_a_chunk_waits_for_the_gradients_of_all_its_shards() -> None:
    """Their messages are those of two groups: the last to start need not be the last to end."""
    with job(chunk_size=2 * SIZE) as a:
        a.backward(is_reduced=True)
        a.run_worker()
        with a.fake.executing():
            assert a.gradient[: 2 * SIZE : SIZE].tolist() == [2.0, 4.0]


@pytest.mark.parametrize("share", [RING, MANY])
def test_what_is_needed_first_is_updated_first(share: float) -> None:
    """Of what was to be updated early, the worker has not begun anything when the norm is known."""
    with job(share=share) as a:
        a.backward(is_reduced=False)
        a.adam.start_update(LR, 1.0)
        for index in reversed(range(NUM_CHUNKS)):
            a.adam.wait_for_update(index, block=True)
            assert len(a.kernel.numels) == NUM_CHUNKS - index


@pytest.mark.parametrize("num_shadows", [0, 1, 3, NUM_CHUNKS])
def test_early_updates_are_those_of_half_the_chunks_and_their_shadows_take_half_of_the_spare_memory(
    num_shadows: int,
) -> None:
    with job(STATES + 2 * (WEIGHTS + num_shadows * SIZE * 12)) as a:
        a.backward(is_reduced=False)
        assert a.run_early() == min(num_shadows, NUM_CHUNKS // 2)


def test_early_updates_are_made_again_only_with_another_scale_and_pause_while_that_is_frequent() -> None:
    early = []
    with job() as a:
        a.backward(is_reduced=False)
        a.run_early()
        a.step()
        assert len(a.kernel.numels) == NUM_CHUNKS
        for _ in range(12):
            a.backward(is_reduced=False)
            early.append(a.run_early())
            num_early = len(a.kernel.numels)
            a.step(scale=0.5)
            assert len(a.kernel.numels) == num_early + NUM_CHUNKS
    assert early[0] == NUM_CHUNKS // 2 and early[-1] == 0


def test_an_error_of_an_early_update_reaches_whoever_waits_for_its_weights() -> None:
    with job() as a:
        a.backward(is_reduced=False)
        a.kernel.failure = RuntimeError("a worker's own trouble")
        a.run_worker()
        a.kernel.failure = None
        a.adam.start_update(LR, 1.0)
        a.adam.wait_for_update(1, block=True)
        with pytest.raises(RuntimeError, match="a worker's own trouble"):
            a.adam.wait_for_update(0, block=True)


def test_what_is_needed_first_does_not_wait_for_all_other_gradients() -> None:
    """Its own was the last to be final; only a share of the others is before it in the queue."""
    with job() as a:
        a.backward(is_reduced=False)
        a.adam.start_update(LR, 1.0)
        a.adam.wait_for_update(NUM_CHUNKS - 1, block=True)
        assert a.down.num_done <= COPY * (NUM_EARLY + 1)


@pytest.mark.parametrize("num_early", [2, 3, NUM_EARLY, None])
def test_as_many_gradients_come_in_backward_as_fit_into_memory(num_early: int | None) -> None:
    """Into a quarter of the spare memory, beside the two that there always are; None: memory for all."""
    with job(STATES + 4 * (num_early - 2) * SIZE * 6 if num_early else UNLIMITED) as a:
        a.adam.host_updates.failure_rate = 1.0
        a.backward(is_reduced=False)[-1].synchronize()
        a.fake.run_others()
        assert not a.down.tasks and not a.kernel.numels
        assert a.down.num_done == COPY * (num_early or NUM_EARLY)


@pytest.mark.parametrize(("num_fitting", "num_kept"), [(0, 0), (5, 5), (NUM_CHUNKS + 1, NUM_CHUNKS)])
def test_weights_stay_on_the_host_while_half_of_the_spare_memory_has_room(
    num_fitting: int, num_kept: int
) -> None:
    """The other chunks' weights are copied to it in each step."""
    with job(STATES + 2 * num_fitting * SIZE * 2) as a:
        buffers = a.adam.host_updates._buffers
        assert len(buffers.kept) == num_kept
        assert {each.param is None for each in buffers.inputs} == {num_kept == NUM_CHUNKS}


class TightDevice(FakeOffloadDevice):
    """The fifth buffer of weights cannot be pinned."""

    num_weights = 0

    def allocate_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.num_weights += dtype == torch.bfloat16
        if self.num_weights == 5:
            raise MemoryError
        return super().allocate_pinned(numel, dtype)


def test_a_host_that_cannot_pin_all_weights_keeps_none() -> None:
    bits = []
    for device_type in (FakeOffloadDevice, TightDevice):
        fake = FakeDevice(0)
        with on(fake) as kernel:
            offload = Offload(device_type(fake), StaticPlacementPolicy(1.0), SIZE)
            a = Job(fake, kernel, offload=offload)
            for scale in (1.0, 0.5, 1.0):
                a.backward(is_reduced=False)
                a.step(scale)
            assert bool(a.adam.host_updates._buffers.kept) == (device_type is FakeOffloadDevice)
            bits.append(a.weight.tolist())
    assert bits[0] == bits[1] != [1.0] * len(bits[0])


class TimedDevice(FakeOffloadDevice):
    """Its events tell a time, which copies take; memory may run out."""

    def __init__(self, fake: FakeDevice, what: str, ms_per_byte: float, lacks: Any) -> None:
        super().__init__(fake, what)
        self._ms, self._ms_per_byte, self._lacks = 0.0, ms_per_byte, lacks

    def record_event(self, after: Sequence = ()) -> Any:
        event = super().record_event(after)
        event.milliseconds = self._ms
        return event

    def _copy(self, copies: Sequence, stream: Any, after: Any) -> Any:
        event = super()._copy(copies, stream, after)
        self._ms += self._ms_per_byte * sum(source.nbytes for source, _ in copies)
        event.milliseconds = self._ms
        return event

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if self._lacks is torch.OutOfMemoryError:
            raise self._lacks
        return super().allocate(numel, dtype)

    def allocate_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._lacks is MemoryError and dtype == torch.int16:  # of states only
            raise self._lacks
        return super().allocate_pinned(numel, dtype)


def streamed_after(
    host_s: float, device_s: float, lacks: type[Exception] | None = None
) -> tuple[list[int], list[float]]:
    """Numbers of streamed chunks in each step, all clipped, and the last weights; seconds are of a chunk."""
    now, fake = 0.0, FakeDevice(0)
    with on(fake) as kernel, mock.patch.object(host_update.time, "perf_counter", lambda: now):
        update = kernel.update

        def timed_update(items: Sequence) -> None:
            nonlocal now
            now += host_s
            update(items)

        kernel.update = timed_update  # type: ignore[method-assign]
        device = TimedDevice(fake, "states", 0.0, lacks)
        streams = TimedDevice(fake, "streamed states", 1e3 * device_s / (SIZE * 20), lacks)
        offload = Offload(device, StaticPlacementPolicy(1.0), SIZE, streamed=None, streams=streams)
        a, found = Job(fake, kernel, offload=offload), []
        for _ in range(40):
            a.adam.placement.apply()
            found.append(sum(chunk.is_streamed for chunk in a.adam.manager.chunks))
            a.backward(is_reduced=False)
            a.step(0.5)
        return found, a.weight.tolist()


def test_the_device_gets_the_chunks_with_which_it_ends_when_the_host_does() -> None:
    found, bits = {}, []
    for host_s, device_s in ((3.0, 1.0), (1.0, 3.0), (0.0, 3.0)):
        numbers, weights = streamed_after(host_s, device_s)
        found[host_s, device_s] = numbers[-1]
        bits.append(weights)
        assert numbers[0] == 0 and len(set(numbers[-15:])) == 1
    assert found == {(3.0, 1.0): 9, (1.0, 3.0): 3, (0.0, 3.0): 0}
    assert bits[0] == bits[1] == bits[2] != [1.0] * len(bits[0])


@pytest.mark.parametrize("lacks", [torch.OutOfMemoryError, MemoryError])
def test_without_memory_to_stream_the_host_updates_everything(lacks: type[Exception]) -> None:
    numbers, weights = streamed_after(3.0, 1.0, lacks)
    assert set(numbers) == {0} and weights == streamed_after(0.0, 3.0)[1]
