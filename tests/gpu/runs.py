"""Small runs of a test on a device, on batches from a seed."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from small_runs import small_run
from training_runs import build_seeded_run

from patch.device import DeviceContext
from patch.training.setup import Run
from patch.training.step import train_step

needs_8_bits = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs 8-bit products"
)


def build(context: DeviceContext, folder: Path | None = None, **changes: Any) -> Run:
    """A run with random weights, or those of a Hugging Face folder."""
    return build_seeded_run(small_run(**changes), folder, context)


def digest_of(run: Run) -> str:
    """SHA-256 of this rank's weights, when those that are on their way have arrived."""
    digest = hashlib.sha256()
    with run.optimizer.full_weights():
        for stage in run.stages:
            for parameter in stage.parameters():
                digest.update(parameter.detach().contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def close(run: Run) -> None:
    """End a run, so that another can be built."""
    run.optimizer.finish_param_sync()
    parallel_state.destroy_model_parallel()


def losses_of(run: Run, first: int = 0, last: int = 5) -> list[float]:
    """The losses of some steps."""
    return [train_step(run, iteration).loss for iteration in range(first, last)]


def train(context: DeviceContext, last: int = 5, **changes: Any) -> list[float]:
    """The losses of a run's first steps."""
    run = build(context, **{"train_iters": last} | changes)
    found = losses_of(run, last=last)
    close(run)
    return found


def gigabytes_a_second(work: Callable[[], object], num_bytes: int) -> str:
    """The rate of kernels that read and write so many bytes."""
    work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        work()
    end.record()
    end.synchronize()
    return f"{20 * num_bytes / start.elapsed_time(end) / 1e6:.0f} GB/s"
