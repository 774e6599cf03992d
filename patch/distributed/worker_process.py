"""The worker's side of a launch: its bond to the launcher, and what it leaves in its error file.

torch's elastic agent names an error file for each worker (TORCHELASTIC_ERROR_FILE). A worker writes there
why it ends, with which exit code, and whether starting it again could help; see `Reply`. Without that file
(a scheduler started the process) nothing is written, and the process's exit code says it all.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from patch.errors import MemoryLackError, PatchError
from patch.storage.atomic import write_atomically

END_S = 120.0
"""Seconds that a worker may take to leave its groups and end, after its work is done."""
FAILED_END_S = 10.0
"""The same for a worker that failed: the others, and a restart, wait for it."""
LOST_RANK_CODE = 6
"""The exit code of a worker that failed because another rank ended; the launcher prefers that rank's code."""
TIME_LIMIT_CODE = 75
"""Exit code after --exit-duration-in-mins: EX_TEMPFAIL of sysexits.h, "try again". A job's script repeats the
same command after it; 0 would say that the run is done."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Each asks for a checkpoint and the end. SIGHUP is the end of a terminal, unless it is ignored (nohup)."""
NCCL_MARK = ".nccl"
"""Ending of a file beside the error file: the worker has groups of NCCL, whose watchdog may abort it."""
LAUNCHER = "PATCH_LAUNCHER_PID"
"""The variable with the process id of the launcher."""
CORES = "PATCH_WORKER_CORES"
"""The variable with the cores of each local rank: commas between cores, spaces between ranks."""
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch refuses deterministic matmuls without it
    "NCCL_ALGO": "^NVLS",  # NVLS sums in the switch, in no fixed order
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine's attention
}
"""Environment variables that --deterministic-mode needs before a process uses a GPU."""


class Reply(NamedTuple):
    """The content of a worker's error file when its work has ended, well or badly."""

    exit_code: int
    message: str = ""
    """The cause of a failure; "" after work that is done, or that a signal stopped with a checkpoint."""
    may_restart: bool = False
    """Whether the failure may pass when the workers are started again."""
    lacks: str = ""
    """"device" or "host": whose memory ran out, if that was the failure."""


def stop_signals() -> list[signal.Signals]:
    """The signals of `STOP_SIGNALS` that this process is to answer."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (is_deaf and number is signal.SIGHUP)]


def begin() -> None:
    """Bind this process to the launcher that started it: it dies with it, and keeps to its cores.

    Call it first of all in a worker. Elsewhere it does nothing.
    """
    if not is_launched():
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ[LAUNCHER]):  # the launcher died before this call
        os._exit(1)
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, map(int, cores.split()[int(os.environ["LOCAL_RANK"])].split(",")))


def is_launched() -> bool:
    """Whether our launcher started this process, not torchrun or a scheduler."""
    return LAUNCHER in os.environ


def claim_error_report() -> bool:
    """Whether this worker is the first on its machine to report an error; usually all have the same one."""
    file = _error_file()
    try:
        if file is not None:
            (file.parents[1] / "error_was_shown").touch(exist_ok=False)
    except OSError:
        return False
    return True


def announce_end(reply: Reply) -> int:
    """Announce that this worker's work has ended, before it leaves its groups.

    The remaining steps can block forever while they hold the GIL: groups and their store join threads when
    they are destroyed, and the interpreter joins its own. If they take longer than END_S (FAILED_END_S after
    a failure), faulthandler's thread, which needs no GIL, prints the stack of every thread and ends the
    process; the launcher then uses the announced code. In a process without an error file, which may go on,
    nothing happens.

    Returns:
        the code with which this process should end. It is 0 if our launcher finds the reply's code in the
        file, because the agent takes any other code for a failure and ends the other workers.
    """
    file = _error_file()
    if file is None:
        return reply.exit_code
    faulthandler.dump_traceback_later(FAILED_END_S if reply.message else END_S, exit=True)
    content = {**reply._asdict(), "timestamp": int(time.time())}
    try:
        write_atomically(file, json.dumps(content))
    except OSError:  # a full disk must neither hide an error nor fail a run that is done
        return reply.exit_code
    return 0 if is_launched() and not reply.message else reply.exit_code


def note_nccl() -> None:
    """Tell the launcher that this worker has groups of NCCL."""
    if (file := _error_file()) is not None:
        with suppress(OSError):  # it only changes a message
            Path(f"{file}{NCCL_MARK}").touch()


def failure(error: BaseException) -> Reply:
    """The reply of a worker that ends with an error.

    A user can cure a PatchError, and a restart repeats it, unless it is about other ranks. Any other error
    may be the machine's.
    """
    message = str(error) or type(error).__name__
    if not isinstance(error, PatchError):
        return Reply(1, message, may_restart=True)
    lacks = ("device" if error.on_device else "host") if isinstance(error, MemoryLackError) else ""
    return Reply(error.exit_code, message, error.may_restart, lacks)


def read_reply(file: str, code: int = 0) -> Reply:
    """The reply that a worker has left in its error file; else what the exit code of its process says."""
    try:
        content = json.loads(Path(file).read_bytes())
        return Reply(**{field: content[field] for field in Reply._fields})
    except (OSError, ValueError, KeyError, TypeError):
        is_stopped = code in (0, TIME_LIMIT_CODE) or code > 128  # and it had no room for its reply
        return Reply(code, "it failed" if code else "", may_restart=not is_stopped)


def _error_file() -> Path | None:
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")  # torchrun sets it to "" where it keeps no logs
    return Path(name) if name else None
