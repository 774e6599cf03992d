"""The whole of model and training against transformers: logits, and twenty steps of a plain loop."""

from pathlib import Path

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import hf_llama, small_run
from training_runs import build_seeded_run, seeded_batches, train

from patch.config.schema import RunConfig
from patch.optimizer import learning_rate

LENGTHS = (1, 5, 64, 65, 300)
CONFIGS = {
    "untied": small_run(train_iters=20),
    "tied": small_run(train_iters=20, untie_embeddings_and_output_weights=False),
}


def run_ours(rank: int, world_size: int, folders: dict[str, Path]) -> dict[str, tuple[list, dict]]:
    """Losses of training, and logits by dtype and prompt length, from the weights of each folder."""
    found = {}
    for name, folder in folders.items():
        config = CONFIGS[name]
        losses = [result.loss for result in train(config, folder)[:-1]]
        logits = {}
        for precision in ("fp32", "bf16"):
            logits[precision] = _our_logits(small_run(**_shape_changes(config), precision=precision), folder)
        found[name] = (losses, logits)
    return found


def _shape_changes(config: RunConfig) -> dict:
    return {"untie_embeddings_and_output_weights": config.model.untie_embeddings_and_output_weights}


@torch.no_grad()
def _our_logits(config: RunConfig, folder: Path) -> dict[int, torch.Tensor]:
    (model,) = build_seeded_run(config, folder).stages
    model.eval()
    logits = {length: model(_prompt(config, length), None, None).float().numpy() for length in LENGTHS}
    new_job()
    return logits


def _prompt(config: RunConfig, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, config.model.vocab_size, (2, length), generator=generator)


def _plain_loop(config: RunConfig, folder: Path) -> list[float]:
    """LlamaForCausalLM under torch's AdamW: the loss is the mean over the batch's learned tokens."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": 0.1},
            {"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    losses = []
    for iteration in range(config.training.train_iters):
        batches = seeded_batches(config, iteration)
        tokens, labels, mask = (torch.cat([batch[field] for batch in batches]) for field in range(3))
        logits = model(tokens).logits.flatten(0, 1)
        losses_of_tokens = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
        loss = (losses_of_tokens * mask.flatten()).sum() / mask.sum()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(iteration + 1, config.training.train_iters, config.optimizer)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders with random weights, tied and untied."""
    folders = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, folder in folders.items():
        hf_llama(CONFIGS[name], folder)
    return folders


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[str, tuple[list, dict]]:
    """What one process of ours computes from the folders."""
    return run_distributed(run_ours, 1, folders)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_twenty_losses_are_those_of_a_plain_transformers_loop(
    folders: dict[str, Path], ours: dict, name: str
) -> None:
    assert ours[name][0] == pytest.approx(_plain_loop(CONFIGS[name], folders[name]), abs=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@torch.no_grad()
def test_logits_are_those_of_transformers(
    folders: dict[str, Path], ours: dict, name: str, precision: str
) -> None:
    from transformers import LlamaForCausalLM

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = LlamaForCausalLM.from_pretrained(folders[name], dtype=dtype)
    for length in LENGTHS:
        expected = model(_prompt(CONFIGS[name], length)).logits.float()
        logits = torch.from_numpy(ours[name][1][precision][length])[..., : expected.shape[-1]]
        if precision == "fp32":
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        else:
            cosine = torch.nn.functional.cosine_similarity(logits, expected, dim=-1)
            assert cosine.min() >= 0.999, f"{length} tokens"
