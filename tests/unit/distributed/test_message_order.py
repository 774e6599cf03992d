"""Messages on a device that executes what it is given as late, or as early, as it may.

Two ranks that hold the same, of which this is one. Over gloo: test_async_collectives.py. Those of the
optimizer: test_order.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_device import AT_ONCE, COMPUTE_FIRST, COPIES_FIRST, LATE, POOL, FakeDevice, Order

from patch.distributed import async_collectives, context_group, tensor_group
from patch.distributed.async_collectives import CommHandle, RoundedSums, WaitClock, read_values
from patch.distributed.context_group import ContextGroup
from patch.distributed.tensor_group import ChunkedAllReduce, RingAllGather, RingReduceScatter, TensorGroup
from patch.model.attention.ring_attention import RingAttention, RingKernels
from patch.model.attention.ring_tiles import PlacedSequence, Tile, tiles_of_piece

N, MESSAGES = 24, 5
ORDERS: tuple[Order, ...] = (LATE, COPIES_FIRST, COMPUTE_FIRST, 0, 1, 2)
CPU = torch.device("cpu")


@contextmanager
def messages_of(fake: FakeDevice) -> Iterator[dist.ProcessGroup]:
    """The second of two ranks."""
    with (
        mock.patch.object(async_collectives, "follows_on_device", lambda group: True),
        mock.patch.object(async_collectives, "start_all_to_all", fake.start_all_to_all),
        mock.patch.object(tensor_group, "start_swap", fake.start_swap),
        mock.patch.object(tensor_group, "start_all_reduce", fake.start_all_reduce),
        mock.patch.object(context_group, "start_swap", fake.start_swap),
        fake,
    ):
        yield dist.ProcessGroup(1, 2)


def random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def summed(fake: FakeDevice, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """[N] shards; all messages start before one is waited for, with gradients that come late."""
    with fake.executing():
        buffers = random(*[(2 * N,)] * MESSAGES)
    fake.adopt(buffers)
    sums = RoundedSums(2 * N, torch.bfloat16, CPU)
    pending = []
    for buffer in buffers:
        buffer.mul_(1.5)
        pending.append(sums.start(buffer, buffer[N:], group))
    for message in pending:
        message.wait()
    return [buffer[N:] for buffer in buffers]


def ring(fake: FakeDevice, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The output and the gradients of attention to two ranks' keys."""
    with fake.executing():
        parts = [part.requires_grad_() for part in random((1, 4, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16))]
        (gradient,) = random((1, 4, 8, 16))
    fake.adopt([*parts, gradient])
    contexts = ContextGroup(group)
    row = PlacedSequence(slice(0, 1), 0, 16)

    def tiles(source: int) -> Iterator[Tile]:
        return tiles_of_piece([row], contexts.zigzag, source, 16, None)

    query, key, value = (part * 1.5 for part in parts)
    out = RingAttention.apply(query, key, value, contexts, tiles, RingKernels(0.25))
    return [out.detach(), *torch.autograd.grad(out, parts, gradient)]


def followed(fake: FakeDevice, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Sums that are added up by messages that follow, with what compute had before the call."""
    with fake.executing():
        first, second = random((N,), (N,))
    fake.adopt([first, second])
    pending, across = fake.start_all_reduce(first, group), dist.ProcessGroup(1, 2)
    second.mul_(1.5)

    def start() -> CommHandle:
        second.add_(first)
        return fake.start_all_reduce(second, across)

    pending.chain(start, group, CPU).wait()
    return [first, second]


def rows(fake: FakeDevice, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Products with rows that are gathered, scattered and reduced, in two pieces each."""
    with fake.executing():
        own, weight = random((32, 512), (512, 512))
    fake.adopt([own, weight])
    ranks = TensorGroup(group, is_overlapped=True)
    gathered, product = RingAllGather(own * 1.5, ranks), own.new_empty(64, 512)
    for place, piece in gathered.pieces():
        product[place] = piece @ weight
    scattered, reduced = product.clone(), product.clone()
    sums = RingReduceScatter(scattered, ranks)
    for place in sums.pieces():
        scattered[place].mul_(2.0)
    alike = ChunkedAllReduce(reduced, ranks)
    for place in alike.pieces():
        reduced[place].mul_(3.0)
    return [product, sums.wait(), alike.wait()]


def executed(order: Order, work: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
    fake = FakeDevice(order)
    with messages_of(fake) as group:
        found = work(fake, group)
        fake.compute.synchronize()
    return found


@pytest.mark.parametrize("work", [summed, followed, ring, rows])
def test_no_order_of_execution_changes_a_bit(work: Callable[..., list[torch.Tensor]]) -> None:
    expected = executed(AT_ONCE, work)
    assert all(part.isfinite().all() and part.any() for part in expected)
    for order in ORDERS:
        assert all(map(torch.equal, executed(order, work), expected)), order


def test_rounded_gradients_travel_while_those_before_are_added_up() -> None:
    fake = FakeDevice(LATE)
    with messages_of(fake) as group:
        with fake.executing():
            buffers, outs = random((2 * N,), (2 * N,)), [torch.zeros(N) for _ in range(2)]
        fake.adopt([*buffers, *outs])
        sums = RoundedSums(2 * N, torch.bfloat16, CPU)
        [sums.start(*each, group) for each in zip(buffers, outs, strict=True)][1].wait()
        fake.compute.synchronize()
        with fake.executing():
            assert outs[1].any() and not outs[0].nan_to_num().any(), "the first sum had to end"


def test_the_host_reads_a_small_sum_and_waits_for_nothing_else() -> None:
    """Neither for compute nor for messages of other groups, however often."""
    fake, weights, counts = FakeDevice(LATE), dist.ProcessGroup(1, 2), dist.ProcessGroup(1, 2)
    with fake.executing():
        others, sums = torch.zeros(8), [torch.ones(3) for _ in range(2 * POOL)]
    with fake:
        fake.adopt([others, *sums])
        others.add_(1.0)
        fake.start_all_reduce(others, weights)
        busy = fake.comm_of(weights)
        for small in sums:
            pending = fake.start_all_reduce(small, counts)
            others.add_(1.0)
            assert read_values(small, pending, WaitClock(CPU)) == [2.0] * 3
            assert len(fake.compute.tasks) == 1 and len(busy.tasks) == 2
