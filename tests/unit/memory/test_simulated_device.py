"""The simulated device: what it counts."""

import pytest
import torch

from patch.memory import SimulatedDevice, SimulatedOutOfMemory


def squares(weight: torch.Tensor, times: int) -> torch.Tensor:
    """Each multiplication saves its input, 200 bytes, twice for backward; the first one's is a weight."""
    for _ in range(times):
        weight = weight * weight
    return weight.sum()


def test_activations_count_until_backward_has_used_them() -> None:
    device = SimulatedDevice(10_000)
    with device.count_activations():
        loss = squares(torch.nn.Parameter(torch.ones(50)), 4)
        assert device.allocated_bytes == 3 * 200
        loss.backward()
        assert device.allocated_bytes == 0
    assert device.pop_peak_bytes() == 3 * 200


def test_what_an_attempt_that_ran_out_of_memory_held_is_given_back_once() -> None:
    device = SimulatedDevice(500)
    try:
        with device.count_activations():
            squares(torch.nn.Parameter(torch.ones(50)), 4)
        pytest.fail("there was room for two multiplications only")
    except SimulatedOutOfMemory:
        assert device.allocated_bytes == 0  # while the error still has the graph
    assert device.allocated_bytes == 0
