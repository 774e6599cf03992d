"""Real SLURM cluster on this machine: munged, slurmctld and one slurmd per node, all in one folder.

It needs root and Debian's packages slurmctld, slurmd, slurm-client and munge. It uses nothing outside the
folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PATIENCE_S = 300.0
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A requeued job waits until its credential has expired, usually two minutes; 5 s is the least.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=120
ReturnToService=2
MpiDefault=none
GresTypes=gpu
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Gres=gpu:2\n"
PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"


def why_not() -> str:
    """Return why no cluster can be started here, or ""."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "SLURM's daemons need root"


class Cluster:
    """A running cluster. Its daemons write to `folder` only."""

    def __init__(self, folder: Path) -> None:
        self._configuration = folder / "slurm.conf"
        self._is_running = True

    def await_true(self, condition: Callable[[], object], what: Callable[[], object]) -> None:
        """Wait until a condition holds. Fail after a time limit, or if the cluster has ended.

        Args:
            condition: called four times per second.
            what: describes the state if the condition is not reached.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self._is_running and time.monotonic() < deadline, what()
            time.sleep(0.25)

    def call(self, *arguments: object, **variables: object) -> str:
        own = {name: str(value) for name, value in variables.items()}
        own |= {"PATH": _path(), "SLURM_CONF": str(self._configuration)}
        found = subprocess.run(
            [str(each) for each in arguments],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert found.returncode == 0, (arguments, found.stdout, found.stderr)
        return found.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the controller's facts of a job: JobState, ExitCode, Restarts and more."""
        words = self.call("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def processes(self, node: str, *, workers: bool = False) -> list[psutil.Process]:
        """Return the processes of jobs on a node, or only the workers of runs."""
        found = []
        for process, environment in self._processes():
            if environment.get("SLURMD_NODENAME") == node and (not workers or "LOCAL_RANK" in environment):
                found.append(process)
        return found

    def lose(self, node: str) -> None:
        """End a node like a power failure: kill its daemon and all its jobs before they can report it."""
        daemon = psutil.Process(int(self._configuration.with_name(f"slurmd-{node}.pid").read_text()))
        running = self.processes(node)
        parents = {parent for process in running if (parent := process.parent()) is not None}
        daemons = [daemon, *(parent for parent in parents if parent.name() == "slurmstepd")]
        for process in daemons:  # daemons first, so that none sees its jobs end
            process.suspend()
        # Children first: if srun were killed first, its child would end the step.
        running.sort(key=lambda process: (process.create_time(), process.pid), reverse=True)
        for process in (*running, *daemons):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def end(self) -> None:
        """End the daemons and all processes that they have started."""
        self._is_running = False
        while ours := [process for process, _ in self._processes()]:
            for process in {each for one in ours for each in (one, *_children(one))}:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(ours, timeout=5)

    def _processes(self) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environment = process.environ()
                # slurmstepd's process title has overwritten its environment.
                is_ours = environment.get("SLURM_CONF") == str(self._configuration)
                is_ours = is_ours or process.cwd() == str(self._configuration.parent)
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield process, environment


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"


@contextmanager
def running_cluster(nodes: list[str]) -> Iterator[Cluster]:
    """Yield a cluster of these nodes, each with two CPUs and two simulated GPUs."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name,
        ExitStack() as stack,
    ):
        folder, host = Path(name), socket.gethostname().partition(".")[0]
        folder.chmod(0o755)  # munge's clients must reach the socket
        ports = _free_ports(1 + len(nodes))
        lines = CONFIGURATION.format(folder=folder, host=host, ports=ports)
        for node, port in zip(nodes, ports[1:], strict=True):
            lines += NODE.format(name=node, host=host, port=port)
        (folder / "slurm.conf").write_text(lines + PARTITION)
        (folder / "gres.conf").write_text(GPUS)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        cluster = Cluster(folder)
        stack.callback(cluster.end)
        files = {"key-file": key.name, "socket": "munge.socket", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        cluster.call("munged", *(f"--{flag}={folder / file}" for flag, file in files.items()))
        cluster.call("slurmctld", "-c")
        for node in nodes:
            cluster.call("slurmd", "-N", node)
        states = ["idle"] * len(nodes)
        cluster.await_true(
            lambda: cluster.call("sinfo", "-hN", "-o", "%t").split() == states, lambda: cluster.call("sinfo")
        )
        yield cluster


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
