"""Adapters of every family's layers: their gradients, and dropout.

The oracle is the model without adapters whose weights are W + scale * B A: of its weights' gradients G those
of A and B are scale * B.T G and scale * G A.T. It is compared with transformers elsewhere.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import family_model, family_run
from packed_runs import build_untrained
from training_runs import hf_gradients, seeded_batches

from patch.convert.live_weights import iter_hf_weights, mapped_parameters
from patch.convert.mappings import TPShard
from patch.training.setup import Run
from patch.training.step import run_schedule

NAMES = ("llama-3.1", "bloom", "qwen-2-moe-mixed", "deepseek-v2", "glm-4.5")
CHANGES: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 5.0, "lora_rslora": True}
BOUND = 1e-5
"""Of a gradient, relative to the largest of its values: sums in another order. Largest measured: 2e-6."""


def gradients_of(run: Run) -> tuple[float, dict[str, torch.Tensor]]:
    batches = seeded_batches(run.config, 0)
    learned = float(sum(batch.loss_mask.sum() for batch in batches))
    loss = sum(float(report["loss"]) for report in run_schedule(run, batches, learned, loss_scale=1.0))
    return loss, hf_gradients(run.stages, run.config)


def compare(folder: Path, changes: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Difference of the losses; that of each factor's gradient, relative."""
    config, generator = family_run(folder, **changes), torch.Generator().manual_seed(1)
    run, scale = build_untrained(config, folder), config.adapter.scale
    for name, parameter in run.stages[0].named_parameters():
        assert parameter.requires_grad is (".adapters." in name)
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1, generator=generator)
    weights = iter_hf_weights(run.stages, config.model, run.groups, adapter=config.adapter)
    quantize_operands = {name: values.clone() for name, values in weights}
    loss, gradients = gradients_of(run)
    assert gradients.keys() == quantize_operands.keys()
    new_job()
    plain = build_untrained(family_run(folder), folder)
    base = dict(iter_hf_weights(plain.stages, config.model, plain.groups))
    names = {name.removesuffix(".lora_A.weight") for name in quantize_operands if "lora_A" in name}
    for name in names:
        base[f"{name}.weight"] += (
            scale * quantize_operands[f"{name}.lora_B.weight"] @ quantize_operands[f"{name}.lora_A.weight"]
        )
    for each in mapped_parameters(plain.stages, config.model, 1):
        sources = [base.get(name, base["model.embed_tokens.weight"]) if "lm_head" in name else base[name]
                   for name, _ in each.mapping.hf]  # fmt: skip
        each.mapping.hf_to_megatron(each.parameter, sources, TPShard(0, 1))
    expected_loss, of_weights = gradients_of(plain)
    new_job()
    found = {}
    for name in names:
        of_weight = scale * of_weights[f"{name}.weight"]
        a, b = (f"{name}.lora_{factor}.weight" for factor in "AB")
        for factor, expected in (
            (a, quantize_operands[b].t() @ of_weight),
            (b, of_weight @ quantize_operands[a].t()),
        ):
            largest = expected.abs().max().clamp(min=1e-6)
            found[factor] = float((gradients[factor] - expected).abs().max() / largest)
    return abs(loss - expected_loss), found


def run_families(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    return {name: compare(folder / name, CHANGES) for name in NAMES} | {
        "one": compare(folder / "deepseek-v2", CHANGES | {"lora_target_modules": "kv_b_proj,gate_proj"})
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("families")
    for name in NAMES:
        family_model(name, folder / name)
    return run_distributed(run_families, 1, folder)[0]


@pytest.mark.parametrize("name", [*NAMES, "one"])
def test_gradients_are_those_of_merged_weights(found: dict[str, Any], name: str) -> None:
    loss, differences = found[name]
    assert loss < 2e-6
    assert max(differences.values()) < BOUND, sorted(differences.items(), key=lambda item: -item[1])[:4]
