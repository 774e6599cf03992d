"""Memory of an offload device and of the host, and copies between them; see README.md."""

from patch.memory.allocators import HOST, Allocator, HostAllocator, TorchAllocator
from patch.memory.cuda_device import CudaDevice
from patch.memory.offload_device import Copies, Event, Joinable, OffloadDevice
from patch.memory.saved_tensors import SavedTensors
from patch.memory.simulated_device import UNLIMITED, SimulatedDevice, SimulatedOutOfMemory
from patch.memory.staged_copy import StagedCopier

__all__ = [
    "HOST",
    "UNLIMITED",
    "Allocator",
    "Copies",
    "CudaDevice",
    "Event",
    "HostAllocator",
    "Joinable",
    "OffloadDevice",
    "SavedTensors",
    "SimulatedDevice",
    "SimulatedOutOfMemory",
    "StagedCopier",
    "TorchAllocator",
]
