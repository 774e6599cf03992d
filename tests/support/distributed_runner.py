"""Run a test's body on N processes: gloo, file store, one thread each, hard time limit.

    def run_sum(rank, world_size, value): ...          # module level, so that a child can import it
    def test_sum(): run_distributed(run_sum, 2, 3.0)

The parent raises the first child's traceback. If a child fails or the time is up, all children are killed.

Every body gets new processes. They are forked, not from pytest but from a server that is spawned once. The
server has imported what bodies need (`distributed_imports`), has one thread and does nothing else. So a child
is as clean as a spawned one, but costs a fork instead of 5 CPU seconds of imports.
"""

import functools
import itertools
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any
from unittest import mock

TIMEOUT_S = 240
_FOLDER = "DISTRIBUTED_RUNNER_FOLDER"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""One thread, and no GPU: a forked process could not use a GPU that its server has looked for."""
_jobs = itertools.count()


@functools.cache
def _forking() -> Any:
    """Return the multiprocessing context of the fork server, which starts here with one thread."""
    context = multiprocessing.get_context("forkserver")
    # torch compiles a function of megatron-core's experts; importing its compiler takes a second per process.
    context.set_forkserver_preload(["distributed_imports", "torch._inductor.compile_fx"])
    own = {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    with mock.patch.dict(os.environ, own):
        forkserver.ensure_running()
    return context


def _child(
    rank: int,
    world_size: int,
    folder: str,
    environ: dict,
    body: Callable[..., Any],
    args: tuple,
    results: Any,
) -> None:
    import torch
    import torch.distributed

    os.environ.clear()  # of the server, whose environment is that of its start
    os.environ.update(environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(_ENVIRONMENT)
    os.environ[_FOLDER] = folder
    torch.set_num_threads(1)
    try:
        rejoin()
        results.put((rank, None, body(rank, world_size, *args)))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the parent re-raises it, including SystemExit
        results.put((rank, traceback.format_exc(), None))


def rejoin() -> None:
    """Join the body's next job, after the body has left its job itself."""
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ[_FOLDER]}/store-{next(_jobs)}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def leave() -> None:
    """Leave the job on all ranks of a body; `rejoin` follows.

    All ranks must have joined: a rank that leaves at once breaks connections that another rank still makes.
    """
    import torch.distributed

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def new_job() -> None:
    """Leave every process group on all ranks of a body, and go on in a new job without groups.

    For bodies that build several layouts: their groups keep 100 gloo threads until they are destroyed.
    """
    import torch.distributed
    from megatron.core import parallel_state

    torch.distributed.barrier()  # no rank leaves while another one expects its data
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    rejoin()


def run_distributed(
    body: Callable[..., Any], world_size: int, *args: Any, timeout_s: int = TIMEOUT_S
) -> list:
    """Call `body(rank, world_size, *args)` in `world_size` processes; return their results by rank.

    Raises:
        AssertionError: with a child's traceback, or naming the ranks that did not finish in time.
    """
    context = _forking()
    results = context.Queue()
    outputs: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(
                target=_child,
                args=(rank, world_size, folder, dict(os.environ), body, args, results),
            )
            for rank in range(world_size)
        ]
        for child in children:
            child.start()
        deadline = time.monotonic() + timeout_s
        try:
            while len(outputs) < world_size:
                rank, error, value = _next_result(results, children, deadline, outputs)
                if error:
                    raise AssertionError(f"rank {rank} of {world_size} failed:\n{error}")
                outputs[rank] = value
            for child in children:
                child.join(max(0.1, deadline - time.monotonic()))
        finally:
            for child in children:
                child.kill()
    return [outputs[rank] for rank in range(world_size)]


def _next_result(results: Any, children: list, deadline: float, outputs: dict[int, Any]) -> tuple:
    while True:
        try:
            return results.get(timeout=0.5)
        except queue.Empty:
            missing = [rank for rank in range(len(children)) if rank not in outputs]
            dead = [rank for rank in missing if children[rank].exitcode not in (None, 0)]
            if dead:
                raise AssertionError(f"rank {dead[0]} died with {children[dead[0]].exitcode}") from None
            if time.monotonic() > deadline:
                raise AssertionError(f"ranks {missing} of {len(children)} did not finish in time") from None
