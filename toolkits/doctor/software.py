"""Versions, whether what is installed can be imported, and what the missing libraries would bring."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.collect_env import get_env_info

from patch.config import RunConfig
from patch.config.backends import Served, backends_of, resolve_transformer_impl
from patch.device import GPU_LIBRARIES, MachineFacts, nccl_version
from patch.optimizer.kernels import TRITON_CURE, adam_kernel
from patch.preflight.parse import parse_args
from toolkits.doctor.check import Finding, Settings, Status, graded, run_program

REPOSITORY = Path(__file__).resolve().parents[2]
_IMPORT_S, _GIT_S = 60.0, 10.0
_MIN_PYTHON = (3, 11)
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
_SAMPLE_RUN = (
    "dsw 8B 1 16 1e-5 1e-6 4096 4096 bf16 1 1 1 false true true true none false 100 data none none 10 1 run"
)
"""The positions of a run whose kernels are compared: LLaMA-3.1 8B in bf16."""
_MISSED = {
    "triton": (
        "RoPE and SwiGLU are chains of small kernels, and the optimizer on the GPU cannot run",
        "install torch's CUDA build, which brings triton",
    ),
    "flash_attn_3": (
        "packed rows and windows take FlashAttention-2",
        "build flash-attn 3 (hopper/ in its repository) for this torch",
    ),
    "transformer_engine": (
        "norms and products are kernels of their own; no fp8 by delayed scaling",
        "pip install --no-build-isolation -r requirements-gpu.txt",
    ),
}
"""Of a library that is missed: what that costs, and its cure."""


def check_versions(settings: Settings) -> Iterator[Finding]:
    """Python, torch and what a run needs, beside the versions that are tested."""
    is_old = sys.version_info < _MIN_PYTHON
    advice = "Python 3.11 or newer" if is_old else ""
    yield Finding("python", "broken" if is_old else "ok", platform.python_version(), advice)
    pins = pinned_versions(REPOSITORY / "requirements.txt")
    for name in _NEEDED:
        yield _compared(name, pins.get(name, ""))
    for name in filter(_version, _OPTIONAL):
        yield _compared(name, "")
    yield _torch_build()
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    has_git = shutil.which("git") is not None
    yield Finding("commit", "ok", (run_program(git, _GIT_S).output.strip() if has_git else "") or "unknown")


def check_imports(settings: Settings) -> Iterator[Finding]:
    """Import installed kernels, each in a process of its own: built for another torch, they crash."""
    for name in filter(_version, _OPTIONAL):
        command = [sys.executable, "-W", "ignore", "-c", f"import {_OPTIONAL[name]}"]
        ended = run_program(command, _IMPORT_S)
        if ended.code != 0:
            cure = f"rebuild {name} for this torch (pip install --no-build-isolation), or uninstall it"
            # The others may only be in the way of a library that looks for them.
            status: Status = "broken" if name in GPU_LIBRARIES else "warning"
            yield Finding(f"import of {name}", status, ended.reason[:200], cure)


def check_compilers(settings: Settings) -> Iterator[Finding]:
    """What compiles kernels: the optimizer's on the host, Triton's launchers, Transformer Engine."""
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++")))
    kernel = type(adam_kernel(torch.device("cpu"))).__name__
    is_slow = kernel == "NumpyAdam"
    what = "NumPy: about 10 times slower than C++" if is_slow else "C++"
    yield graded("optimizer on the host", what, is_slow, "install g++ or clang++")
    if not settings.has_gpus:
        return
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file() or not has_compiler:
        yield Finding("Triton's launchers", "broken", "no compiler, or no Python.h", TRITON_CURE)
    for tool in ("nvcc", "ninja"):
        what = "found" if shutil.which(tool) else "missing: only builds of libraries need it"
        yield Finding(tool, "ok", what)


def check_accelerations(settings: Settings) -> Iterator[Finding]:
    """What serves each operation of LLaMA-3.1 8B in bf16 here, and what would serve it better."""
    for row in _served(settings.machine):
        yield Finding(row.operation, "ok", row.by + (f" ({row.reason})" if row.reason else ""))
    yield from missing_libraries(settings.machine)


def missing_libraries(machine: MachineFacts) -> Iterator[Finding]:
    """Libraries that would serve an operation of the sample run, if they were installed.

    Args:
        machine: without GPUs nothing is missing.
    """
    now = _served(machine)
    for name, (cost, cure) in _MISSED.items():
        richer = dataclasses.replace(machine, libraries=machine.libraries | {name})
        if name not in machine.libraries and _served(richer) != now:
            # Triton is no acceleration: a GPU's optimizer has no other kernel.
            status: Status = "broken" if name == "triton" else "warning"
            yield Finding(name, status, f"not installed: {cost}", cure)


def pinned_versions(file: Path) -> dict[str, str]:
    """The pinned versions of a requirements file; none if it is not there (an installed package)."""
    if not file.is_file():
        return {}
    lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
    return dict(line.split("==", 1) for line in lines if "==" in line)


def _served(machine: MachineFacts) -> tuple[Served, ...]:
    """The table of backends (`patch/config/backends.py`) of the sample run."""
    config: RunConfig = parse_args(_SAMPLE_RUN.split(), {"TOKENIZER_PATH": "none"}, machine).config
    config, _ = resolve_transformer_impl(config, machine)
    return backends_of(config, machine).rows


def _compared(name: str, tested: str) -> Finding:
    """The version of a distribution, beside the one that is tested, if there is one."""
    version = _version(name)
    if version is None:
        wanted = f"{name}=={tested}" if tested else name
        return Finding(name, "broken", "not installed", f"pip install '{wanted}'")
    data = {"version": version, "tested": tested}
    if not tested or version.split("+")[0] == tested:
        return Finding(name, "ok", version, data=data)
    # Private names of megatron-core are used (patch/compat), of the others none.
    status: Status = "broken" if name == "megatron-core" else "warning"
    what = f"{version}, tests run with {tested}"
    return Finding(name, status, what, f"pip install '{name}=={tested}', or expect differences", data)


def _torch_build() -> Finding:
    """What torch was built for; all that torch itself collects for an issue is in the JSON report."""
    value = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    if torch.cuda.is_available():
        nccl = ".".join(map(str, nccl_version()))
        value += f", cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
    value += f"; {torch.backends.cpu.get_cpu_capability()} on the CPU"
    return Finding("torch's build", "ok", value, data=get_env_info()._asdict())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
