"""Halves the time that a process needs to import torch, megatron-core and this project, and to end.

- megatron/core/jit.py:21 decorates about forty functions with torch.compile; most of them are never called.
  The decorator alone loads TorchDynamo and Inductor: 740 modules. Here a function is compiled at its first
  call. Delete when megatron-core or torch defers that. (Transformer Engine, where it is installed, imports
  TorchDynamo itself.)
- transformers 5 (generation/continuous_batching/cache.py:392), which every tokenizer and configuration loads,
  decorates a function with torch.compiler.disable, which loads TorchDynamo too: half a CPU second. It is
  deferred likewise. Delete when transformers or torch defers that.
- Imports create half a million objects that are never freed. Python's garbage collector walks over them
  during the imports, at every full collection in training, and when the process ends.

Measured on two CPU cores (torch 2.13.0), import and end of a worker: 6.6 CPU seconds, 3.2 with both.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def quick_start() -> Iterator[None]:
    """A context for the first import of megatron-core in a process, at the top level of a program."""
    compile_now, disable_now = torch.compile, torch.compiler.disable

    def compile_later(function: Callable | None = None, **options: Any) -> Any:
        if function is None or options:
            return compile_now(function, **options)
        return _compiled_at_first_call(function, compile_now)

    def disable_later(function: Callable | None = None, *args: Any, **options: Any) -> Any:
        if function is None or args or options:
            return disable_now(function, *args, **options)
        return _compiled_at_first_call(function, disable_now)

    gc.disable()
    vars(torch).update(compile=compile_later)
    vars(torch.compiler).update(disable=disable_later)
    try:
        yield
    finally:
        vars(torch).update(compile=compile_now)
        vars(torch.compiler).update(disable=disable_now)
        gc.freeze()
        gc.enable()


def _compiled_at_first_call(function: Callable, compile_now: Callable) -> Callable:
    """A function that compiles `function`, or excepts it from that, when it is first called."""
    compiled = functools.cache(lambda: compile_now(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
