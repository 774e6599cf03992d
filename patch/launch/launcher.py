"""The launcher of a machine: sets the workers' environment and starts them by torch's elastic agent.

The launcher needs neither torch nor megatron-core before it starts the workers, so that a refused run ends at
once. Workers read only RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so they also run under the
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
from patch.config import RunConfig, to_yaml
from patch.config.choices import ZeroStage
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.features.backends import can_overlap_tp_comm
from patch.features.table import HOST_ACTIVATIONS, HOST_STATES, HOST_WEIGHTS
from patch.launch import RESOLVED
from patch.launch.worker_process import CORES, DETERMINISTIC, LAUNCHER
from patch.logger import get_logger
from patch.preflight.cluster import Rendezvous
from patch.storage.lock import refuse_held_run

_logger = get_logger(__name__)


def launch(
    script: Path, config: RunConfig, rendezvous: Rendezvous, machine: MachineFacts, *arguments: str
) -> int:
    """Run `script RESOLVED FILE arguments` once per local rank and wait for all workers.

    The first stop signal (see `agent`) is forwarded. The workers then have unlimited time to save a
    checkpoint, unless Ctrl-C comes FORCE_KILL_AFTER_S or more after the first signal. If a worker fails, the
    other workers are killed, and all restart up to --max-restarts times, unless that would repeat the
    failure.

    Args:
        script: the Python file that each worker runs; it must call `worker_process.begin` first.
        config: the resolved run, which the workers read from a private FILE and do not check again.
        rendezvous: the address where the launchers of all machines meet.
        machine: this machine, whose cores the workers share.
    Returns:
        0 if all workers succeeded; the code of a worker's PatchError (2 to 5); 130 or 143 after a signal;
        otherwise the code of the failed worker. The code is 5 if a signal that this launcher did not forward
        killed the worker: out of memory, NCCL's watchdog, a crash. It is also 5 if this machine only knows
        that another rank ended.
    Raises:
        ConfigError: another run writes to this run's folder (with several machines, rank 0 checks this), or
            --log-dir cannot be created.
        TrainingError: the launchers of the other machines cannot be reached.
    """
    parallel = config.parallel
    if parallel.nnodes == 1:
        refuse_held_run(Path(config.checkpoint.output_path))
    from torch.distributed.elastic.multiprocessing import Std

    from patch.launch.agent import WorkerFiles, run_workers
    from patch.launch.rendezvous import RendezvousHandler

    own = {LAUNCHER: str(os.getpid()), "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}  # our agent handles signals
    own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0"  # the workers must use the launcher's store
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
        meeting = RendezvousHandler.join(rendezvous, usable_sizes(config, machine), timeout)
        file = Path(folder) / "run.yaml"
        file.write_text(to_yaml(config), encoding="utf-8")
        command = [sys.executable, str(script), RESOLVED, str(file), *arguments]
        code, worker_exits = run_workers(
            command, parallel.nproc_per_node, parallel.max_restarts, meeting, files
        )
    if lacking := {each.lacks for each in worker_exits} - {""}:
        from patch.plan.suggest import advice  # a run with enough memory does not need it

        _logger.error("to need less memory: %s", advice(config, machine, on_device="device" in lacking))
    return code


def worker_environment(
    config: RunConfig, machine: MachineFacts, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the workers; variables in the launcher's `environ` take precedence."""
    share_of_cores = str(max(1, machine.cpu_cores // config.parallel.nproc_per_node))
    defaults = {
        "OMP_NUM_THREADS": share_of_cores,
        "RAYON_NUM_THREADS": share_of_cores,
        # Safe, because no forked child of a worker tokenizes: the threads would not survive the fork.
        "TOKENIZERS_PARALLELISM": "true",
        **allocator_environment(environ),
    }
    in_pieces = config.parallel.tp_comm_overlap and can_overlap_tp_comm(config)
    # In a single queue, matrix products would wait behind copies and gathers.
    copies = any(feature.is_on(config) for feature in (HOST_STATES, HOST_WEIGHTS, HOST_ACTIVATIONS))
    may_wait = copies or config.sharding in ("auto", ZeroStage.PARAMETERS)
    is_tensor_parallel = config.parallel.tensor_model_parallel_size > 1
    if is_tensor_parallel and not in_pieces and not may_wait and machine.compute_capability < (10, 0):
        # A single queue starts a TP message before the matrix product that could hide it. Without it NCCL's
        # high priority does the same (TORCH_NCCL_HIGH_PRIORITY). At TP=1 it would keep gradient reductions
        # from overlapping with backward. With TP messages in pieces, a message that waits for the previous
        # one would delay matrix products. Blackwell does not need it. Source: Megatron-LM's
        # megatron/training/arguments.py, validate_args, which refuses it with FSDP.
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if config.training.deterministic_mode:
        defaults |= DETERMINISTIC
    return {**defaults, **environ}


def allocator_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the setting of torch's CUDA allocator, {} if the user has set it; set it before importing torch.

    Expandable segments cause little fragmentation, so that optimizer states can fill the free memory.
    torch reads both names, and its sources differ in which name wins (c10/core/AllocatorConfig.h,
    c10/cuda/CUDAAllocatorConfig.h of 2.13). So if either is set, nothing is added.
    """
    if "PYTORCH_ALLOC_CONF" in environ or "PYTORCH_CUDA_ALLOC_CONF" in environ:
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def cores_of_workers(machine: MachineFacts, num_local: int) -> list[set[int]]:
    """Return the cores of each local rank: the cores of its GPU's NUMA node.

    First touch places the host memory of a bound worker on its node. So host updates and copies to the GPU
    read local memory. No worker gets cores outside this process's affinity, or fewer cores than it has
    threads: with one GPU on a machine with two nodes, the worker uses both nodes.

    Args:
        machine: the machine; its GPU i belongs to local rank i.
        num_local: the number of local ranks.
    Returns:
        a set per local rank, or [] if no worker should be bound: there is no GPU, only one node, or the nodes
        do not suit the workers.
    """
    own, threads = os.sched_getaffinity(0), max(1, machine.cpu_cores // num_local)
    shares = [own & cores or own for cores in machine.gpu_cores[:num_local]]
    # All workers of a node share its cores; a share of all cores would bind to nothing.
    fits = all(share < own and len(share) // shares.count(share) >= threads for share in shares)
    return shares if fits else []
