"""Translates torch's errors for out of memory and for lost or silent ranks into messages with a cure.

torch has no classes for most of these errors: gloo and the CPU allocator raise RuntimeError, and NCCL's
watchdog aborts the process (the launcher handles SIGABRT). So the message is searched for known phrases.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from patch.config.positions import where
from patch.config.schema import RunConfig
from patch.errors import MemoryLackError, PatchError, TrainingError
from patch.launch.worker_process import LOST_RANK_CODE

# Sources of the wording: torch's c10/core/impl/alloc_cpu.cpp, c10/cuda and torch/csrc/distributed/c10d
# (ProcessGroupNCCL, NCCLUtils, TCPStore); gloo/transport/tcp (pair.cc, unbound_buffer.cc); NCCL's alloc.h.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "DefaultCPUAllocator",
    "out of memory",
    "Cannot allocate memory",
    # Libraries that do not use torch's allocator and raise a plain RuntimeError.
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Failed to CUDA calloc",
    "Failed to CUDA malloc",
)
_TIMED_OUT = ("Timed out", "timed out", "Application timeout", "wait timeout", "Watchdog caught collective")
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "failed to recv",
)


class SilentRankError(TrainingError):
    """Another rank or the network does not answer; a restart may help."""

    may_restart = True


class LostRankError(SilentRankError):
    """Another rank ended. The launcher prefers the exit code of that rank, which knows the reason."""

    exit_code = LOST_RANK_CODE


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU or the host ran out of memory, in torch or a library; False for a PatchError."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, PatchError):
        return False
    return any(words in str(error) for words in _OUT_OF_MEMORY)


def is_device_error(error: Exception) -> bool:
    """Return whether an out-of-memory error is about a GPU or the simulated device, not about the host."""
    libraries = ("CUDA", "CUDNN", "NCCL")  # cuBLAS and NCCL name CUDA too
    return isinstance(error, torch.OutOfMemoryError) or any(name in str(error) for name in libraries)


@contextmanager
def translate_errors(config: RunConfig) -> Iterator[None]:
    """Translate errors of the `with` block: out of memory, a collective that timed out, a lost rank.

    Raises:
        TrainingError: with the cure; torch's error is its __cause__. Other errors pass unchanged.
    """
    try:
        yield
    except PatchError:
        raise
    except (RuntimeError, MemoryError, OSError) as error:
        translated = _translate(error, config)
        if translated is None:
            raise
        raise translated from error


def _translate(error: RuntimeError | MemoryError | OSError, config: RunConfig) -> TrainingError | None:
    message = str(error)
    reason = (message.strip().splitlines() or [type(error).__name__])[0]
    if is_out_of_memory(error):
        return MemoryLackError(f"this process ran out of memory: {reason}", on_device=is_device_error(error))
    if not isinstance(error, RuntimeError):
        return None
    if any(words in message for words in _TIMED_OUT):
        return SilentRankError(
            f"another rank did not answer within {config.parallel.distributed_timeout_minutes} minutes "
            f"({where('distributed_timeout_minutes')}): {reason}. It hangs or has ended: see its log for the "
            "cause; raise that flag if a step really takes so long"
        )
    if any(words in message for words in _LOST):
        return LostRankError(f"another rank ended, see its log for the cause: {reason}")
    if isinstance(error, dist.DistError):
        return SilentRankError(
            f"the ranks cannot communicate: {reason}. Check the other ranks' messages, and with several "
            "machines MASTER_ADDR and MASTER_PORT"
        )
    return None
