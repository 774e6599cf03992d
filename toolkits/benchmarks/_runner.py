"""Runs a function of a benchmark in processes of its own: the ranks of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from patch import compat
from patch.device import DeviceContext, MachineFacts
from patch.distributed.groups import shutdown
from toolkits.benchmarks._report import NotRunError
from toolkits.benchmarks._rig import INTERFACE, Cables

CPU = DeviceContext(torch.device("cpu"), "gloo")


def needs_gpu() -> MachineFacts:
    """This machine.

    Raises:
        NotRunError: it has no GPU.
    """
    machine = MachineFacts.probe()
    if not machine.cuda_devices:
        raise NotRunError("needs a GPU, found none")
    return machine


def run_ranks(
    measure: Callable[..., Any],
    num_ranks: int,
    timeout_s: float,
    *,
    cables: Cables | None = None,
    on_gpu: bool = False,
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    **fields: Any,
) -> Any:
    """Run the ranks of a benchmark to their end, each in a process of its own; what rank 0 measured.

    Args:
        measure: a function of a module, called with the rank's device and `fields`; its result is JSON.
        num_ranks: how many processes.
        timeout_s: seconds after which all are killed.
        cables: each rank runs at the end of one, on one core; None: anywhere.
        on_gpu: the one rank has a GPU.
        threads: of each process; 0: torch's own choice.
        environment: of the processes; None: this one's.
        fields: what JSON can hold.
    Raises:
        RuntimeError: a rank failed, or not all ended in time; the message of a rank is on stderr.
    """
    spec = sys.modules[measure.__module__].__spec__
    assert spec is not None, "a benchmark runs as a module"
    program = [sys.executable, "-W", "ignore", "-m", "toolkits.benchmarks._runner", spec.name]
    own = dict(environment or os.environ)
    if cables is not None:
        own |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    ranks: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as folder:
        core = cables is not None
        job = json.dumps([measure.__name__, folder, num_ranks, on_gpu, core, threads, fields])
        try:
            for rank in range(num_ranks):
                command = [*program, str(rank), job]
                ranks.append(subprocess.Popen(cables.inside(rank, command) if cables else command, env=own))
            deadline = time.monotonic() + timeout_s
            codes: list[int | None] = [None]
            while None in codes and not any(codes) and time.monotonic() < deadline:
                time.sleep(0.2)
                codes = [process.poll() for process in ranks]
            if any(code != 0 for code in codes):
                raise RuntimeError(f"the ranks ended with {codes}; None: not within {timeout_s:.0f} s")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return json.loads((Path(folder) / "output.json").read_text(encoding="utf-8"))


def try_alone(measure: Callable[..., Any], timeout_s: float, **options: Any) -> Any:
    """`run_ranks` of one rank; None, with a line on stderr, if it failed."""
    try:
        return run_ranks(measure, 1, timeout_s, **options)
    except RuntimeError as error:
        print(f"failed: {measure.__name__} {options}: {error}", file=sys.stderr)
        return None


@contextmanager
def job(
    context: DeviceContext,
    rank: int = 0,
    world_size: int = 1,
    store: dist.Store | None = None,
    threads: int = 1,
) -> Iterator[None]:
    """Within it this process is a rank of a job.

    Args:
        context: the device of the rank.
        rank: its number.
        world_size: the number of ranks.
        store: where the ranks find each other; None: there is one rank.
        threads: of torch; 0: its own choice.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    compat.apply(cuda=context.is_cuda)
    dist.init_process_group(
        context.backend, store=store or dist.HashStore(), rank=rank, world_size=world_size
    )
    yield
    dist.barrier()  # before anybody leaves
    shutdown()
    torch.set_num_threads(before)


def _run_as_rank(module: str, rank: int, work: str) -> None:
    function, folder, world_size, on_gpu, on_one_core, threads, fields = json.loads(work)
    if on_one_core:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    measure = getattr(import_module(module), function)
    context = DeviceContext.select(rank) if on_gpu else CPU
    with job(context, rank, world_size, dist.FileStore(f"{folder}/store", world_size), threads):
        measured = measure(context, **fields)
    if rank == 0:
        Path(folder, "output.json").write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    _run_as_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3])
