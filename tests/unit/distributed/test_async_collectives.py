"""Collectives on flat buffers over gloo against NumPy: to the bit, in the order of ranks."""

import functools
import gc
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed

from patch.distributed.async_collectives import (
    CommHandle,
    RoundedSums,
    WaitClock,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
N = 97
"""Elements of one shard: no multiple of a vector's."""


def _buffer(rank: int, num_shards: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's values over 2^-8 to 2^8, so that sums in another order round to other bits."""
    generator = torch.Generator().manual_seed(rank)
    size = num_shards * N
    exponents = torch.randint(-8, 9, (size,), generator=generator)
    return (torch.randn(size, generator=generator) * 2.0**exponents).to(dtype)


def _add(a: np.ndarray, b: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """One IEEE addition; that of bfloat16 is rounded to nearest, ties to even, from float32."""
    total = a + b
    if dtype == torch.float32:
        return total
    bits = total.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def _sum(ranks: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The sum of the ranks' buffers in that order."""
    buffers = [_buffer(rank, len(ranks), dtype).float().numpy() for rank in ranks]
    total = functools.reduce(lambda a, b: _add(a, b, dtype), buffers)
    return torch.from_numpy(total).to(dtype)


def _part(rank: int, size: int) -> slice:
    return slice(rank * size, (rank + 1) * size)


def _reduce_scatter(ranks: list[int], group: dist.ProcessGroup, clock: WaitClock) -> None:
    for dtype in DTYPES:
        own = _part(group.rank(), N)
        expected = _sum(ranks, dtype)[own]
        buffer, out = _buffer(dist.get_rank(), len(ranks), dtype), torch.zeros(N, dtype=dtype)
        started = start_reduce_scatter(buffer, out, group)
        if len(ranks) == 1:
            assert torch.equal(out, expected), "the only rank waits for no other rank"
        started.wait(clock)
        assert torch.equal(out, expected), f"memory of its own, {dtype}"
        assert torch.equal(buffer, _buffer(dist.get_rank(), len(ranks), dtype)), f"changed, {dtype}"
        start_reduce_scatter(buffer, buffer[own], group).wait(clock)
        assert torch.equal(buffer[own], expected), f"its own part, {dtype}"
        buffer[own] = _buffer(dist.get_rank(), len(ranks), dtype)[own]
        assert torch.equal(buffer, _buffer(dist.get_rank(), len(ranks), dtype)), f"others' parts, {dtype}"


def _rounded(ranks: list[int], group: dist.ProcessGroup, clock: WaitClock) -> None:
    """Parts that are sent as bf16 and summed in fp32: as over NCCL, and as over gloo."""
    own = _part(group.rank(), N)
    parts = [_buffer(rank, len(ranks), torch.float32).bfloat16().float().numpy() for rank in ranks]
    expected = torch.from_numpy(functools.reduce(np.add, parts))[own]
    sums = RoundedSums(len(ranks) * N + 5, torch.bfloat16, CPU)
    for start in (sums.start, functools.partial(start_reduce_scatter, reduce_dtype=torch.bfloat16)):
        for dtype in DTYPES:
            buffer, out = _buffer(dist.get_rank(), len(ranks), torch.float32), torch.zeros(N, dtype=dtype)
            start(buffer, out, group).wait(clock)
            assert torch.equal(out, expected.to(dtype)), dtype
        assert torch.equal(buffer, _buffer(dist.get_rank(), len(ranks), torch.float32)), "changed"
        start(buffer, buffer[own], group).wait(clock)
        assert torch.equal(buffer[own], expected), "its own part"


def _all_gather(ranks: list[int], group: dist.ProcessGroup, clock: WaitClock) -> None:
    for dtype in DTYPES:
        shards = [_buffer(rank, 1, dtype) for rank in ranks]
        buffer = torch.full((len(ranks) * N,), torch.nan, dtype=dtype)
        shard = buffer[_part(group.rank(), N)]
        shard.copy_(shards[group.rank()])
        start_all_gather(buffer, shard, group).wait(clock)
        assert torch.equal(buffer, torch.cat(shards)), dtype


def _all_reduce(ranks: list[int], group: dist.ProcessGroup, clock: WaitClock) -> None:
    """Of whole numbers that bfloat16 holds too: gloo promises no order of the sum."""
    for dtype in DTYPES:
        buffer = (torch.arange(N) % 16).to(dtype) * (dist.get_rank() + 1)
        start_all_reduce(buffer, group).wait(clock)
        expected = (torch.arange(N) % 16).to(dtype) * sum(rank + 1 for rank in ranks)
        assert torch.equal(buffer, expected), dtype


def _under_way_together(ranks: list[int], group: dist.ProcessGroup, clock: WaitClock) -> None:
    """Several at once, waited for in another order than started: none takes the message of another."""
    buffers = [_buffer(dist.get_rank(), len(ranks), torch.float32) * 2.0**step for step in range(3)]
    outs = [torch.zeros(N) for _ in buffers]
    pending = [start_reduce_scatter(*pair, group) for pair in zip(buffers, outs, strict=True)]
    for step in (1, 2, 0):
        pending[step].wait(clock)
        assert torch.equal(outs[step], _sum(ranks, torch.float32)[_part(group.rank(), N)] * 2.0**step), step


def _owner_is_gone(ranks: list[int], group: dist.ProcessGroup, clock: WaitClock) -> None:
    """The first rank drops what it started before any other rank sends its part."""
    is_early = group.rank() == 0
    out = torch.zeros(N)

    def start() -> weakref.ref:
        return weakref.ref(start_reduce_scatter(_buffer(dist.get_rank(), len(ranks), out.dtype), out, group))

    started = start() if is_early else None
    gc.collect()
    dist.barrier(group)
    started = started or start()
    gc.collect()
    pending = started()
    assert pending is not None, "its memory may be that of another tensor when the message arrives"
    pending.wait(clock)
    assert torch.equal(out, _sum(ranks, out.dtype)[_part(group.rank(), N)])
    del pending
    assert started() is None, "kept after it was waited for"


def run_all(rank: int, world_size: int) -> None:
    """All ranks, and from four on every second one: ranks of a group are not those of the job."""
    groups = [list(range(world_size))]
    if world_size == 4:
        groups += [[0, 2], [1, 3]]
    clock = WaitClock(CPU)
    for ranks in groups:
        group = dist.new_group(ranks)
        if rank in ranks:
            _reduce_scatter(ranks, group, clock)
            _rounded(ranks, group, clock)
            _all_gather(ranks, group, clock)
            _all_reduce(ranks, group, clock)
            _under_way_together(ranks, group, clock)
            if len(ranks) > 1:  # what has nothing to wait for is not kept
                _owner_is_gone(ranks, group, clock)
    assert CommHandle([]) not in CommHandle._unfinished
    assert clock.read_ms() > 0


@pytest.mark.parametrize("world_size", [1, 4])
def test_sums_are_numpys_in_the_order_of_ranks_and_gathered_shards_are_the_ranks_own(world_size: int) -> None:
    run_distributed(run_all, world_size)


class _SlowWork(dist.Work):
    """A message that arrives 20 ms after it is waited for."""

    def wait(self, *unused: object) -> bool:
        time.sleep(0.02)
        return True


def test_the_clock_adds_up_what_was_waited_since_it_was_read_but_no_join() -> None:
    clock, done = WaitClock(CPU), []
    pending = CommHandle([_SlowWork(), _SlowWork()], lambda: done.append("finished"))
    pending.wait_stream()
    assert (clock.read_ms(), done) == (0, [])
    pending.wait(clock)
    assert done == ["finished"]
    CommHandle([_SlowWork()]).wait(clock)
    time.sleep(0.02)
    assert 60 <= clock.read_ms() < 10_000 and clock.read_ms() == 0
