"""Starts the local worker processes of a run and supervises them: one exit code, no orphans.

Not torchrun: its agent kills workers 30 s after SIGTERM, before a large checkpoint is saved, and returns 1
for every failure. Workers read only RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so they also
run under torchrun or srun.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from patch.config import Rendezvous, RunConfig
from patch.device import MachineFacts
from patch.distributed.affinity import cores_of_workers
from patch.errors import ConfigError
from patch.logger import get_logger
from patch.storage.lock import refuse_held_run
from patch.storage.sizes import counted

_logger = get_logger(__name__)

POLL_S = 0.1
# After a failure the other ranks have SETTLE_S to report a cause of their own, then GRACE_S to end.
SETTLE_S = 2.0
GRACE_S = 10.0
END_S = 120.0
"""How long a worker may take to leave its groups and end, after its work is done."""
# Another signal at least this long after the first one kills the workers without a checkpoint.
INSISTENCE_S = 3.0
PATCH_ERROR_CODES = range(2, 6)
LOST_RANK_CODE = 6
"""The exit code of a worker that failed because another rank ended; the launcher prefers that rank's code."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Exit codes of a worker that finished its work, or that saved a checkpoint and stopped: after a signal, or
# at the time limit (training/stop.py).
ORDERLY_CODES = (0, 75, *(128 + number for number in STOP_SIGNALS))
BLACKWELL = 10
"""Major compute capability of Blackwell GPUs."""
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch refuses deterministic matmuls without it
    "NCCL_ALGO": "^NVLS",  # NVLS sums in the switch, in no fixed order
}
"""Environment variables that --deterministic-mode needs before a process uses a GPU."""
# Signals after which the exit code is 5, as for a TrainingError, and their usual reason.
_KILLERS: dict[int, str] = {
    signal.SIGKILL: "that the machine ran out of memory",
    signal.SIGABRT: "a collective that waited longer than --distributed-timeout-minutes (NCCL's watchdog)",
}
_FOLDER = "PATCH_LAUNCH_FOLDER"
"""The variable with the folder in which workers leave files for each other and for the launcher."""
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10_000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def launch(
    script: Path, flags: list[str], config: RunConfig, rendezvous: Rendezvous, machine: MachineFacts
) -> int:
    """Run `script` with `flags` once per local rank and wait for all of them.

    Signals to stop are forwarded once. The workers then have all the time they need to save a checkpoint,
    unless another signal comes INSISTENCE_S or more after the first. If a worker fails, the others are ended.

    Args:
        script: the Python file that each worker runs.
        flags: its command line.
        config: the run that the flags describe.
        rendezvous: where the processes of all machines meet.
        machine: this machine, whose cores the workers share.
    Returns:
        0 if all workers succeeded; the code of a PatchError (2 to 5) that any worker ended with; 128 + the
        number after a signal; 75 at the time limit; otherwise the code of the first worker that failed. That
        is 5 if it was killed by the kernel, because memory ran out, or by NCCL's watchdog; and if all that is
        known on this machine is that a rank of another machine ended.

    Raises:
        ConfigError: another run writes to this run's folder. With several machines, rank 0 checks this.
    """
    if config.parallel.nnodes == 1:
        refuse_held_run(Path(config.checkpoint.output_path))
    environments = worker_environments(config, rendezvous, machine, os.environ)
    _logger.info("%s", _describe_threads(environments[0]["OMP_NUM_THREADS"], config, machine))
    cores = cores_of_workers(machine, len(environments))
    if cores:
        _logger.info(
            "each process is bound to its NUMA node: %s and the node's memory",
            counted(len(cores[0]), "core"),
        )
    with tempfile.TemporaryDirectory(prefix="patch-launch-") as folder:
        supervisor = Supervisor(Path(folder))
        with _handle_signals(supervisor.note_signal):
            return _run_all(supervisor, [sys.executable, str(script), *flags], environments, cores)


def _run_all(
    supervisor: Supervisor,
    command: list[str],
    environments: list[dict[str, str]],
    cores: list[set[int]] | None,
) -> int:
    try:
        for local, environment in enumerate(environments):
            supervisor.start(command, environment, cores[local] if cores else None)
        return supervisor.wait()
    finally:
        supervisor.kill()


def claim_error_report() -> bool:
    """Whether this worker is the first on its machine to report an error; usually all have the same one."""
    folder = os.environ.get(_FOLDER)
    if folder is None:  # not started by `launch`
        return True
    try:
        Path(folder, "error_was_shown").touch(exist_ok=False)
    except OSError:
        return False
    return True


def announce_end(code: int) -> None:
    """Announce that this worker has done its work and will end with `code`, within END_S.

    The remaining steps can block forever while they hold the GIL: groups and their store join threads when
    they are destroyed, and the interpreter joins its own. If they take longer than END_S, faulthandler's
    thread, which needs no GIL, prints the stack of every thread and ends the process; the launcher uses
    `code` then, too. In a process that `launch` did not start, which may go on, this does nothing.
    """
    folder = os.environ.get(_FOLDER)
    if folder is not None:
        with suppress(OSError):  # a full disk must neither hide an error nor fail a run that is done
            Path(folder, f"code_{os.environ['LOCAL_RANK']}").write_text(str(code))
        faulthandler.dump_traceback_later(END_S, exit=True)


def worker_environments(
    config: RunConfig, rendezvous: Rendezvous, machine: MachineFacts, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each local rank. Numbers of threads and connections that a user has set are kept.

    Args:
        config: the run.
        rendezvous: where the processes of all machines meet.
        machine: this machine, whose cores the workers share.
        environ: the environment of the launcher.
    """
    num_local = config.parallel.nproc_per_node
    share_of_cores = str(max(1, machine.cpu_cores // num_local))
    defaults = {
        "OMP_NUM_THREADS": share_of_cores,
        "RAYON_NUM_THREADS": share_of_cores,
        # Safe, because no forked child of a worker tokenizes: its threads would not survive the fork.
        "TOKENIZERS_PARALLELISM": "true",
        **allocator_environment(environ),
    }
    if config.parallel.tensor_model_parallel_size > 1 and machine.compute_capability < BLACKWELL:
        # megatron-core's tensor-parallel layers rely on a single queue for the order of their kernels. At
        # TP=1 it would keep gradient reductions from overlapping with backward. Blackwell does not need it
        # (Megatron-LM's megatron/training/arguments.py, validate_args).
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if config.training.deterministic_mode:
        defaults |= DETERMINISTIC
    shared = {
        "WORLD_SIZE": str(config.world_size),
        "LOCAL_WORLD_SIZE": str(num_local),
        "MASTER_ADDR": rendezvous.master_addr,
        "MASTER_PORT": str(rendezvous.master_port or _free_port(rendezvous.master_addr)),
    }
    first_rank = rendezvous.node_rank * num_local
    return [
        {**defaults, **environ, **shared, "RANK": str(first_rank + local), "LOCAL_RANK": str(local)}
        for local in range(num_local)
    ]


def allocator_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The setting of torch's CUDA allocator, if the user has none; it must be set before torch is imported.

    Expandable segments leave hardly any fragments, so that optimizer states can fill the free memory.
    torch reads both names, and its sources differ in which of them wins (c10/core/AllocatorConfig.h,
    c10/cuda/CUDAAllocatorConfig.h of 2.13): if either is set, nothing is added.
    """
    if "PYTORCH_ALLOC_CONF" in environ or "PYTORCH_CUDA_ALLOC_CONF" in environ:
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def _describe_threads(count: str, config: RunConfig, machine: MachineFacts) -> str:
    """A log line: the number of threads of each worker, and where the number comes from."""
    origin = "as the environment has it, with" if "OMP_NUM_THREADS" in os.environ else "each one's share of"
    workers = counted(config.parallel.nproc_per_node, "process")
    return f"OMP_NUM_THREADS={count} in {workers}, {origin} {counted(machine.cpu_cores, 'usable core')}"


def _free_port(address: str) -> int:
    """A free port below the kernel's ephemeral ports, which others could get before rank 0 listens."""
    lowest = int(_EPHEMERAL_PORTS.read_text().split()[0]) if _EPHEMERAL_PORTS.exists() else 0
    candidates = range(_LOWEST_PORT, max(lowest, _LOWEST_PORT))
    for port in [*random.sample(candidates, min(len(candidates), 100)), 0]:
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ConfigError(f"no free port on {address}; give MASTER_ADDR and MASTER_PORT")


class Supervisor:
    """The worker processes of this machine. Signals are only recorded when they come; `wait` acts on them.

    Args:
        folder: where workers leave files for each other and for the launcher.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._signals: list[tuple[int, float]] = []
        """Number and time of each signal that came."""
        self._workers: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        """Exit code by local rank, of the workers that have ended."""
        self._failures: dict[int, int] = {}
        """Exit code by local rank, of the workers that failed, in the order in which they failed."""
        self._failed_at = 0.0
        self._forwarded = False
        self._terminated = False
        self._given_up = False

    def note_signal(self, number: int) -> None:
        """Record a signal; safe inside a signal handler."""
        self._signals.append((number, time.monotonic()))

    def start(
        self, command: Sequence[str], environment: dict[str, str], cores: set[int] | None = None
    ) -> None:
        """Start the worker of the next local rank. All write to stderr, only local rank 0 to stdout.

        Each worker has its own session, so that Ctrl-C does not reach it twice: from the terminal and from
        the launcher.

        Args:
            command: the worker's command line.
            environment: the worker's environment variables.
            cores: cores that its threads may use; None: those of the launcher.
        """
        launcher = os.getpid()
        self._workers.append(
            subprocess.Popen(
                command,
                env={**environment, _FOLDER: str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if self._workers else None,
                start_new_session=True,
                preexec_fn=lambda: _begin(launcher, cores),
            )
        )

    def wait(self) -> int:
        """Wait until all workers have ended; returns the exit code of the run, see `launch`."""
        while self._record_failures():
            self._obey_signals()
            self._end_followers()
            time.sleep(POLL_S)
        return self._exit_code()

    def kill(self) -> None:
        """Kill all workers that still run; after `wait` there are none."""
        self._send(signal.SIGKILL)
        for worker in self._workers:
            worker.wait()

    def _record_failures(self) -> bool:
        """Record workers that failed since the last call; returns whether any worker still runs."""
        for local_rank in range(len(self._workers)):
            code = self._code_of(local_rank)
            if code is None or code in ORDERLY_CODES or local_rank in self._failures:
                continue
            if not self._failures:
                self._failed_at = time.monotonic()
                # A forwarded signal ends a worker that has no handlers yet: that needs no error message.
                ended_by_signal = -code in (number for number, _ in self._signals)
                if not (ended_by_signal or self._given_up):
                    _logger.error("local rank %d ended: %s", local_rank, _describe(code))
            self._failures[local_rank] = code
        return len(self._codes) < len(self._workers)

    def _code_of(self, local_rank: int) -> int | None:
        """The exit code of a worker, the announced one if there is one; None while it runs.

        A worker that announced a failure but does not end counts as failed, because the others wait for it.
        """
        if local_rank in self._codes:
            return self._codes[local_rank]
        worker, announced = self._workers[local_rank], self._folder / f"code_{local_rank}"
        code = worker.poll()
        text = announced.read_text() if announced.exists() else ""
        if code is None:
            age = time.time() - announced.stat().st_mtime if text else 0.0
            if age > END_S + GRACE_S:
                worker.kill()
            return int(text) if age > GRACE_S and int(text) not in ORDERLY_CODES else None
        self._codes[local_rank] = int(text or code)
        if self._codes[local_rank] != code:
            _logger.warning(
                "local rank %d had done its work but did not end by itself: %s", local_rank, _describe(code)
            )
        return self._codes[local_rank]

    def _obey_signals(self) -> None:
        if not self._signals:
            return
        (number, first), (_, last) = self._signals[0], self._signals[-1]
        name = signal.Signals(number).name
        if not self._forwarded:
            self._forwarded = True
            _logger.info(
                "%s: waiting for the workers to save a checkpoint; a signal after %.0f s or more kills them",
                name,
                INSISTENCE_S,
            )
            self._send(number)
        elif last - first >= INSISTENCE_S and not self._given_up:
            self._given_up = True
            _logger.error("%s again: ending the workers without a checkpoint of these last steps", name)
            self._send(signal.SIGKILL)

    def _end_followers(self) -> None:
        if not self._failures:
            return
        since_failure = time.monotonic() - self._failed_at
        if since_failure > SETTLE_S + GRACE_S:
            self._send(signal.SIGKILL)
        elif since_failure > SETTLE_S and not self._terminated:
            self._terminated = True
            self._send(signal.SIGTERM)

    def _send(self, signum: int) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.send_signal(signum)

    def _exit_code(self) -> int:
        failures = list(self._failures.values())
        if not failures:
            return max(self._codes.values())
        if self._given_up:
            return 128 + self._signals[0][0]
        causes = [code for code in failures if code != LOST_RANK_CODE]
        if not causes:
            return 5
        code = next((code for code in causes if code in PATCH_ERROR_CODES), causes[0])
        if -code in _KILLERS:
            return 5
        return code if code > 0 else 128 - code


def _describe(code: int) -> str:
    if code == LOST_RANK_CODE:
        return "another rank ended"
    if code >= 0:
        return f"exit code {code}"
    reason = _KILLERS.get(-code)
    return f"killed by {signal.Signals(-code).name}" + (f"; the usual reason is {reason}" if reason else "")


def _begin(launcher: int, cores: set[int] | None) -> None:
    """Run in the new process: let the kernel kill it when the launcher dies, and bind it to its cores."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # the launcher died before this call
        os._exit(1)
    if cores:
        os.sched_setaffinity(0, cores)


@contextmanager
def _handle_signals(listener: Callable[[int], None]) -> Iterator[None]:
    """A context in which the signals to stop call `listener` instead of their usual handlers."""
    before = {signum: signal.signal(signum, lambda number, _: listener(number)) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
