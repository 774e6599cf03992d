"""Modules of Triton kernels, loaded for Triton's interpreter."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from types import ModuleType

import pytest


@contextmanager
def interpreted(name: str, convert: Callable[[Callable], Callable] | None = None) -> Iterator[ModuleType]:
    """A module whose kernels run on the CPU, which is chosen when it is imported; GPU tests have another.

    Args:
        name: of the module.
        convert: makes another conversion of floats out of the interpreter's, which does not round as a GPU.
    """
    from triton.runtime import interpreter  # not in each torch build

    spec = find_spec(name)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setitem(sys.modules, name, module)
        if convert is not None:
            patch.setattr(interpreter, "_convert_float", convert(interpreter._convert_float))
        spec.loader.exec_module(module)
        yield module
