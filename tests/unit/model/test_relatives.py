"""Dense families with parts that LLaMA lacks: steps against transformers, packed rows, layouts, adapters.

Their config.json and weight tables: tests/unit/families, tests/unit/convert. One family per part is quick.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import family_model, family_run
from packed_runs import PACKED, SIZES, Talks, batches_of, build_untrained, talk_batches
from training_runs import SeededReader, build_seeded_run, hf_gradients, seeded_batches, token_mean
from transformers import AutoModelForCausalLM
from without_class import MODELS, write_model

from patch.config.schema import RunConfig
from patch.distributed.context_group import Zigzag
from patch.model import initialize_weights
from patch.training.setup import Run
from patch.training.step import run_schedule, train_step

QUICK = ("smollm3", "granite", "ministral-3", "olmo-3", "glm-4", "gemma-2", "llama-biased")
"""No RoPE by layer; factors; growing queries; norms behind and of all heads, RoPE by window; two norms, a
part of RoPE, joined tensors; 1 + weight, caps; biases of all linear layers."""
NAMES = (*QUICK, "phi-3", "phi-4-mini", "olmo-2", "glm-4-biased", "gemma-3")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in NAMES]
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP": {"tp": 2},
    "SP": {"tp": 2, "sequence_parallel": True},
    "PP": {"pp": 2},
    "all-to-all": {"cp": 2, "cp_comm_type": "a2a"},
    "TP, LoRA": {"tp": 2, "lora_rank": 3, "lora_alpha": 6},
    "packed ring": {"cp": 2, "cp_comm_type": "p2p", **PACKED},
    "ZeRO-3, recomputed": {"dp": 2, "data_parallel_sharding": "parameters", "recompute_granularity": "full"},
}
SAME = (*PACKED, "lora_rank", "lora_alpha")
"""Settings of a run of several processes that the run of one process has too."""
BOUND = 2e-6


def step_of(run: Run, batches: list[Any]) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of a step, by Hugging Face's names."""
    for stage in run.stages:
        stage.zero_grad()
    learned = float(sum(batch.loss_mask.sum() for batch in batches))
    loss = sum(float(report["loss"]) for report in run_schedule(run, batches, learned, loss_scale=1.0))
    return loss, {name: each.numpy() for name, each in hf_gradients(run.stages, run.config).items()}


def run_alone(rank: int, world_size: int, folders: dict[str, Path]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, folder in folders.items():
        run = build_untrained(family_run(folder, **PACKED), folder)
        batches = seeded_batches(run.config, 0)
        with torch.no_grad():
            logits = run.stages[0](batches[0].tokens, None, None)[..., : run.config.model.vocab_size]
            assert not logits.requires_grad
        found[name] = logits.numpy(), step_of(run, batches), step_of(run, batches_of(run.config, Talks(0)))
        new_job()
    return found


def losses_of(config: RunConfig, folder: Path) -> list[tuple[float, float]]:
    """Losses and gradient norms of two steps."""
    run = build_seeded_run(config, folder)
    if config.adapter.is_on:
        initialize_weights(run.stages, config.model, 1, adapters=True)
        run.optimizer.reload_model_params()
    if config.data.packing:
        zigzag = Zigzag.of(run.groups.cp)
        run.data.train_reader = SeededReader(config, run.groups.dp.rank(), zigzag, talk_batches)  # type: ignore
    found = [train_step(run, iteration) for iteration in range(2)]
    new_job()
    return [(each.loss, each.grad_norm) for each in found]


def run_layouts(rank: int, world_size: int, folders: dict[str, Path]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, folder in folders.items():
        for layout, changes in LAYOUTS.items():
            if name == "gemma-2" and changes.get("cp_comm_type") == "p2p":
                changes = changes | {"cp_comm_type": "a2a"}  # a ring cannot cap scores
            if world_size == 1:
                changes = {key: value for key, value in changes.items() if key in SAME}
            found[name, layout] = losses_of(family_run(folder, **changes), folder)
    return found


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("relatives")
    names = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    found = {name: root / name for name in (*NAMES, *MODELS) if name in names}
    for name, folder in found.items():
        (write_model if name in MODELS else family_model)(name, folder)
    return found


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[Any, Any]:
    return run_distributed(run_alone, 1, folders)[0]


@pytest.fixture(scope="module")
def layouts(folders: dict[str, Path]) -> list[list[dict[Any, Any]]]:
    """By number of processes what each rank found."""
    return [run_distributed(run_layouts, size, folders) for size in (1, 2)]


def check_step(ours: tuple[float, dict[str, np.ndarray]], loss: torch.Tensor, theirs: Any) -> None:
    theirs.zero_grad()
    loss.backward()
    assert ours[0] == pytest.approx(loss.item(), abs=BOUND)
    gradients = dict(ours[1])
    for tensor, weight in theirs.named_parameters():
        actual = torch.from_numpy(gradients.pop(tensor))
        assert (actual - weight.grad).abs().max() < 2e-5 * weight.grad.abs().max() + 1e-7, tensor
    assert not gradients


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(
    folders: dict[str, Path], alone: dict[Any, Any], name: str
) -> None:
    logits, step, packed = alone[name]
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(folders[name], **how)
    config, talks = family_run(folders[name], **PACKED), Talks(0)
    with torch.no_grad():
        expected = theirs(seeded_batches(config, 0)[0].tokens).logits
    assert torch.allclose(torch.from_numpy(logits), expected, rtol=0, atol=1e-4)
    check_step(step, token_mean(theirs, config, 0), theirs)
    total = torch.zeros(())
    for index in range(len(SIZES)):  # each conversation alone
        ids, learned = (torch.from_numpy(part) for part in talks.conversation(index))
        labels = torch.where(learned[1:], ids[1:].long(), -100)
        each = theirs(ids[None, :-1].long()).logits[0]
        total = total + torch.nn.functional.cross_entropy(each, labels, reduction="sum")
    count = sum(int(talks.conversation(index)[1][1:].sum()) for index in range(len(SIZES)))
    check_step(packed, total / count, theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in ("olmo-3", "glm-4") else pytest.mark.long)
    for name in (*NAMES, *MODELS)
])
def test_layouts_and_packed_rows_are_as_one_process(
    layouts: list[list[dict[Any, Any]]], name: str, layout: str
) -> None:
    # Only the last stage of a pipeline knows the loss.
    one, two = (np.max([found[name, layout] for found in ranks], axis=0) for ranks in layouts)
    assert np.allclose(one, two, rtol=2e-5, atol=0)
