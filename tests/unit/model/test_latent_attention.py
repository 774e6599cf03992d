"""DeepSeek's attention and experts: steps against transformers.

Layouts and packed rows against one process: training/test_covered_layouts.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import family_model, family_run
from packed_runs import build_untrained
from training_runs import hf_gradients, seeded_batches, token_mean

from patch.config.schema import RunConfig
from patch.training.step import run_schedule

NAMES = ("deepseek-v2-lite", "deepseek-v2", "moonlight", "deepseek-v3", "glm-4.5")


def our_step(config: RunConfig, folder: Path, iteration: int) -> tuple[torch.Tensor, float, dict[str, Any]]:
    """Logits [B, S, V] of the first micro-batch; loss and gradients of a step."""
    run = build_untrained(config, folder)
    batches = seeded_batches(config, iteration)
    with torch.no_grad():
        logits = run.stages[0](batches[0].tokens, None, None)[..., : config.model.vocab_size]
    learned = float(sum(batch.loss_mask.sum() for batch in batches))
    loss = sum(float(report["loss"]) for report in run_schedule(run, batches, learned, loss_scale=1.0))
    gradients = {name: each.numpy() for name, each in hf_gradients(run.stages, config).items()}
    new_job()
    return logits.numpy(), loss, gradients


def steps_of(rank: int, world_size: int, folders: dict[str, Path]) -> dict[Any, Any]:
    return {
        (name, number): our_step(family_run(folder), folder, number)
        for name, folder in folders.items()
        for number in range(2)
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("deepseek")
    for name in NAMES:
        family_model(name, root / name)
    return {name: root / name for name in NAMES}


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[Any, Any]:
    return run_distributed(steps_of, 1, folders)[0]


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_gradients_are_those_of_transformers(
    folders: dict[str, Path], ours: dict[Any, Any], name: str, number: int
) -> None:
    from transformers import AutoModelForCausalLM

    logits, loss, gradients = ours[name, number]
    theirs = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    config = family_run(folders[name])
    with torch.no_grad():
        expected = theirs(seeded_batches(config, number)[0].tokens).logits
    assert torch.allclose(torch.from_numpy(logits), expected, rtol=0, atol=1e-4)
    assert (torch.from_numpy(logits).argmax(-1) == expected.argmax(-1)).all()
    token_mean(theirs, config, number).backward()
    assert loss == pytest.approx(token_mean(theirs, config, number).item(), abs=2e-6)
    for tensor, gradient in of_folder(theirs).items():
        actual = torch.from_numpy(gradients.pop(tensor))
        assert (actual - gradient).abs().max() < 1e-5 * gradient.abs().max() + 1e-7, tensor
    assert not gradients


def of_folder(theirs: Any) -> dict[str, torch.Tensor]:
    """Gradients by the names that folders have, which has a tensor for each expert."""
    found = {}
    for name, weight in theirs.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = weight.grad
            continue
        before, matrix = name.rsplit(".", 1)
        for number, gradient in enumerate(weight.grad):
            names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
            for each, part in zip(names, gradient.chunk(len(names)), strict=True):
                found[f"{before}.{number}.{each}.weight"] = part
    return found
