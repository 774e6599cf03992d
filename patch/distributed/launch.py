"""Start the local worker processes of a run and answer for them: one exit code, no orphans.

Not torchrun: its agent kills workers 30 s after SIGTERM, before a large checkpoint is saved, and returns 1
for every failure. Workers read only RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so they also
run under a torchrun or srun of the user's own.
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

_logger = get_logger(__name__)

POLL_S = 0.1
# After a failure the other ranks get this long to report the true cause of their own, then this long to end.
SETTLE_S = 2.0
GRACE_S = 10.0
END_S = 120.0
"""How long a worker that is done may take to leave its groups and end."""
# A signal that comes again after this long is meant: the workers are ended without a checkpoint.
INSISTENCE_S = 3.0
PATCH_ERROR_CODES = range(2, 6)
LOST_RANK_CODE = 6
"""What a worker returns that only saw another rank end: the launcher looks for that rank's code instead."""
# What a worker returns when it is done, or when it obeyed a signal and saved a checkpoint.
ORDERLY_CODES = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
BLACKWELL = 10
"""Major compute capability."""
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch refuses deterministic matmuls without it
    "NCCL_ALGO": "^NVLS",  # sums in the switch come in any order
}
"""What --deterministic-mode wants in a process's environment before it uses a GPU."""
# Signals that end training as an error of class 5 does, and what usually sends them.
_KILLERS: dict[int, str] = {
    signal.SIGKILL: "that the machine ran out of memory",
    signal.SIGABRT: "a collective that waited longer than --distributed-timeout-minutes (NCCL's watchdog)",
}
_FOLDER = "PATCH_LAUNCH_FOLDER"
"""Variable with the folder of files through which workers tell each other and the launcher."""
_EPHEMERAL_PORTS, _LOWEST_PORT = Path("/proc/sys/net/ipv4/ip_local_port_range"), 10_000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def launch(
    script: Path, flags: list[str], config: RunConfig, rendezvous: Rendezvous, machine: MachineFacts
) -> int:
    """Run `script` with `flags` once per local rank and wait for all of them.

    SIGINT and SIGTERM are forwarded once; the workers then have all the time they need to save a checkpoint,
    unless another signal comes INSISTENCE_S or more after the first. The first worker that fails ends the
    others.

    Returns:
        0; or the code of a PatchError (2 to 5) that any worker ended with; or 130 or 143 after a signal; or
        what the first failed worker returned (5 when it was killed, as by the kernel for want of memory or by
        NCCL's watchdog, and when all that is known here is that a rank of another machine ended).

    Raises:
        ConfigError: another run writes this one's folder. Of several machines' ranks, rank 0 finds that out.
    """
    if config.parallel.nnodes == 1:
        refuse_held_run(Path(config.checkpoint.output_path))
    environments = worker_environments(config, rendezvous, machine, os.environ)
    _logger.info("%s", _threads(environments[0]["OMP_NUM_THREADS"], config, machine))
    cores = cores_of_workers(machine, len(environments))
    if cores:
        _logger.info(
            "each process is bound to its NUMA node: %d core(s) and the memory beside", len(cores[0])
        )
    with tempfile.TemporaryDirectory(prefix="patch-launch-") as folder:
        supervisor = Supervisor(Path(folder))
        with _telling(supervisor.note_signal):
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
    """Whether this worker is the first on its machine to show an error, which all workers tend to share."""
    folder = os.environ.get(_FOLDER)
    if folder is None:  # not started by `launch`
        return True
    try:
        Path(folder, "error_was_shown").touch(exist_ok=False)
    except OSError:
        return False
    return True


def announce_end(code: int) -> None:
    """This worker is done, all files are written: it will end with `code`, within END_S.

    What is left can wait for ever, with the interpreter's lock: groups and their store join threads when they
    are destroyed, the interpreter joins its own. Where it takes longer, a thread without Python shows where
    every thread stands and ends the process. The launcher takes `code` then, too. Nothing of it happens in a
    process that `launch` has not started: it may live on.
    """
    folder = os.environ.get(_FOLDER)
    if folder is not None:
        with suppress(OSError):  # a full disk hides no error, and spoils no run that is done
            Path(folder, f"code_{os.environ['LOCAL_RANK']}").write_text(str(code))
        faulthandler.dump_traceback_later(END_S, exit=True)


def worker_environments(
    config: RunConfig, rendezvous: Rendezvous, machine: MachineFacts, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each local rank; thread and connection counts yield to the user's own."""
    num_local = config.parallel.nproc_per_node
    share_of_cores = str(max(1, machine.cpu_cores // num_local))
    defaults = {
        "OMP_NUM_THREADS": share_of_cores,
        "RAYON_NUM_THREADS": share_of_cores,
        "TOKENIZERS_PARALLELISM": "true",  # what a worker forks does not tokenize: threads do not survive
        **allocator_environment(environ),
    }
    if config.parallel.tensor_model_parallel_size > 1 and machine.compute_capability < BLACKWELL:
        # megatron-core's tensor-parallel layers rely on one queue for the order of their kernels; without
        # them it would keep gradient reductions from running beside backward. Blackwell needs no such help
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
    """What torch's CUDA allocator is told where a user tells it nothing, before a process imports torch.

    Segments that grow leave hardly any fragments, so that what is free can be filled with optimizer states.
    torch reads the second name too and does not agree with itself on which comes first
    (c10/core/AllocatorConfig.h, c10/cuda/CUDAAllocatorConfig.h of 2.13): with either given, nothing is added.
    """
    name = "PYTORCH_ALLOC_CONF"
    is_told = any(known in environ for known in (name, "PYTORCH_CUDA_ALLOC_CONF"))
    return {} if is_told else {name: "expandable_segments:True"}


def _threads(count: str, config: RunConfig, machine: MachineFacts) -> str:
    """One line about the threads of each worker, and whose choice they are."""
    origin = "the environment's OMP_NUM_THREADS," if "OMP_NUM_THREADS" in os.environ else "its share"
    workers, cores = config.parallel.nproc_per_node, machine.cpu_cores
    return f"{count} thread(s) for each of {workers} process(es): {origin} of {cores} usable core(s)"


def _free_port(address: str) -> int:
    """A free port below those that the kernel gives to whoever asks for any: rank 0 listens seconds later."""
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
    """The worker processes of this machine. Signals are only recorded when they come; `wait` acts on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._signals: list[tuple[int, float]] = []
        """Number and time of each signal."""
        self._workers: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        """Local rank to exit code, of those that have ended."""
        self._failures: dict[int, int] = {}
        """Local rank to return code, in the order of failing."""
        self._failed_at = 0.0
        self._forwarded = False
        self._terminated = False
        self._given_up = False

    def note_signal(self, number: int) -> None:
        """Remember a signal; safe inside a signal handler."""
        self._signals.append((number, time.monotonic()))

    def start(
        self, command: Sequence[str], environment: dict[str, str], cores: set[int] | None = None
    ) -> None:
        """Start the next local rank. Rank 0 has the terminal; of the others only stderr is shown.

        A session of its own keeps Ctrl-C from reaching a worker twice: from the terminal and from us.

        Args:
            cores: where it and its threads may run; None: wherever the launcher may.
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
        """Wait for the last worker; the exit code of them all, as `launch` explains it."""
        while self._note_ends():
            self._obey_signals()
            self._end_followers()
            time.sleep(POLL_S)
        return self._exit_code()

    def kill(self) -> None:
        """End whatever still runs, at once; nothing to do after `wait`."""
        self._send(signal.SIGKILL)
        for worker in self._workers:
            worker.wait()

    def _note_ends(self) -> bool:
        """Record workers that failed since the last look; whether any still runs."""
        for local_rank in range(len(self._workers)):
            code = self._code_of(local_rank)
            if code is None or code in ORDERLY_CODES or local_rank in self._failures:
                continue
            if not self._failures:
                self._failed_at = time.monotonic()
                obeyed = -code in (number for number, _ in self._signals)  # before it could save anything
                if not (obeyed or self._given_up):
                    _logger.error("local rank %d ended: %s", local_rank, _describe(code))
            self._failures[local_rank] = code
        return len(self._codes) < len(self._workers)

    def _code_of(self, local_rank: int) -> int | None:
        """The exit code of a worker: the one that it announced, where it did; None while it runs.

        One that has announced a failure and does not end has failed all the same: others wait for it.
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
                "local rank %d was done and did not end by itself: %s", local_rank, _describe(code)
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
                "%s: waiting for the workers to save; again after %.0f s ends them without",
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
        code = next((code for code in causes if code in PATCH_ERROR_CODES), causes[0] if causes else 5)
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
    """In the new process: have the kernel kill it when the launcher dies in whatever way; bind it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the kernel was asked
        os._exit(1)
    if cores:
        os.sched_setaffinity(0, cores)


@contextmanager
def _telling(listener: Callable[[int], None]) -> Iterator[None]:
    """Tell `listener` of SIGINT and SIGTERM instead of obeying them."""
    handled = (signal.SIGINT, signal.SIGTERM)
    before = {signum: signal.signal(signum, lambda number, _: listener(number)) for signum in handled}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
