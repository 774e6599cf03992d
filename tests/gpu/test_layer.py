"""Layers of LLaMA-3.1-8B's shape at 8192 tokens: each attention kernel against the others, memory, time."""

import gc
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from small_runs import ON_HOST, small_run
from torch.nn.attention import SDPBackend
from training_runs import build_seeded_run

from patch.device import DeviceContext, MachineFacts
from patch.model.attention.core_attention import CausalAttention
from patch.model.backends import _activate_flash, is_skipped
from patch.plan.fits import heaviest_rank
from patch.training.setup import Run
from patch.training.step import train_step

SHAPE = {
    "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8,
    "kv_channels": 128, "num_layers": 2, "seq_length": 8192, "max_padding_length": 8192,
    "max_position_embeddings": 8192, "init_method_std": 0.02, "micro_batch_size": 1, "global_batch_size": 1,
    "precision": "bf16", "train_iters": 4, "lr": 1e-5, "min_lr": 1e-5, "lr_warmup_iters": 0,
}  # fmt: skip
SMALL = {"hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 4, "num_query_groups": 2,
         "kv_channels": 16, "long": 64, "short": 32}  # fmt: skip
"""Sizes for a machine without a GPU, where the code only has to run."""
SHORT = 2048
"""Tokens at which all scores fit."""
KERNELS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "FlashAttention-3": SDPBackend.FLASH_ATTENTION, "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip
LOSS_BOUND, NORM_BOUND = 1e-3, 2e-2
"""Relative; two kernels round bf16 in other places."""
PEAK_BOUND = 0.15
"""Planned against measured: on a CPU the plan is within 7 % of the allocator's peak."""


def build(context: DeviceContext, **changes: Any) -> Run:
    return build_seeded_run(small_run(**SHAPE | changes), None, context)


def take_only(run: Run, kernel: str) -> None:
    """Compute all attention by one kernel of torch; the test is skipped where it is not installed."""
    missing = _activate_flash("FA3" if kernel == "FlashAttention-3" else "FA2")
    if missing is not None:
        pytest.skip(f"{kernel}: {missing}")
    modules = [module for stage in run.stages for module in stage.modules()]
    layers = [module for module in modules if isinstance(module, CausalAttention)]
    assert len(layers) == run.config.model.num_layers
    for attention in layers:
        attention.backends = [KERNELS.get(kernel, SDPBackend.MATH)]


@cache
def steps(
    context: DeviceContext, kernel: str, seq_length: int, **changes: Any
) -> tuple[list[tuple[float, float]], float]:
    """Loss and gradient norm of each step, and the milliseconds of the last one.

    The test is skipped where torch would go on to another kernel.

    Args:
        context: the device.
        kernel: of KERNELS; "all scores"; or "auto", which is what a run takes.
        seq_length: tokens.
        changes: of the run.
    """
    found = []
    try:
        run = build(context, seq_length=seq_length, max_padding_length=seq_length, **changes)
        if kernel != "auto":
            take_only(run, kernel)
        for iteration in range(run.config.training.train_iters):
            begin = time.perf_counter()
            result = train_step(run, iteration)
            run.optimizer.finish_param_sync()
            torch.get_device_module(run.device).synchronize()
            found.append((result.loss, result.grad_norm))
    except RuntimeError as error:
        if is_skipped(error):
            pytest.skip(f"{kernel}: {error}")
        raise
    finally:
        parallel_state.destroy_model_parallel()
    return found, 1e3 * (time.perf_counter() - begin)


def compare_attention(
    context: DeviceContext, figure: Callable[[str, object], None], kernel: str,
    long: int = SHAPE["seq_length"], short: int = SHORT, **changes: Any,
) -> None:  # fmt: skip
    """Train by a kernel, beside all scores where they fit, and beside what a run takes."""
    for other, length in (("all scores", short), ("auto", long)):
        found, milliseconds = steps(context, kernel, length, **changes)
        expected, usual = steps(context, other, length, **changes)
        for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=LOSS_BOUND), length
            assert norm == pytest.approx(expected_norm, rel=NORM_BOUND), length
    what = f"step of 2 layers of 8B, {long} tokens, attention"
    figure(f"{what} {kernel} / auto", f"{milliseconds:.1f} / {usual:.1f} ms")


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_attention_kernel_learns_as_the_others(
    job: DeviceContext, figure: Callable[[str, object], None], kernel: str
) -> None:
    compare_attention(job, figure, kernel)


PLACES: dict[str, dict[str, Any]] = {
    "2 layers of 8B": {},
    "32 layers of 2048 channels, weights on the host": {
        **ON_HOST, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16, "num_layers": 32,
        "seq_length": 2048, "max_padding_length": 2048, "recompute_granularity": "full",
        "reduce_bucket_size": 50_000_000,
    },
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_peak_memory_is_what_was_planned(
    job: DeviceContext, figure: Callable[[str, object], None], place: str
) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    run = build(job, **PLACES[place])
    for iteration in range(run.config.training.train_iters):
        if iteration == 1:  # a test's run has had whole weights on the device before
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        train_step(run, iteration)
        run.optimizer.finish_param_sync()
        seconds = time.perf_counter() - begin
    measured = torch.cuda.max_memory_allocated() - before
    planned = heaviest_rank(run.config, cuda=True).total
    figure(f"{place}, last of {run.config.training.train_iters} steps", f"{seconds:.3f} s")
    figure(f"peak memory of {place}, planned / measured", f"{planned / measured:.3f}")
    figure("that peak", f"{measured / 2**30:.2f} GiB of {MachineFacts.probe().cuda_memory_bytes / 2**30:.0f}")
    assert planned == pytest.approx(measured, rel=PEAK_BOUND)
    if PLACES[place]:  # bf16: half of the weights
        assert measured < sum(p.numel() for p in run.optimizer.parameters)
