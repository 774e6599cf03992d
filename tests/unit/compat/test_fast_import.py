"""A quick start loads no compiler, and what is deferred is compiled all the same."""

import gc
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import llama3_tokenizer
import torch

from patch.compat import quick_start

REPOSITORY = Path(__file__).parents[3]
COMPILER = set() if find_spec("transformer_engine") else {"torch._dynamo", "torch._inductor.compile_fx"}
"""Transformer Engine, which upstream imports where it is, imports TorchDynamo itself (pytorch/jit.py:51)."""


def test_a_worker_imports_no_compiler_and_leaves_its_imports_to_no_collection(tmp_path: Path) -> None:
    """Also not with its tokenizer."""
    llama3_tokenizer.tiny_tokenizer().save_pretrained(tmp_path)
    script = (
        "import gc, sys\nfrom patch.compat import quick_start\n"
        "with quick_start():\n    import patch.training\n"
        f"from patch.data.tokenizer import load_tokenizer\nload_tokenizer({str(tmp_path)!r})\n"
        f"print(*({COMPILER} & sys.modules.keys()), gc.get_freeze_count() > 100_000, gc.isenabled())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_decorated_function_is_compiled_when_it_is_called() -> None:
    compiling: list[bool] = []
    traces = partial(torch.compile, backend="eager")  # needs no C++ compiler

    def double(x: torch.Tensor) -> torch.Tensor:
        """Twice as much."""
        compiling.append(torch.compiler.is_compiling())
        return 2 * x

    with mock.patch.object(torch, "compile", traces):
        with quick_start():
            deferred = torch.compile(double)
            at_once = torch.compile(double, dynamic=True)
        gc.unfreeze()
        assert torch.compile is traces
    assert torch.equal(deferred(torch.ones(2)), torch.full((2,), 2.0))
    assert compiling == [True]
    assert deferred.__doc__ == "Twice as much." and not hasattr(deferred, "_torchdynamo_orig_callable")
    assert at_once._torchdynamo_orig_callable is double


def test_a_function_that_is_excepted_from_compiling_is_excepted_when_it_is_called() -> None:
    compiling: list[bool] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return 2 * x

    with quick_start():
        deferred = torch.compiler.disable(double)
    gc.unfreeze()
    assert torch.equal(deferred(torch.ones(2)), torch.full((2,), 2.0))
    compiled = torch.compile(lambda x: deferred(x) + 1, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert compiling == [False, False]
