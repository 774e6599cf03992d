"""Removes useless work of a process: at its start, at its end, and while it waits.

`quick_start` halves the time in which a process imports torch, megatron-core and this project, and ends.
Measured on two CPU cores (torch 2.13.0), import and end of a worker: 6.6 CPU seconds, 3.2 with it.

- megatron/core/jit.py:21 decorates about forty functions with torch.compile; most are never called. The
  decorator alone loads TorchDynamo and Inductor: 740 modules. Here a function is compiled at its first call.
  Delete when megatron-core or torch defers that. (Transformer Engine, if installed, imports TorchDynamo
  itself.)
- transformers 5 (generation/continuous_batching/cache.py:392), which every tokenizer and configuration loads,
  decorates a function with torch.compiler.disable. That loads TorchDynamo too: half a CPU second. It is
  deferred likewise. Delete when transformers or torch defers that.
- Imports create half a million objects that are never freed. Python's garbage collector visits them during
  the imports, at every full collection in training, and when the process ends.

`shared_devices` lets gloo process groups share one network device. torch/distributed/distributed_c10d.py:2169
(2.13) creates a device for each group and ignores `pg_options`. A device has a thread that wakes 100 times a
second, and megatron-core builds some 45 groups for each rank. Measured with four ranks on two CPU cores: 3.3
instead of 8.2 CPU seconds a rank for the same training. Delete when torch takes devices from `pg_options`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def quick_start() -> Iterator[None]:
    """Wrap the first import of megatron-core in a process, at the top level of a program."""
    compile_now, disable_now = torch.compile, torch.compiler.disable
    gc.disable()
    vars(torch).update(compile=_deferred(compile_now))
    vars(torch.compiler).update(disable=_deferred(disable_now))
    try:
        yield
    finally:
        vars(torch).update(compile=compile_now)
        vars(torch.compiler).update(disable=disable_now)
        gc.freeze()
        gc.enable()


def _deferred(decorate: Callable) -> Callable:
    """Defer a decorator without options, which compiles a function or disables that, to the first call."""

    def decorate_later(function: Callable | None = None, *options: Any, **named: Any) -> Any:
        if function is None or options or named:
            return decorate(function, *options, **named)
        decorated = functools.cache(lambda: decorate(function))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return decorated()(*args, **kwargs)

        return call

    return decorate_later


@contextmanager
def shared_devices() -> Iterator[None]:
    """Let new gloo groups in this context use the job's devices; no effect on a job without gloo."""
    if dist.get_backend() != dist.Backend.GLOO:
        yield
        return
    upstream: Any = distributed_c10d.ProcessGroupGloo  # torch has no annotations of private names
    job: Any = dist.group.WORLD
    devices = job._get_backend(torch.device("cpu")).options._devices

    class Sharing(upstream):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = upstream._Options()
            options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
            super().__init__(store, rank, size, options)

    vars(distributed_c10d).update(ProcessGroupGloo=Sharing)
    try:
        yield
    finally:
        vars(distributed_c10d).update(ProcessGroupGloo=upstream)
