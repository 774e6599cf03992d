"""The launcher of a machine: gives the workers their environment and starts them by torch's elastic agent.

Needs neither torch nor megatron-core before it starts the workers, so that a refused run ends at once.
Workers read only RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so they also run under the
user's own torchrun or srun.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from patch.checks.layout import usable_sizes
from patch.config import RunConfig
from patch.config.backends import can_send_in_pieces
from patch.device import MachineFacts
from patch.distributed.worker_process import CORES, DETERMINISTIC, LAUNCHER
from patch.errors import ConfigError
from patch.logger import get_logger
from patch.preflight.cluster import Rendezvous
from patch.storage.lock import refuse_held_run

_logger = get_logger(__name__)

_NODES = Path("/sys/devices/system/node")
"""The folder where Linux describes the NUMA nodes."""


def launch(
    script: Path, flags: list[str], config: RunConfig, rendezvous: Rendezvous, machine: MachineFacts
) -> int:
    """Run `script` with `flags` once per local rank and wait for all of them.

    The signals to stop (see `agent`) are forwarded once. The workers then have all the time they need to save
    a checkpoint, unless Ctrl-C comes INSISTENCE_S or more after the first signal. If a worker fails, the
    others are ended, and all start again up to --max-restarts times, unless that would repeat the failure.

    Args:
        script: the Python file that each worker runs; it calls `worker_process.begin` first.
        flags: its command line.
        config: the run that the flags describe.
        rendezvous: where the processes of all machines meet.
        machine: this machine, whose cores the workers share.
    Returns:
        0 if all workers succeeded; the code of a PatchError (2 to 5) that any worker ended with; 130 or 143
        after a signal; otherwise the code of the worker that failed. That is 5 if a signal killed it that
        this launcher did not forward (memory ran out, NCCL's watchdog, a crash); and if all that is known on
        this machine is that a rank of another machine ended.

    Raises:
        ConfigError: another run writes to this run's folder (with several machines, rank 0 checks this), or
            --log-dir cannot be created.
        TrainingError: the other machines cannot be met.
    """
    parallel = config.parallel
    if parallel.nnodes == 1:
        refuse_held_run(Path(config.checkpoint.output_path))
    from torch.distributed.elastic.multiprocessing import Std

    from patch.distributed.agent import WorkerFiles, run_workers
    from patch.distributed.rendezvous import Meeting

    own = {LAUNCHER: str(os.getpid()), "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}  # we handle them ourselves
    own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"  # otherwise workers would not meet in our store
    os.environ.update(worker_environment(config, machine, os.environ) | own)
    if cores := cores_of_workers(machine, parallel.nproc_per_node):
        os.environ[CORES] = " ".join(",".join(map(str, each)) for each in cores)
    redirects = {local: Std.OUT if local else Std.NONE for local in range(parallel.nproc_per_node)}
    with tempfile.TemporaryDirectory(prefix="patch-launch-") as folder:
        try:
            log_dir, tee = (parallel.log_dir, Std.ERR) if parallel.log_dir else (folder, Std.NONE)
            files = WorkerFiles(log_dir, redirects, tee)
            files.folder = folder
            tempfile.TemporaryFile(dir=log_dir).close()
        except OSError as error:
            raise ConfigError(f"{parallel.log_dir} cannot be created: {error}", field="log_dir") from error
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        meeting = Meeting.join(rendezvous, usable_sizes(config, machine), timeout)
        command = [sys.executable, str(script), *flags]
        code, replies = run_workers(command, parallel.nproc_per_node, parallel.max_restarts, meeting, files)
    if lacking := {reply.lacks for reply in replies} - {""}:
        from patch.plan.cures import advice  # a run with enough memory does not need it

        _logger.error("to need less memory: %s", advice(config, machine, on_device="device" in lacking))
    return code


def worker_environment(
    config: RunConfig, machine: MachineFacts, environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the workers. Numbers of threads and connections that a user has set are kept.

    Args:
        config: the run.
        machine: this machine, whose cores the workers share.
        environ: the environment of the launcher.
    """
    share_of_cores = str(max(1, machine.cpu_cores // config.parallel.nproc_per_node))
    defaults = {
        "OMP_NUM_THREADS": share_of_cores,
        "RAYON_NUM_THREADS": share_of_cores,
        # Safe, because no forked child of a worker tokenizes: its threads would not survive the fork.
        "TOKENIZERS_PARALLELISM": "true",
        **allocator_environment(environ),
    }
    in_pieces = config.parallel.tp_comm_overlap and can_send_in_pieces(config)
    is_tensor_parallel = config.parallel.tensor_model_parallel_size > 1
    if is_tensor_parallel and not in_pieces and machine.compute_capability < (10, 0):
        # megatron-core's tensor-parallel layers rely on a single queue for the order of their kernels. At
        # TP=1 it would keep gradient reductions from overlapping with backward, and in pieces a message that
        # waits for the one before would hold products up. Blackwell does not need it (Megatron-LM's
        # megatron/training/arguments.py, validate_args).
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if config.training.deterministic_mode:
        defaults |= DETERMINISTIC
    return {**defaults, **environ}


def allocator_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The setting of torch's CUDA allocator, if the user has none; it must be set before torch is imported.

    Expandable segments leave hardly any fragments, so that optimizer states can fill the free memory.
    torch reads both names, and its sources differ in which of them wins (c10/core/AllocatorConfig.h,
    c10/cuda/CUDAAllocatorConfig.h of 2.13): if either is set, nothing is added.
    """
    if "PYTORCH_ALLOC_CONF" in environ or "PYTORCH_CUDA_ALLOC_CONF" in environ:
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def cores_of_workers(machine: MachineFacts, num_local: int, nodes: Path = _NODES) -> list[set[int]]:
    """The cores of each local rank: those of its GPU's NUMA node.

    A worker that is bound to a node gets its host memory there, by first touch: the part of the optimizer
    that runs on the host, and copies to the node's GPU, then read memory of their own node.

    No worker gets cores that this process may not use, or fewer cores than it has threads: with one GPU on
    a machine with two nodes, the worker uses both nodes.

    Args:
        machine: the machine, whose GPU i belongs to local rank i.
        num_local: the number of local ranks.
        nodes: the folder where Linux describes the NUMA nodes.
    Returns:
        [] if no worker should be bound: there is no GPU, one node, or the nodes do not suit the workers.
    """
    own, threads = os.sched_getaffinity(0), max(1, machine.cpu_cores // num_local)
    files = [nodes / f"node{node}" / "cpulist" for node in machine.gpu_nodes[:num_local]]
    shares = [own & _numbers(file.read_text()) if file.exists() else own for file in files]
    # All workers of a node share its cores; a share of all cores would bind to nothing.
    fits = all(share < own and len(share) // shares.count(share) >= threads for share in shares)
    return shares if fits else []


def _numbers(text: str) -> set[int]:
    """The numbers in a list as Linux writes it, such as 0-3,8,10-11."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
