"""Messages between processes of this machine: the collectives that training uses, in bytes a second."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from toolkits.doctor.check import Finding, Settings, run_program

_LIMIT_S = 60.0
_NAMES = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "send_recv": "send and receive",
}


def measure_messages(settings: Settings) -> Iterator[Finding]:
    """Bus bandwidth of each collective, as nccl-tests count it, and the time of a small message."""
    ranks = settings.num_processes
    if ranks < 2:
        yield Finding("messages", "ok", "not measured with one process: --nproc 2")
        return
    measured = _run(settings)
    if isinstance(measured, Finding):
        yield measured
        return
    backend, size = measured["backend"], measured["num_bytes"] / 2**20
    for name, text in _NAMES.items():
        speed = measured[name]["bus_bytes_per_s"]
        what = f"{speed / 1e9:.2f} GB/s bus bandwidth ({backend}, {ranks} processes, {size:.0f} MiB)"
        yield Finding(text, "ok", what, data={"backend": backend, "ranks": ranks, **measured[name]})
    latency = measured["latency_s"]
    yield Finding("latency", "ok", f"{latency * 1e6:.0f} us for an all-reduce of one number",
                  data={"seconds": latency})  # fmt: skip


def _run(settings: Settings) -> dict | Finding:
    """What rank 0 measured, or what stopped the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-W", "ignore", "-m", "toolkits.doctor._message_rank"]
        ended = run_program([*program, folder, str(settings.num_processes)], _LIMIT_S)
        result = Path(folder) / "measured.json"
        if ended.code == 0 and result.is_file():
            return json.loads(result.read_text())
    cure = "GPUs: NCCL_DEBUG=INFO shows why; CPUs: look at the interfaces and firewalls of this machine"
    return Finding("messages", "broken", f"processes cannot talk: {ended.reason[:200]}", cure)
