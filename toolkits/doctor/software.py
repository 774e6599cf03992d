"""Versions, whether what is installed can be imported, and what the missing libraries would bring."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch.utils.collect_env import get_env_info

from patch.device import GPU_LIBRARIES, MachineFacts
from patch.optimizer.kernels import TRITON_CURE, adam_kernel
from toolkits._program import ROOT, run_program
from toolkits.doctor.check import Finding, Settings, Status, graded

_IMPORT_S = 60.0
_NEEDED = ("torch", "megatron-core", "transformers", "safetensors", "numpy", "psutil", "orjson", "fsspec")
"""Without these nothing trains."""
_OPTIONAL = {
    "triton": "triton",
    "transformer_engine": "transformer_engine.pytorch",
    "flash_attn_3": "flash_attn_interface",
    "flash-attn": "flash_attn",
    "liger-kernel": "liger_kernel",
}
"""Distributions with kernels, and the module whose import shows that they suit this torch."""
_MISSED = {
    "triton": (
        (0, 0), "RoPE and SwiGLU are chains of small kernels, and the optimizer on the GPU cannot run",
        "install torch's CUDA build, which brings triton",
    ),
    "flash_attn_3": (
        (9, 0), "packed rows and windows take FlashAttention-2",
        "build flash-attn 3 (hopper/ in its repository) for this torch",
    ),
    "transformer_engine": (
        (8, 0), "norms and products are kernels of their own; no fp8 by delayed scaling",
        "pip install --no-build-isolation -r requirements-gpu.txt",
    ),
}  # fmt: skip
"""Library: the least compute capability that it serves, the cost of its absence, and the cure."""


def check_versions(settings: Settings) -> Iterator[Finding]:
    """Python, torch and what a run needs, beside the versions that are tested, or allowed by the metadata."""
    yield Finding("python", "ok", platform.python_version())
    pins, allowed = pinned_versions(ROOT / "requirements.txt"), allowed_versions()
    for name in (*_NEEDED, *_OPTIONAL):
        found, tested = _version(name), pins.get(name) or allowed.get(name, SpecifierSet())
        cure = f"pip install '{name}{tested}'"
        if found is None:
            if name in _NEEDED:
                yield Finding(name, "broken", "not installed", cure)
            continue
        is_other = found.split("+")[0] not in tested
        what = f"{found}, expected {tested}" if is_other else found
        yield graded(name, what, is_other, cure, version=found, tested=str(tested))
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    yield Finding("torch's build", "ok", build, data=get_env_info()._asdict())


def check_imports(settings: Settings) -> Iterator[Finding]:
    """Import installed kernels, each in a process of its own: built for another torch, they crash."""
    for name in filter(_version, _OPTIONAL):
        ended = run_program([sys.executable, "-W", "ignore", "-c", f"import {_OPTIONAL[name]}"], _IMPORT_S)
        if ended.code != 0:
            cure = f"rebuild {name} for this torch (pip install --no-build-isolation), or uninstall it"
            # The others may only be in the way of a library that looks for them.
            is_needed = name in GPU_LIBRARIES
            what = ended.reason[:200]
            yield Finding(f"import of {name}", "broken" if is_needed else "warning", what, cure)


def check_kernels(settings: Settings) -> Iterator[Finding]:
    """The optimizer's kernel on the host, Triton's compiler, and libraries that would serve a run better."""
    is_slow = type(adam_kernel(torch.device("cpu"))).__name__ == "NumpyAdam"
    what = "NumPy: about 10 times slower than C++" if is_slow else "C++"
    yield graded("optimizer on the host", what, is_slow, "install g++ or clang++")
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++")))
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if settings.has_gpus and not (header.is_file() and has_compiler):
        yield Finding("Triton's launchers", "broken", "no compiler, or no Python.h", TRITON_CURE)
    yield from missing_libraries(settings.machine)


def missing_libraries(machine: MachineFacts) -> Iterator[Finding]:
    """Libraries that a run on these GPUs would use, if they were installed.

    Args:
        machine: without GPUs nothing is missing.
    """
    for name, (least, cost, cure) in _MISSED.items():
        if machine.cuda_devices and machine.compute_capability >= least and name not in machine.libraries:
            # A GPU's optimizer has no kernel but Triton's.
            status: Status = "broken" if name == "triton" else "warning"
            yield Finding(name, status, f"not installed: {cost}", cure)


def pinned_versions(file: Path) -> dict[str, SpecifierSet]:
    """The versions of a requirements file for this Python; none if it is not there (an installed package)."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return _specifiers(text for line in lines if (text := line.split("#")[0].strip()))


def allowed_versions() -> dict[str, SpecifierSet]:
    """The versions with which the installed package may run; none where it is not installed."""
    try:
        return _specifiers(requires("llama-megatron-patch") or ())
    except PackageNotFoundError:
        return {}


def _specifiers(lines: Iterable[str]) -> dict[str, SpecifierSet]:
    found = map(Requirement, lines)
    own = [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {each.name: each.specifier for each in own}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
