"""Saved tensors in host memory: the same gradients whatever executes when.

The device is the fake one, whose compute stream overwrites what the host has freed. Layers, micro-batches and
steps follow each other as in a pipeline: all forwards of a step, then all backwards.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fake_device import AT_ONCE, COMPUTE_FIRST, COPIES_FIRST, LATE, FakeDevice, Order
from fake_offload import FakeOffloadDevice

from patch.memory.saved_tensors import HostBlocks, SavedTensors
from patch.memory.simulated_device import SimulatedDevice

CPU = torch.device("cpu")
ORDERS: tuple[Order, ...] = (LATE, COPIES_FIRST, COMPUTE_FIRST, 0, 1)
NUM_LAYERS, NUM_OFFLOADED, NUM_BATCHES, NUM_STEPS = 4, 3, 2, 2


def layer(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Saves views of one storage, its input twice, and outputs."""
    left, right = torch.tanh(hidden @ weight).chunk(2, dim=1)
    return hidden + torch.cat((left * right, right.sigmoid()), dim=1) * hidden


def weights_and_batches() -> tuple[list[torch.nn.Parameter], list[torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 6, generator=random) for _ in range(NUM_LAYERS)]
    batches = [torch.randn(5, 6, generator=random) for _ in range(NUM_BATCHES * NUM_STEPS)]
    return [torch.nn.Parameter(weight) for weight in weights], batches


def forward(batch: torch.Tensor, weights: list, saved: SavedTensors | None) -> torch.Tensor:
    hidden, before = batch, None
    for number, weight in enumerate(weights):
        if saved is None:
            hidden = layer(hidden, weight)
            continue
        is_offloaded = number < NUM_OFFLOADED
        with saved.saving(lambda tensor: False) if is_offloaded else nullcontext() as group:
            hidden = layer(hidden, weight)
        saved.release(but=group)
        if before is not None:
            hidden.register_hook(lambda gradient, group=before: saved.fetch(group))
        before = group
    return hidden.square().sum()


def gradients(saved: SavedTensors | None, inputs: Any = None) -> list[torch.Tensor]:
    weights, batches = inputs or weights_and_batches()
    for step in range(NUM_STEPS):
        losses = [forward(batch, weights, saved) for batch in batches[step::NUM_STEPS]]
        while losses:
            losses.pop(0).backward()
        if saved is not None:
            saved.end_step()
    return [weight.grad for weight in weights if weight.grad is not None]


def gradients_on(order: Order) -> list[Any]:
    fake, inputs = FakeDevice(order, reuses_memory=True), weights_and_batches()
    fake.adopt([*inputs[0], *inputs[1]])
    with fake:
        found = gradients(SavedTensors(FakeOffloadDevice(fake), CPU), inputs)
        fake.compute.synchronize()
    return [gradient.tolist() for gradient in found]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return [gradient.tolist() for gradient in gradients(None)]


@pytest.mark.parametrize("order", [AT_ONCE, *ORDERS])
def test_no_order_of_execution_changes_a_bit(expected: list, order: Order) -> None:
    assert gradients_on(order) == expected


def test_host_memory_is_that_of_one_step_and_a_storage_travels_once() -> None:
    device = Counting()
    saved = SavedTensors(device, CPU)
    assert len(gradients(saved)) == NUM_LAYERS
    assert device.num_blocks == NUM_BATCHES * NUM_OFFLOADED
    wide, batch = 5 * 6 * 4, NUM_BATCHES * NUM_STEPS
    # A layer's input, tanh's output, the sigmoid's, and the concatenated factor; views go with their storage.
    of_first = wide  # needs no gradient of its input, so not the factor either
    assert saved.pop_bytes() == batch * (NUM_OFFLOADED * (3 * wide + wide // 2) - of_first)
    assert saved.pop_bytes() == 0


class Counting(SimulatedDevice):
    """Counts blocks of host memory."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.num_blocks = 0

    def allocate_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.num_blocks += 1
        return super().allocate_pinned(numel, dtype)


def test_a_step_that_fails_leaves_nothing_behind(expected: list) -> None:
    device = Counting()
    saved = SavedTensors(device, CPU)
    weights, batches = weights_and_batches()
    with device.count_activations():
        loss = forward(batches[0], weights, saved)
        stopped = weights[1].register_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            loss.backward()
        saved.end_step()
    stopped.remove()
    loss = forward(batches[0], weights, saved)
    saved.end_step()
    with pytest.raises(AssertionError, match="step of this graph"):
        loss.backward()
    saved.pop_bytes()
    assert device.allocated_bytes == 0
    assert [gradient.tolist() for gradient in gradients(saved)] == expected
    assert device.num_blocks == NUM_BATCHES * NUM_OFFLOADED


def fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("no memory")


def test_blocks_are_bounded_when_sizes_differ() -> None:
    device = Counting()
    blocks = HostBlocks(device)
    sizes = [blocks.take(size) for size in (10_000, 20_000)]
    assert [block.numel() for block in sizes] == [12_288, 20_480]
    for block in sizes:
        blocks.give(block)
    assert blocks.take(9_000) is sizes[0] and blocks.take(15_000) is sizes[1]
    blocks.give(sizes[0])
    larger = blocks.take(50_000)  # takes the place of the free one
    blocks.give(larger)
    assert blocks.take(1) is larger and device.num_blocks == 3


def test_what_has_no_memory_any_more_stays_where_it_is() -> None:
    """As the output of a recomputed operation, whose memory comes back before backward reads it."""
    saved = SavedTensors(SimulatedDevice(10**9), CPU)
    weight = torch.nn.Parameter(torch.ones(4))
    with saved.saving(lambda tensor: False):
        dropped = torch.arange(4.0)
        loss = (weight * dropped).sum()
        dropped.untyped_storage().resize_(0)
    assert saved.pop_bytes() == 0
    dropped.untyped_storage().resize_(16)
    dropped.copy_(torch.arange(4.0))
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [0, 1, 2, 3]
