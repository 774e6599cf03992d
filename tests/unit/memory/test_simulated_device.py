"""The simulated device: what it counts."""

import pytest
import torch

from patch.memory import SimulatedDevice, SimulatedOutOfMemory


def squares(weight: torch.Tensor, times: int) -> torch.Tensor:
    """Each multiplication saves 2 x 200 bytes for backward."""
    for _ in range(times):
        weight = weight * weight
    return weight.sum()


def test_activations_count_until_backward_has_used_them() -> None:
    device = SimulatedDevice(10_000)
    with device.count_activations():
        loss = squares(torch.ones(50, requires_grad=True), 4)
        assert device.allocated_bytes == 4 * 400
        loss.backward()
        assert device.allocated_bytes == 0
    assert device.pop_peak_bytes() == 4 * 400


def test_what_an_attempt_that_ran_out_of_memory_held_is_given_back_once() -> None:
    device = SimulatedDevice(1_000)
    try:
        with device.count_activations():
            squares(torch.ones(50, requires_grad=True), 4)
        pytest.fail("there was room for two multiplications only")
    except SimulatedOutOfMemory:
        assert device.allocated_bytes == 0  # while the error still has the graph
    assert device.allocated_bytes == 0
