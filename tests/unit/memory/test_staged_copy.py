"""Copies of whole buffers, staged through two pinned buffers that both directions share."""

import threading

import pytest
import torch

from patch.memory import Copies, Event, SimulatedDevice, StagedCopier, staged_copy

GENEROUS = 1 << 40


class SlowDevice(SimulatedDevice):
    """Nothing reaches it before the gate is opened."""

    def __init__(self) -> None:
        super().__init__(GENEROUS)
        self.gate = threading.Event()

    def copy_to_device(self, copies: Copies) -> Event:
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
    threading.Timer(0.05, device.gate.set).start()
    copier.copy_to_host([(down, back)])
    arriving.result()
    assert torch.equal(there, up) and torch.equal(back, down)
