"""Layers of Transformer Engine on a GPU: beside our own, in 8 bits, and over checkpoints of either."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import runs
from gpu.runs import close, losses_of, needs_8_bits
from training_runs import save

from patch.convert.live_weights import mapped_parameters
from patch.device import DeviceContext
from patch.training.run_state import Progress, resume
from patch.training.setup import Run

pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")

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
    return runs.build(job, **{"precision": "bf16"} | changes)


def train(job: DeviceContext, **changes: Any) -> list[float]:
    return runs.train(job, **{"precision": "bf16"} | changes)


def saved_after_two_steps(job: DeviceContext, folder: Path, **changes: Any) -> tuple[list, list]:
    """The weights of a run that was saved, and the losses with which it goes on."""
    run = build(job, **changes)
    losses_of(run, last=2)
    run.optimizer.finish_param_sync()
    save(folder, Progress(2, 8), run)
    weights = [mapped.parameter.clone() for mapped in mapped_parameters(run.stages, run.config.model, 1)]
    expected = losses_of(run, 2)
    close(run)
    return weights, expected


def resumed(job: DeviceContext, folder: Path, **changes: Any) -> Run:
    run = build(job, **changes)
    resume(run, folder, Progress(2, 8))
    return run


@pytest.mark.parametrize("case", CASES)
def test_losses_are_close_to_those_of_our_own_layers(job: DeviceContext, case: str) -> None:
    ours, theirs = (train(job, **CASES[case], **impl) for impl in (LOCAL, ENGINE))
    assert theirs == pytest.approx(ours, abs=BF16_BOUND)


@needs_8_bits
@pytest.mark.parametrize("case", FP8)
def test_8_bit_losses_are_close_to_those_of_bf16(job: DeviceContext, case: str) -> None:
    wide = train(job, **ENGINE)
    assert train(job, precision="fp8", **FP8[case], **ENGINE) == pytest.approx(wide, abs=FP8_BOUND)


@pytest.mark.parametrize("first,second", [(ENGINE, LOCAL), (LOCAL, ENGINE)], ids=["engine", "local"])
def test_a_checkpoint_of_either_is_loaded_by_the_other(
    job: DeviceContext, tmp_path: Path, first: dict[str, str], second: dict[str, str]
) -> None:
    saved, expected = saved_after_two_steps(job, tmp_path, **first)
    run = resumed(job, tmp_path, **second)
    loaded = [mapped.parameter for mapped in mapped_parameters(run.stages, run.config.model, 1)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(loaded, saved, strict=True))
    assert losses_of(run, 2) == pytest.approx(expected, abs=BF16_BOUND)


@needs_8_bits
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_resumed_run_in_8_bits_has_the_bits_of_one_that_was_not_interrupted(
    job: DeviceContext, tmp_path: Path, deterministic: None, recipe: str
) -> None:
    changes = {"precision": "fp8", "fp8_recipe": recipe, "deterministic_mode": True, **ENGINE}
    _, expected = saved_after_two_steps(job, tmp_path, **changes)
    assert losses_of(resumed(job, tmp_path, **changes), 2) == expected
