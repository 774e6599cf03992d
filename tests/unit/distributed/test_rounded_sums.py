"""Sums of rounded gradients on a device that executes what it is given as late, or as early, as it may.

Two ranks that hold the same, of which this is one. Over gloo: test_async_collectives.py.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_device import AT_ONCE, COMPUTE_FIRST, COPIES_FIRST, LATE, FakeDevice, Order

from patch.distributed import rounded_sums
from patch.distributed.rounded_sums import RoundedSums

N, MESSAGES = 24, 5


def gradients() -> torch.Tensor:
    return torch.randn(MESSAGES, 2 * N, generator=torch.Generator().manual_seed(1))


def summed(order: Order) -> torch.Tensor:
    """[MESSAGES, N] shards; all messages start before one is waited for, with gradients that come late."""
    fake = FakeDevice(order)
    group: Any = dist.ProcessGroup(1, 2)
    with fake.executing():
        buffers = list(gradients())
    with (
        mock.patch.object(rounded_sums, "streams_of", lambda device: fake),
        mock.patch.object(rounded_sums, "start_all_to_all", fake.start_all_to_all),
        fake,
    ):
        fake.adopt(buffers)
        sums = RoundedSums(2 * N, torch.bfloat16, buffers[0].device)
        pending = []
        for buffer in buffers:
            buffer.mul_(1.5)
            pending.append(sums.start(buffer, buffer[N:], group))
        for message in pending:
            message.wait()
        found = torch.stack([buffer[N:] for buffer in buffers])
        fake.compute.synchronize()
    return found


@pytest.mark.parametrize("order", [LATE, COPIES_FIRST, COMPUTE_FIRST, 0, 1, 2])
def test_no_message_is_overwritten_by_a_later_one(order: Order) -> None:
    expected = 2 * (gradients()[:, N:] * 1.5).bfloat16().float()
    assert torch.equal(summed(AT_ONCE), expected)
    assert torch.equal(summed(order), expected)
