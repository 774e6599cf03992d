"""Whether a run fits a machine: memory of its heaviest rank, and of a node's host."""

from __future__ import annotations

from typing import NamedTuple

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.plan.describe import memory_needed
from patch.plan.memory import usable_device_memory


class Fit(NamedTuple):
    """What a run needs and what it may use, in bytes; 0 of usable: not known."""

    device_needed: int
    device_usable: int
    host_needed: int
    host_usable: int
    """Bytes of one machine."""

    @property
    def is_on_device(self) -> bool:
        """Whether the device has room."""
        return not 0 < self.device_usable < self.device_needed

    @property
    def is_whole(self) -> bool:
        """Whether device and host have room."""
        return self.is_on_device and not 0 < self.host_usable < self.host_needed


def fit_of(config: RunConfig, machine: MachineFacts) -> Fit:
    """Whether a run fits; a GPU is planned with 95 % of its memory less 1 GiB.

    Args:
        config: the run, its automatic choices made.
        machine: one of its machines.
    """
    on_device, on_host, _ = memory_needed(config, machine)
    return Fit(on_device, usable_device_memory(config, machine), on_host, machine.host_memory_bytes)
