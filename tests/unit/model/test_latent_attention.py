"""DeepSeek-V2's attention and experts: steps against transformers, layouts against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import family_model, family_run
from packed_runs import PACKED, PADDED, Talks, batches_of, build_untrained
from training_runs import build_seeded_run, hf_gradients, seeded_batches, token_mean, train_run

from patch.config.schema import RunConfig
from patch.training.step import run_schedule

NAMES = ("deepseek-v2-lite", "deepseek-v2")


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


SP2 = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP without SP": {"tp": 2, "num_experts": None, "precision": "fp32"},
    "EP over DP, ZeRO-2, selective": {
        "dp": 2, "expert_model_parallel_size": 2, "data_parallel_sharding": "gradients",
        "recompute_granularity": "selective",
    },
    "EP over SP, ETP 1, full": {
        **SP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
        "recompute_granularity": "full",
    },
    "CP ring": {"cp": 2, "cp_comm_type": "p2p"},
    "CP all-to-all, offloaded": {"cp": 2, "cp_comm_type": "a2a", "cpu_offloading": True},
    "PP": {"pp": 2},
}  # fmt: skip
"""Name -> the layout; without experts for the one in which they need SP."""


def trained(rank: int, world_size: int, folder: Path, layouts: list[dict[str, Any]]) -> list[Any]:
    """Losses and norms of three steps."""
    found = []
    for layout in layouts:
        config = family_run(folder, **{"global_batch_size": 8, "train_iters": 3, **layout})
        results = train_run(build_seeded_run(config, None if config.model.num_experts is None else folder))
        found.append([(result.loss, result.grad_norm) for result in results])
        new_job()
    return found


@pytest.fixture(scope="module")
def in_layouts(folders: dict[str, Path]) -> dict[str, list[Any]]:
    folder = folders["deepseek-v2"]
    runs = {name: {"num_layers": 2, **layout} for name, layout in LAYOUTS.items()}
    alone = {"": {}, "without experts": {"num_experts": None}}
    found = dict(zip(alone, run_distributed(trained, 1, folder, list(alone.values()))[0], strict=True))
    return found | dict(zip(runs, run_distributed(trained, 2, folder, list(runs.values()))[0], strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process_does(in_layouts: dict[str, list[Any]], name: str) -> None:
    alone = in_layouts["without experts" if "num_experts" in LAYOUTS[name] else ""]
    assert in_layouts[name][-1][0] < in_layouts[name][0][0]
    for (loss, norm), (expected, expected_norm) in zip(in_layouts[name], alone, strict=True):
        assert loss == pytest.approx(expected, abs=2e-6)
        assert norm == pytest.approx(expected_norm, rel=2e-6)


def losses_of_forms(rank: int, world_size: int, folder: Path) -> list[float]:
    """Of the same conversations, packed and padded."""
    found = []
    for form in (PACKED, PADDED):
        run = build_untrained(family_run(folder, **form), folder)
        batches = batches_of(run.config, Talks(0))
        learned = float(sum(batch.loss_mask.sum() for batch in batches))
        found.append(sum(float(each["loss"]) for each in run_schedule(run, batches, learned, loss_scale=1.0)))
        new_job()
    return found


def test_packed_rows_are_sequences_of_their_own(folders: dict[str, Path]) -> None:
    ((packed, padded),) = run_distributed(losses_of_forms, 1, folders["deepseek-v2"])
    assert packed == pytest.approx(padded, abs=2e-6)
