"""Facts of this machine; where it has no NVIDIA driver, they cost no import of torch."""

import subprocess
import sys
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[2]


def test_gpus_are_counted_as_torch_does_and_without_it_where_there_is_no_driver() -> None:
    code = (
        "import sys; from patch.device import MachineFacts;"
        "print(MachineFacts.probe().cuda_devices, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    devices, has_torch = done.stdout.split()
    assert int(devices) == torch.cuda.device_count()
    assert has_torch == str(Path("/proc/driver/nvidia").exists())
