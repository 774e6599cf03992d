"""Ranks with nothing to train: they take part in what all do together, and keep their weights.

The oracle of a pipeline is one process that freezes the same layers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from small_runs import ZERO_3, small_run
from training_runs import build_seeded_run, save, state_of

from patch.config.schema import RunConfig
from patch.plan.memory import bytes_per_rank
from patch.training.evaluation import evaluate
from patch.training.run_state import Progress, resume
from patch.training.step import train_step

pytestmark = pytest.mark.long

# Measured: 5e-7, the last bit of losses near 5.6.
LOSS_BOUND = 2e-6
NUM_STEPS = 3
CHOSEN = r"embed|layers\.[02]\..*mlp|o_proj"
LEVELS = {
    level: {"data_parallel_sharding": level, "param_persistence_threshold": 100, "freeze": CHOSEN}
    for level in ("none", "optimizer", "gradients", "parameters")
}
STATIC = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 1.0}


def is_whole(module: torch.nn.Module) -> bool:
    return isinstance(module, LanguageModule)


def is_first(module: torch.nn.Module) -> bool:
    """All of the first stage: the embedding and two layers."""
    return type(module).__name__ == "LanguageModelEmbedding" or _is_layer_of(module, range(1, 3))


def is_last(module: torch.nn.Module) -> bool:
    """All of the last stage: two layers, the last norm and the output layer."""
    if isinstance(module, LanguageModule):
        for end in (module.decoder.final_layernorm, getattr(module, "output_layer", None)):
            if end is not None:
                end.requires_grad_(False)
    return _is_layer_of(module, range(3, 5))


def _is_layer_of(module: torch.nn.Module, numbers: range) -> bool:
    return isinstance(module, TransformerLayer) and module.layer_number in numbers


def train(
    config: RunConfig, is_frozen: Callable[[torch.nn.Module], bool], folder: Path | None
) -> dict[str, Any]:
    """Losses and norms; with a folder, the last step is that of a second run that resumes the first."""
    run = build_seeded_run(config, is_frozen=is_frozen)
    num_trained = len(run.optimizer.parameters)
    before = [p.detach().clone() for p in run.stages[0].parameters() if not p.requires_grad]
    results = [train_step(run, index) for index in range(NUM_STEPS - 1)]
    if folder is not None:
        save(folder, Progress(NUM_STEPS - 1, 4), run)
        new_job()
        run = build_seeded_run(config, is_frozen=is_frozen)
        resume(run, folder, Progress(NUM_STEPS - 1, 4))
    results.append(train_step(run, NUM_STEPS - 1))
    valid = evaluate(run)["valid_loss"]
    with run.optimizer.full_weights():
        frozen = [p for p in run.stages[0].parameters() if not p.requires_grad]
        assert all(map(torch.equal, before, frozen))
    new_job()
    return {
        "losses": [*(result.loss for result in results), valid],
        "norms": [result.grad_norm for result in results],
        "trained": num_trained,
    }


def train_chosen(config: RunConfig) -> dict[str, Any]:
    run = build_seeded_run(config)
    results = [train_step(run, index) for index in range(NUM_STEPS)]
    held = state_of(run)
    run.optimizer.finish_param_sync()
    new_job()
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "gradients": held.gradients,
        "states": held.optimizer,
    }


def run_all(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    if world_size == 1:
        frozen = {"first": is_first, "last": is_last, "whole": is_whole}
        found = {name: train(small_run(), is_frozen, None) for name, is_frozen in frozen.items()}
        return found | {"chosen": train_chosen(small_run(**LEVELS["none"]))}
    return {
        "first": train(small_run(pp=2), is_first, folder / "first"),
        "last": train(small_run(pp=2, **STATIC), is_last, folder / "last"),
        "whole none": train(small_run(dp=2, data_parallel_sharding="none"), is_whole, folder / "none"),
        "whole parameters": train(small_run(dp=2, **ZERO_3, **STATIC), is_whole, folder / "parameters"),
        **{level: train_chosen(small_run(dp=2, **changes)) for level, changes in LEVELS.items()},
        "layers": train(small_run(dp=2, **ZERO_3), is_first, folder / "layers"),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {size: run_distributed(run_all, size, folder / str(size)) for size in (1, 2)}


def same(ours: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether losses and norms are those of one process; stages before the last one have no losses."""
    return ours["norms"] == pytest.approx(expected["norms"], rel=1e-5) and (
        ours["losses"] == pytest.approx(expected["losses"], abs=LOSS_BOUND)
    )


def test_frozen_stages_and_layers_take_part_and_pass_gradients_on(ranks: dict) -> None:
    (expected,), (first, second) = ranks[1], ranks[2]
    for name in ("first", "last"):
        assert 0 in (first[name]["trained"], second[name]["trained"]) and expected[name]["trained"]
        assert same(second[name], expected[name])
        assert first[name]["norms"] == second[name]["norms"]
    assert same(first["layers"], expected["first"]) and same(second["layers"], expected["first"])


def test_a_model_with_nothing_to_train_is_evaluated_step_by_step(ranks: dict) -> None:
    (expected,) = (rank["whole"] for rank in ranks[1])
    assert expected["norms"] == [0.0] * NUM_STEPS
    for rank in ranks[2]:
        assert same(rank["whole none"], expected) and same(rank["whole parameters"], expected)


@pytest.mark.parametrize("level", LEVELS)
def test_frozen_weights_have_neither_gradients_nor_states_at_any_level(ranks: dict, level: str) -> None:
    """Bytes as planned, but for the padding of buckets."""
    (expected,) = ranks[1]
    planned, of_all = (
        bytes_per_rank(small_run(dp=2, **LEVELS[level] | changes)) for changes in ({}, {"freeze": "none"})
    )
    assert planned.optimizer < 0.6 * of_all.optimizer
    for found in (rank[level] for rank in ranks[2]):
        assert same(found, expected["chosen"])
        assert found["gradients"] == pytest.approx(planned.gradients, rel=0.01)
        assert found["states"] == pytest.approx(planned.optimizer, rel=0.01)
