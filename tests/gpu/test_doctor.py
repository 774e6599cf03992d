"""The doctor's checks of GPUs, on one."""

import torch

from patch.device import MachineFacts
from toolkits.doctor.check import Settings, run_check
from toolkits.doctor.devices import check_gpus
from toolkits.doctor.speed import measure_gpus


def test_gpus_are_seen_and_measured() -> None:
    settings = Settings(MachineFacts.probe(), 1)
    seen = run_check("GPUs", check_gpus, settings)
    assert seen[0].status == "ok" and seen[0].data["count"] == torch.cuda.device_count()
    assert seen[1].data["memory_bytes"] == torch.cuda.get_device_properties(0).total_memory
    measured = {finding.name: finding for finding in run_check("speed", measure_gpus, settings)}
    copies, memory = measured["GPU 0 pinned copies"].data, measured["GPU 0 memory"].data
    # No bus is faster than the memory behind it.
    assert 0 < copies["to_device_bytes_per_s"] < memory["bytes_per_s"]
    assert measured["GPU 0 products"].data["flops_per_s"] > 1e12
    assert not [finding for finding in measured.values() if "failed" in finding.value]
