"""Modules of Triton kernels, loaded for Triton's interpreter, or compiled for any GPU."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def interpreted(name: str, convert: Callable[[Callable], Callable] | None = None) -> Iterator[ModuleType]:
    """Yield a copy of a module whose kernels run in the interpreter, which Triton chooses at import.

    Args:
        convert: replaces the interpreter's conversion of floats, which does not round like a GPU.
    """
    from triton import language  # not in each torch build
    from triton.runtime import interpreter

    spec = find_spec(name)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setitem(sys.modules, name, module)
        for function in ("max", "sum"):  # written in Triton itself, and imported for a GPU
            patch.setattr(language, function, interpreter.InterpretedFunction(getattr(language, function).fn))
        add_methods = interpreter._patch_lang_tensor

        def add_with_index(tensor: Any, scope: Any) -> None:
            add_methods(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda it: it.handle.data.item())  # NumPy: no int of [1]

        patch.setattr(interpreter, "_patch_lang_tensor", add_with_index)
        if convert is not None:
            patch.setattr(interpreter, "_convert_float", convert(interpreter._convert_float))
        spec.loader.exec_module(module)
        yield module


def give_writer(weight: torch.Tensor, total: torch.Tensor) -> None:
    """Let a weight's gradient be added to a tensor. The writer overwrites the first values."""
    places = iter((True, False))
    weight.main_grad_writer = SimpleNamespace(  # type: ignore[attr-defined]
        open=lambda: (total, next(places)), dummy_wgrad=lambda: torch.zeros_like(weight)
    )


def output_of_compiler(program: str) -> str:
    """Return the output of a Python program that compiles kernels, in a process without the interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=Path(__file__).parents[2], env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def rounding(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return a conversion of floats that rounds like a GPU. The interpreter's own truncates to bf16."""
    import triton.language as tl  # not in each torch build

    def converted(numbers: np.ndarray, given: Any, wanted: Any, mode: object) -> np.ndarray:
        if (given, wanted) != (tl.float32, tl.bfloat16):
            return convert(numbers, given, wanted, mode)
        return torch.from_numpy(numbers.copy()).to(torch.bfloat16).view(torch.uint16).numpy()

    return converted
