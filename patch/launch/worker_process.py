"""The worker's side of a launch: its binding to the launcher, and its error file.

torch's elastic agent names an error file for each worker (TORCHELASTIC_ERROR_FILE). A worker writes its cause
of end, its exit code, and whether a restart may help; see `WorkerExit`. If a scheduler started the process,
there is no error file, and only the exit code remains.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from patch.errors import MemoryLackError, PatchError
from patch.storage.atomic import write_atomically

END_S = 120.0
"""Seconds that a worker may take to leave its groups and end after its work."""
FAILED_END_S = 10.0
"""The same for a failed worker: the other workers and a restart wait for it."""
LOST_RANK_CODE = 6
"""Exit code of a worker that failed because another rank ended; the launcher prefers that rank's code."""
TIME_LIMIT_CODE = 75
"""Exit code after --exit-duration-in-mins: EX_TEMPFAIL of sysexits.h. A job script repeats the command after
this code; 0 would mean that the run is done."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that request a checkpoint and the end. SIGHUP is the end of a terminal, unless ignored (nohup)."""
LAUNCHER = "PATCH_LAUNCHER_PID"
"""Environment variable with the launcher's process id."""
CORES = "PATCH_WORKER_CORES"
"""Environment variable with each local rank's cores: commas between cores, spaces between ranks."""
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch refuses deterministic matmuls without it
    "NCCL_ALGO": "^NVLS",  # NVLS sums in the switch, in no fixed order
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # for Transformer Engine's attention
}
"""Environment variables that --deterministic-mode needs before a process uses a GPU."""


class WorkerExit(NamedTuple):
    """The content of a worker's error file after success or failure."""

    exit_code: int
    message: str = ""
    """The cause of a failure, or "" after success or a stop with a checkpoint."""
    may_restart: bool = False
    """Whether a restart may help."""
    lacks: str = ""
    """"device" or "host" if that memory ran out, otherwise ""."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals of `STOP_SIGNALS` that this process must handle."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (is_deaf and number is signal.SIGHUP)]


def begin() -> None:
    """Make this worker die with its launcher, and set its core affinity.

    Call this first in a worker. Without a launcher it does nothing.
    """
    if not is_launched():
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ[LAUNCHER]):  # the launcher died before this call
        os._exit(1)
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, map(int, cores.split()[int(os.environ["LOCAL_RANK"])].split(",")))


def is_launched() -> bool:
    """Return whether our launcher started this process, not torchrun or a scheduler."""
    return LAUNCHER in os.environ


def claim_error_report() -> bool:
    """Return whether this worker is the first on its machine to report an error, usually common to all."""
    file = _error_file()
    try:
        if file is not None:
            (file.parents[1] / "error_was_shown").touch(exist_ok=False)
    except OSError:
        return False
    return True


def announce_end(worker_exit: WorkerExit) -> int:
    """Write the error file before this worker leaves its groups, and limit the time until its end.

    The remaining steps can block forever while they hold the GIL: groups, their store and the interpreter
    join threads. If these steps take longer than END_S (FAILED_END_S after a failure), faulthandler's thread,
    which needs no GIL, prints all stacks and ends the process; the launcher then uses the announced code.
    Without an error file, the process may go on, and nothing happens.

    Returns:
        the code with which this process should end. It is 0 if our launcher reads the code from the file,
        because the agent takes any other code for a failure and kills the other workers.
    """
    file = _error_file()
    if file is None:
        return worker_exit.exit_code
    faulthandler.dump_traceback_later(FAILED_END_S if worker_exit.message else END_S, exit=True)
    content = {**worker_exit._asdict(), "timestamp": int(time.time())}
    try:
        write_atomically(file, json.dumps(content))
    except OSError:  # a full disk must neither hide an error nor fail a run that is done
        return worker_exit.exit_code
    return 0 if is_launched() and not worker_exit.message else worker_exit.exit_code


def failure(error: BaseException) -> WorkerExit:
    """Return the `WorkerExit` of a worker that ends with an error.

    A restart repeats a PatchError, unless it is about other ranks. The machine may cause any other error.
    """
    message = str(error) or type(error).__name__
    if not isinstance(error, PatchError):
        return WorkerExit(1, message, may_restart=True)
    lacks = ("device" if error.on_device else "host") if isinstance(error, MemoryLackError) else ""
    return WorkerExit(error.exit_code, message, error.may_restart, lacks)


def read_worker_exit(file: str, code: int = 0) -> WorkerExit:
    """Read a worker's error file; if there is none, build a `WorkerExit` from the exit code."""
    try:
        content = json.loads(Path(file).read_bytes())
        return WorkerExit(**{field: content[field] for field in WorkerExit._fields})
    except (OSError, ValueError, KeyError, TypeError):
        is_stopped = code in (0, TIME_LIMIT_CODE) or code > 128  # the disk had no room for the file
        return WorkerExit(code, "it failed" if code else "", may_restart=not is_stopped)


def _error_file() -> Path | None:
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")  # torchrun sets "" if it keeps no logs
    return Path(name) if name else None
