"""The simulated device, what it counts; and copies staged through two pinned buffers of a device."""

import threading

import pytest
import torch

from patch.memory import staged_copy
from patch.memory.offload_device import Copies, Event
from patch.memory.simulated_device import SimulatedDevice, SimulatedOutOfMemory
from patch.memory.staged_copy import StagedCopier


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


GENEROUS = 1 << 40


class SlowDevice(SimulatedDevice):
    """Nothing reaches it before the gate is opened."""

    def __init__(self) -> None:
        super().__init__(GENEROUS)
        self.gate, self.is_waiting = threading.Event(), threading.Event()

    def copy_to_host(self, copies: Copies, after: Event) -> Event:
        return super().copy_to_device(copies)

    def copy_to_device(self, copies: Copies) -> Event:
        self.is_waiting.set()
        assert self.gate.wait(30)
        return super().copy_to_device(copies)


@pytest.mark.parametrize("numel", [1, 5, 8, 9, 64, 1001])
def test_copies_cut_into_parts_carry_every_byte(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_copy, "_STAGING_BYTES", 32)
    copier = StagedCopier(SimulatedDevice(GENEROUS))
    source = [torch.randn(numel), torch.arange(numel, dtype=torch.int16)]
    there, back = ([torch.zeros_like(tensor) for tensor in source] for _ in range(2))
    copier.copy_to_device(list(zip(source, there, strict=True))).result()
    copier.copy_to_host(list(zip(there, back, strict=True)))
    assert all(map(torch.equal, source, back))


def test_what_leaves_the_device_waits_for_what_is_on_its_way_there() -> None:
    """Both go through the same staging buffers."""
    device = SlowDevice()
    copier = StagedCopier(device)
    up, down = torch.ones(100), torch.full((100,), 2.0)
    there, back = torch.zeros(100), torch.zeros(100)
    arriving = copier.copy_to_device([(up, there)])
    assert device.is_waiting.wait(30), "a staging buffer holds what goes up"
    threading.Timer(0.05, device.gate.set).start()
    copier.copy_to_host([(down, back)])
    arriving.result()
    assert torch.equal(there, up) and torch.equal(back, down)
