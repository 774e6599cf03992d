"""Checks of versions and of missing libraries."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import requires
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch.utils.collect_env import get_env_info

from patch.device import MachineFacts, installed_version
from patch.optimizer.kernels import TRITON_CURE
from toolkits._program import ROOT
from toolkits.doctor.check import Finding, Settings, Status, graded

_PACKAGE = "llama-megatron-patch"
_NEEDED = ("torch", "megatron-core", "transformers", "safetensors", "numpy", "psutil", "orjson", "fsspec")
"""Packages without which no run trains."""
_OPTIONAL = ("triton", "transformer_engine", "flash_attn_3", "flash-attn", "liger-kernel")
"""Packages with kernels."""
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
"""Library -> least compute capability that it supports, cost of its absence, cure."""


def check_software(settings: Settings) -> Iterator[Finding]:
    """Compare the installed versions with the tested versions, or with those that our metadata allow. Check
    Triton's compiler, and find missing libraries.
    """
    yield Finding("python", "ok", platform.python_version())
    pins = pinned_versions(ROOT / "requirements.txt")
    allowed = _specifiers(requires(_PACKAGE) or ()) if installed_version(_PACKAGE) else {}
    for name in (*_NEEDED, *_OPTIONAL):
        found, tested = installed_version(name), pins.get(name) or allowed.get(name, SpecifierSet())
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
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++")))
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if settings.machine.cuda_devices and not (header.is_file() and has_compiler):
        yield Finding("Triton's launchers", "broken", "no compiler, or no Python.h", TRITON_CURE)
    yield from missing_libraries(settings.machine)


def missing_libraries(machine: MachineFacts) -> Iterator[Finding]:
    """Yield the libraries that a run on this machine's GPUs would use if they were installed."""
    for name, (least, cost, cure) in _MISSED.items():
        if machine.cuda_devices and machine.compute_capability >= least and name not in machine.libraries:
            # Triton's kernel is the only one of the optimizer on a GPU.
            status: Status = "broken" if name == "triton" else "warning"
            yield Finding(name, status, f"not installed: {cost}", cure)


def pinned_versions(file: Path) -> dict[str, SpecifierSet]:
    """Return the versions that a requirements file pins for this Python, or {} if the file is missing."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return _specifiers(text for line in lines if (text := line.split("#")[0].strip()))


def _specifiers(lines: Iterable[str]) -> dict[str, SpecifierSet]:
    found = map(Requirement, lines)
    own = [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {each.name: each.specifier for each in own}
