"""The doctor's checks of GPUs, on one."""

from pathlib import Path

import torch

from patch.device import MachineFacts
from toolkits.doctor.check import Check, Settings, run_check
from toolkits.doctor.gpus import check_gpus
from toolkits.doctor.speed import measure_gpus


def test_gpus_are_seen_and_measured() -> None:
    settings = Settings(MachineFacts.probe(), 1, Path())
    seen = run_check(Check("GPUs", check_gpus, 60), settings)
    assert seen[0].status == "ok" and seen[0].data["count"] == torch.cuda.device_count()
    assert seen[1].data["memory_bytes"] == torch.cuda.get_device_properties(0).total_memory
    measured = {finding.name: finding for finding in run_check(Check("speed", measure_gpus, 120), settings)}
    copies, memory = measured["GPU 0 pinned copies"].data, measured["GPU 0 memory"].data
    # No bus is faster than the memory behind it.
    assert 0 < copies["to_device_bytes_per_s"] < memory["bytes_per_s"]
    assert measured["GPU 0 products"].data["flops_per_s"] > 1e12
    assert not [finding for finding in measured.values() if "failed" in finding.value]
