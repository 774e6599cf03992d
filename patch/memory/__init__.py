"""Memory of an offload device and of the host, and copies between them; see README.md."""

from patch.memory.cuda_device import CudaDevice
from patch.memory.disk import DiskMemory, is_on_disk, on_host, write_values
from patch.memory.offload_device import (
    HOST,
    Allocator,
    Copies,
    Event,
    HostAllocator,
    Joinable,
    OffloadDevice,
    PinnedAllocator,
    TorchAllocator,
    host_zeros,
)
from patch.memory.saved_tensors import SavedTensors
from patch.memory.simulated_device import UNLIMITED, SimulatedDevice, SimulatedOutOfMemory
from patch.memory.staged_copy import StagedCopier

__all__ = [
    "HOST",
    "UNLIMITED",
    "Allocator",
    "Copies",
    "CudaDevice",
    "DiskMemory",
    "Event",
    "HostAllocator",
    "Joinable",
    "OffloadDevice",
    "PinnedAllocator",
    "SavedTensors",
    "SimulatedDevice",
    "SimulatedOutOfMemory",
    "StagedCopier",
    "TorchAllocator",
    "host_zeros",
    "is_on_disk",
    "on_host",
    "write_values",
]
