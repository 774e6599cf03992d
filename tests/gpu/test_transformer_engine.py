"""Layers of Transformer Engine on a GPU: beside our own, in 8 bits, and over checkpoints of either."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from small_runs import small_run
from training_runs import build_seeded_run, save

from patch.convert.live_weights import mapped_parameters
from patch.device import DeviceContext
from patch.training.run_state import Progress, resume
from patch.training.setup import Run
from patch.training.step import train_step

pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")

needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs 8-bit products"
)

BF16_BOUND, FP8_BOUND = 0.02, 0.05
"""On losses near 5.6 over five steps; kernels round differently."""
ENGINE, LOCAL = {"transformer_impl": "transformer_engine"}, {"transformer_impl": "local"}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen, tied": {"add_qkv_bias": True, "qk_layernorm": True, "untie_embeddings_and_output_weights": False},
    "window": {"window_size": (7, 0)},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full"},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "offload": {"cpu_offloading": True},
}
FP8 = {
    "current": {}, "e4m3": {"fp8_format": "e4m3"}, "delayed": {"fp8_recipe": "delayed"},
    "mixed": {"first_last_layers_bf16": True}, "selective": {"recompute_granularity": "selective"},
    "block": CASES["block"], "delayed, full": {"fp8_recipe": "delayed", **CASES["full"]},
}  # fmt: skip


def build(job: DeviceContext, **changes: Any) -> Run:
    return build_seeded_run(small_run(**{"precision": "bf16"} | changes), None, job)


def losses(run: Run, first: int = 0, steps: int = 5) -> list[float]:
    return [train_step(run, iteration).loss for iteration in range(first, first + steps)]


def close(run: Run) -> None:
    run.optimizer.finish_param_sync()
    parallel_state.destroy_model_parallel()


def train(job: DeviceContext, **changes: Any) -> list[float]:
    run = build(job, **changes)
    found = losses(run)
    close(run)
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_are_close_to_those_of_our_own_layers(job: DeviceContext, case: str) -> None:
    ours, theirs = (train(job, **CASES[case], **impl) for impl in (LOCAL, ENGINE))
    assert theirs == pytest.approx(ours, abs=BF16_BOUND)


@needs_fp8
@pytest.mark.parametrize("case", FP8)
def test_8_bit_losses_are_close_to_those_of_bf16(job: DeviceContext, case: str) -> None:
    wide = train(job, **ENGINE)
    assert train(job, precision="fp8", **FP8[case], **ENGINE) == pytest.approx(wide, abs=FP8_BOUND)


@pytest.mark.parametrize("first,second", [(ENGINE, LOCAL), (LOCAL, ENGINE)], ids=["engine", "local"])
def test_a_checkpoint_of_either_is_loaded_by_the_other(
    job: DeviceContext, tmp_path: Path, first: dict[str, str], second: dict[str, str]
) -> None:
    run = build(job, **first)
    losses(run, steps=2)
    run.optimizer.finish_param_sync()
    save(tmp_path, Progress(2, 8), run.stages, run.optimizer)
    saved = [mapped.parameter.clone() for mapped in mapped_parameters(run.stages, run.config.model, 1)]
    expected = losses(run, first=2, steps=3)
    close(run)
    run = build(job, **second)
    resume(tmp_path, Progress(2, 8), run.stages, run.optimizer, 1234)
    loaded = [mapped.parameter for mapped in mapped_parameters(run.stages, run.config.model, 1)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(loaded, saved, strict=True))
    assert losses(run, first=2, steps=3) == pytest.approx(expected, abs=BF16_BOUND)
    close(run)


@needs_fp8
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_resumed_run_in_8_bits_has_the_bits_of_one_that_was_not_interrupted(
    job: DeviceContext, tmp_path: Path, deterministic: None, recipe: str
) -> None:
    changes = {"precision": "fp8", "fp8_recipe": recipe, "deterministic_mode": True, **ENGINE}
    run = build(job, **changes)
    losses(run, steps=2)
    run.optimizer.finish_param_sync()
    save(tmp_path, Progress(2, 8), run.stages, run.optimizer)
    expected = losses(run, first=2, steps=3)
    close(run)
    run = build(job, **changes)
    resume(tmp_path, Progress(2, 8), run.stages, run.optimizer, 1234)
    assert losses(run, first=2, steps=3) == expected
    close(run)
