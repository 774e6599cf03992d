"""What chunks need of a GPU: pinned memory, copies beside compute, figures of memory."""

import mmap
from pathlib import Path

import pytest
import torch

from patch.config.schema import OptimizerConfig
from patch.memory import offload_device
from patch.memory.cuda_device import CudaDevice
from patch.memory.disk import DiskMemory
from patch.optimizer.param_groups import ParamGroup
from patch.optimizer.states.chunk import BucketShard, ShardRange
from patch.optimizer.states.hybrid_adam import HybridAdam
from patch.optimizer.states.offload import Offload
from patch.optimizer.states.placement import StaticPlacementPolicy


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(torch.device("cuda", 0))


def test_rings_are_pinned_and_exact(device: CudaDevice) -> None:
    """The original asks for pinned memory and gets pageable."""
    buffer = device.allocate_pinned(1_000_003, torch.bfloat16)
    assert buffer.is_pinned() and buffer[17:].is_pinned()
    assert buffer.untyped_storage().nbytes() == 2 * 1_000_003


@pytest.mark.parametrize("numel", [1, 4097, 1_000_003])
def test_copies_arrive(device: CudaDevice, numel: int) -> None:
    """Between places of any alignment; a mark holds up the stream that asks."""
    source = torch.randn(numel + 3, device="cuda")[3:]
    host, back = (
        device.allocate_pinned(numel + 5, torch.float32)[5:],
        torch.zeros(numel + 1, device="cuda")[1:],
    )
    device.copy_to_host([(source, host)], device.record_event()).synchronize()
    assert torch.equal(host, source.cpu())
    device.copy_to_device([(host, back)]).wait()
    assert torch.equal(back, source)


def test_pinned_memory_that_is_gone_leaves_nothing_behind(device: CudaDevice) -> None:
    """Addresses are given out again, to pageable memory too; copies must not go to what was there."""
    numel = 1 << 22
    for value in range(4):
        source = torch.full((numel,), float(value), device="cuda")
        pinned = device.allocate_pinned(numel, torch.float32)
        device.copy_to_host([(source, pinned)], device.record_event()).synchronize()
        assert pinned.eq(value).all()
        del pinned
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pageable = torch.frombuffer(mmap.mmap(-1, 4 * numel, flags=flags), dtype=torch.float32)
        assert not pageable.is_pinned()
        device.copy_to_host([(source, pageable)], device.record_event()).synchronize()
        assert pageable.eq(value).all()


def test_a_failure_to_pin_is_not_that_of_the_next_kernel(device: CudaDevice) -> None:
    buffer = device.allocate_pinned(4096, torch.float32)
    pages = offload_device._PinnedPages(-1, 4 * 4096)
    with pytest.raises(MemoryError, match="could not be pinned"):
        pages.register(buffer.data_ptr())  # registered already
    assert torch.ones(8, device="cuda").add_(1).sum().item() == 16.0


def test_copies_do_not_hold_up_compute(device: CudaDevice) -> None:
    """A copy of some tens of milliseconds is queued; compute queued after it ends first."""
    source = torch.zeros(1 << 29, dtype=torch.float32, device="cuda")
    target = device.allocate_pinned(1 << 29, torch.float32)
    torch.cuda.synchronize()
    mark = device.copy_to_host([(source, target)], device.record_event())
    torch.ones(8, device="cuda").add_(1)
    torch.cuda.current_stream().synchronize()
    assert not mark.query()
    mark.synchronize()


def test_copies_to_the_host_come_after_what_writes_their_source(device: CudaDevice) -> None:
    source, target = torch.zeros(1 << 20, device="cuda"), device.allocate_pinned(1 << 20, torch.float32)
    torch.cuda._sleep(10**9)
    source.fill_(3.0)
    mark = device.copy_to_host([(source, target)], device.record_event())
    source.fill_(4.0)  # the copy was to come before this: only its own order is promised
    mark.synchronize()
    assert target.ge(3.0).all()


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_chunk_is_updated_while_later_gradients_are_computed(
    device: CudaDevice, tmp_path: Path, on_disk: bool
) -> None:
    """The host has queued all of backward; the device sleeps for tenths of a second in the midst of it."""
    numel = 1 << 20
    ranges = [ShardRange(0, numel, 0, False)]
    shards = [BucketShard(*(torch.zeros(numel, device="cuda") for _ in range(2)), ranges) for _ in range(4)]
    adam = HybridAdam(
        shards,
        OptimizerConfig(lr=1e-3),
        [ParamGroup([], 0.1)],
        Offload(
            device, StaticPlacementPolicy(1.0), numel,
            disk=DiskMemory(tmp_path) if on_disk else None, host_state_bytes=0,
        ),
    )  # fmt: skip
    updates = adam.disk_updates if on_disk else adam.host_updates
    assert updates is not None
    torch.cuda.synchronize()
    adam.start_step(1e-3, 1.0)
    for index, shard in enumerate(shards):
        shard.grad.fill_(index + 1.0)
        adam.grad_ready(index)
        if index == 0:
            torch.cuda._sleep(10**9)
    end = torch.cuda.current_stream().record_event()
    updates._speculations[adam.manager.chunks[0]].job.result()
    assert not end.query()
    end.synchronize()
    adam.start_update(1e-3, 1.0)
    for index, shard in enumerate(shards):
        adam.wait_for_update(index, block=True)
        # Adam's first step is the rate, whatever the gradient; the weight, 0, does not decay.
        torch.testing.assert_close(shard.param, torch.full_like(shard.param, -1e-3), rtol=1e-4, atol=0)


def test_memory_is_that_of_this_process_and_what_is_free(device: CudaDevice) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    before, _ = device.usable_bytes(), device.pop_peak_bytes()
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert abs(device.usable_bytes() - before) < 1 << 28 and before <= total
    allocated = torch.cuda.memory_allocated()
    del held
    assert device.pop_peak_bytes() == allocated
    assert device.pop_peak_bytes() == allocated - (1 << 30)


def test_streamed_states_have_the_bits_of_states_on_the_device(device: CudaDevice) -> None:
    """Five chunks go through three buffers, in three steps, while the device sleeps before the gradients."""
    numel, found = 1 << 18, []
    for streamed in (None, 1.0):
        torch.manual_seed(0)
        ranges = [ShardRange(0, numel, 0, False)]
        params = [torch.randn(numel, device="cuda").bfloat16() for _ in range(5)]
        shards = [BucketShard(torch.zeros(numel, device="cuda"), each, ranges) for each in params]
        offload = None
        if streamed is not None:
            streams = CudaDevice(device.device, "streamed states")
            offload = Offload(device, StaticPlacementPolicy(1.0), numel, streamed=streamed, streams=streams)
        adam = HybridAdam(shards, OptimizerConfig(lr=1e-3), [ParamGroup([], 0.1)], offload)
        for _ in range(3):
            adam.start_step(1e-3, 1.0)
            torch.cuda._sleep(10**8)
            for shard in shards:
                shard.grad.normal_()
            adam.start_update(1e-3, 1.0)
            adam.update(range(5))
            for index in range(5):
                adam.wait_for_update(index, block=True)
        states = [adam.manager.chunks[0], adam.manager.chunks[-1]]
        for chunk in states:
            chunk.wait_for_transfer()
        found.append([*params, states[0].states["exp_avg"].data[:numel].cpu()])
    for expected, ours in zip(*found, strict=True):
        assert torch.equal(expected, ours)
