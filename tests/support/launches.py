"""Launchers with tiny scripts as workers, in this process or as programs.

As a program this file is the launcher of a machine: `python launches.py SCRIPT MACHINE`, see `start`.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from small_runs import small_run
from started_programs import start_program

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.launch import rendezvous
from patch.launch.launcher import launch
from patch.preflight.cluster import Rendezvous

REPOSITORY = Path(__file__).parents[2]
MACHINE = MachineFacts(cuda_devices=0, cpu_cores=4)
ALONE = Rendezvous()
READY_TIMEOUT_S = 200.0


def make_config(num_local: int) -> RunConfig:
    return small_run(dp=num_local, micro_batch_size=1, global_batch_size=num_local, train_iters=1)


def launch_workers(script: Path, num_local: int, place: Rendezvous = ALONE, **parallel: object) -> int:
    config = make_config(num_local)
    config = replace(config, parallel=replace(config.parallel, **parallel))
    with patch.dict(os.environ):
        return launch(script, config, place, MACHINE, "--flag")


def write_script(folder: Path, body: str) -> Path:
    script = folder / "worker.py"
    script.write_text(
        f"import os, signal, sys, time\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from patch.launch import worker_process\nworker_process.begin()\n"
        f"rank = int(os.environ['RANK'])\n{body}\n"
    )
    return script


def start(
    script: Path, num_local: int, place: Rendezvous = ALONE, stderr: Path | None = None, **parallel: int
) -> subprocess.Popen:
    """Start the launcher of a machine as a program."""
    machine = json.dumps({"num_local": num_local, "place": place, **parallel})
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, __file__, str(script), machine]
    return start_program(command, environment, stderr=None if stderr is None else stderr.open("w"))


def await_files(*files: Path) -> list[str]:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, f"{files} were not written in time"
        time.sleep(0.05)
    return [file.read_text() for file in files]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process outlived its launcher"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def become_machine(text: str) -> dict:
    machine = json.loads(text)
    return {**machine, "place": Rendezvous(*machine["place"])}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    rendezvous.LAST_CALL_S = rendezvous.HEARTBEAT_S = 2
    sys.exit(launch_workers(Path(sys.argv[1]), **become_machine(sys.argv[2])))
