"""Number of processes and their rendezvous, from ENV, the scheduler's variables and the machine.

Under torchrun (LOCAL_RANK is set) torchrun's variables decide. Otherwise `dlc` and `slurm` read the variables
of their scheduler. `dsw` (the default without ENV) means this machine alone, or several machines with
--nnodes, NODE_RANK, MASTER_ADDR and MASTER_PORT. If srun starts one task per process, `slurm_task` derives
torchrun's variables from SLURM's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.text import to_int


class Rendezvous(NamedTuple):
    """Where the workers of a job connect to each other."""

    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """0: the launcher picks a free port."""
    num_spares: int = 0
    """Machines that do not train; see `set_spares_aside`."""


class Cluster(NamedTuple):
    """The job as the environment describes it."""

    nnodes: int = 1
    nproc_per_node: int | None = None
    """None if the environment does not say; then `default_nproc_per_node` decides."""
    rendezvous: Rendezvous = Rendezvous()


def _text(environ: Mapping[str, str], name: str, why: str) -> str:
    if not environ.get(name):
        raise ConfigError(f"environment variable {name} is not set, expected {why}")
    return environ[name]


def _number(environ: Mapping[str, str], name: str, why: str, least: int = 0) -> int:
    text = _text(environ, name, why)
    number = to_int(text)
    if number is None or number < least:
        raise ConfigError(f"environment variable {name}: got {text!r}, expected {why} (at least {least})")
    return number


def _optional(environ: Mapping[str, str], name: str, why: str) -> int | None:
    return _number(environ, name, why, least=1) if environ.get(name) else None


def _torchrun(environ: Mapping[str, str]) -> Cluster:
    world = _number(environ, "WORLD_SIZE", "the number of processes, as torchrun sets it", least=1)
    local = _optional(environ, "LOCAL_WORLD_SIZE", "processes on this machine, as torchrun sets it") or world
    return Cluster(world // local, local)


def _dlc(environ: Mapping[str, str]) -> Cluster:
    nnodes = _number(environ, "WORLD_SIZE", "with ENV=dlc the number of machines", least=1)
    rendezvous = _rendezvous(environ, "RANK", "with ENV=dlc")
    gpus = _optional(environ, "KUBERNETES_CONTAINER_RESOURCE_GPU", "the GPUs of this machine")
    return Cluster(nnodes, gpus, rendezvous)


def _rendezvous(environ: Mapping[str, str], rank: str, when: str) -> Rendezvous:
    return Rendezvous(
        _number(environ, rank, f"{when} this machine's index"),
        _text(environ, "MASTER_ADDR", f"{when} the first machine's address"),
        _number(environ, "MASTER_PORT", f"{when} a free port of the first machine", least=1),
    )


def _first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: gpu03 for `gpu[03-05,9],x1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise ConfigError(f"environment variable SLURM_JOB_NODELIST: got {nodelist!r}, expected host names")
    return "".join(part or "" for part in match.groups())


def _slurm(environ: Mapping[str, str]) -> Cluster:
    nnodes = _slurm_nodes(environ)
    node_rank = _number(environ, "SLURM_NODEID", "with ENV=slurm this machine's index")
    gpus = _optional(environ, "SLURM_GPUS_ON_NODE", "the GPUs of this machine")
    return Cluster(nnodes, gpus, Rendezvous(node_rank, *_slurm_address(environ)))


def _slurm_nodes(environ: Mapping[str, str]) -> int:
    step = _optional(environ, "SLURM_STEP_NUM_NODES", "the machines of this job step")
    why = "with ENV=slurm the number of machines: start it with srun, or with sbatch and slurm.sh"
    return step or _number(environ, "SLURM_NNODES", why, least=1)


def _slurm_address(environ: Mapping[str, str]) -> tuple[str, int]:
    address = environ.get("MASTER_ADDR") or _first_host(
        _text(environ, "SLURM_JOB_NODELIST", "with ENV=slurm the names of the machines")
    )
    # Every machine must derive the same port without communication, so it comes from the job's number.
    port = _optional(environ, "MASTER_PORT", "a free port of the first machine")
    job = _number(environ, "SLURM_JOB_ID", "with ENV=slurm the job's number") if port is None else 0
    return address, port or 20000 + job % 10000


def slurm_task(env: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables of this task, if srun started one task for each process of the job.

    With one task per machine return {}: the task is the machine's launcher. Without ENV=slurm return {} too.

    Raises:
        ConfigError: the machines have different numbers of tasks, or a variable is missing.
    """
    if env != "slurm" or "LOCAL_RANK" in environ:
        return {}
    nnodes = _slurm_nodes(environ)
    tasks = _optional(environ, "SLURM_STEP_NUM_TASKS", "the tasks of this job step") or nnodes
    if tasks == nnodes:
        return {}
    local, local_rank = tasks // nnodes, _number(environ, "SLURM_LOCALID", "this task's index on its machine")
    if tasks % nnodes or local_rank >= local:
        raise ConfigError(
            f"SLURM started {tasks} tasks on {nnodes} machines, expected as many on each, one for each "
            "process: use srun --ntasks-per-node, or =1 for one launcher a machine"
        )
    gpus = _optional(environ, "SLURM_GPUS_ON_NODE", "the GPUs of this machine") or local
    if gpus < local:
        raise ConfigError(
            f"SLURM gives {gpus} GPUs to the {local} tasks of a machine, expected one for each task: use "
            f"--ntasks-per-node={gpus}, or --gpus-per-task=1"
        )
    # Not SLURM_PROCID: srun may distribute the tasks over the machines in turn.
    rank = _number(environ, "SLURM_NODEID", "with ENV=slurm this machine's index") * local + local_rank
    address, port = _slurm_address(environ)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


_READERS = {"dlc": _dlc, "slurm": _slurm}


def read_cluster(env: str, environ: Mapping[str, str], nnodes: int | None = None) -> Cluster:
    """Return the job as ENV (`dsw`, `dlc` or `slurm`) and the environment variables describe it.

    Args:
        nnodes: the value of --nnodes, which overrides the environment, or None if it was not given.

    Raises:
        ConfigError: a variable is missing or is not a number.
    """
    if "LOCAL_RANK" in environ:
        return _torchrun(environ)
    if env in _READERS:
        cluster = _READERS[env](environ)
    elif nnodes is not None and nnodes > 1:
        cluster = Cluster(nnodes, None, _rendezvous(environ, "NODE_RANK", f"with --nnodes {nnodes}"))
    else:
        cluster = Cluster()
    nproc_per_node = _optional(environ, "NPROC_PER_NODE", "processes on this machine")
    return cluster._replace(
        nnodes=nnodes or cluster.nnodes, nproc_per_node=nproc_per_node or cluster.nproc_per_node
    )


def default_nproc_per_node(cluster: Cluster, machine: MachineFacts, replica: int) -> int:
    """Return the processes on this machine: the environment's number, else one per GPU, else `replica`.

    Raises:
        ConfigError: there are several machines without GPUs; a replica may then span machines.
    """
    if cluster.nproc_per_node or machine.cuda_devices:
        return cluster.nproc_per_node or machine.cuda_devices
    if cluster.nnodes > 1:
        raise ConfigError(
            f"{cluster.nnodes} machines without GPUs: the processes on each are not known, "
            "set NPROC_PER_NODE or --nproc-per-node"
        )
    return replica
