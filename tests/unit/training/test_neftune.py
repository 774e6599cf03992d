"""NEFTune's noise: as transformers' hook draws it, in training only, the same after a resume.

That layouts have the same noise: test_covered_layouts.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import family_model, family_run
from packed_runs import PACKED, PADDED, Talks, batches_of, build_untrained
from small_runs import hf_llama, small_run
from training_runs import build_seeded_run, save, seeded_batches, transformers_steps

from patch.config.schema import RunConfig
from patch.training.evaluation import evaluate
from patch.training.run_state import Progress, resume
from patch.training.setup import Run
from patch.training.step import train_step
from patch.training.step_data import NOISE_KEYS, NOISE_SCALES, next_step_batches

pytestmark = pytest.mark.long

ALPHA, STEPS = 30.0, 4
LOOP = {"neftune_noise_alpha": ALPHA, "train_iters": STEPS}


def noise_of_step(run: Run, iteration: int) -> np.ndarray:
    """Return the noise of a step's rows, [rows, S, H], as the embedding's output differs by it."""
    embedding, noise, found = run.stages[0].embedding, run.stages[0].embedding_noise, []
    for batch in next_step_batches(run, iteration).batches:
        plain = embedding(batch.tokens, None)
        noise.keys, noise.scales = (batch.extra_tensors[name] for name in (NOISE_KEYS, NOISE_SCALES))
        found.append((embedding(batch.tokens, None) - plain).transpose(0, 1).detach())
        noise.keys = None
    return torch.cat(found).numpy()


def run_all(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, form in (("packed", PACKED), ("padded", PADDED)):
        run = build_seeded_run(small_run(**form | LOOP))
        batches = batches_of(run.config, Talks(0))
        run.data.train_reader.step = lambda iteration, batches=batches: batches  # type: ignore[method-assign]
        is_packed = run.config.data.packing
        lengths = [batch.cu_seqlens.diff().tolist() if is_packed else [32] * 2 for batch in batches]
        found[name] = noise_of_step(run, 0), noise_of_step(run, 1), sum(lengths, [])
        new_job()
    run = build_seeded_run(small_run(**LOOP), folder)
    found["noise"] = [noise_of_step(run, iteration) for iteration in range(STEPS)]
    found["losses"] = [train_step(run, iteration).loss for iteration in range(2)]
    save(folder / "runs", Progress(2, 8), run)
    found["losses"] += [train_step(run, iteration).loss for iteration in range(2, STEPS)]
    found["losses"].append(evaluate(run)["valid_loss"])
    new_job()
    run = build_seeded_run(small_run(**LOOP))
    resume(run, folder / "runs", Progress(2, 8))
    found["resumed"] = [train_step(run, iteration).loss for iteration in range(2, STEPS)]
    new_job()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    hf_llama(small_run(), folder)
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, Any]:
    return run_distributed(run_all, 1, folder)[0]


def drawn_by_transformers(length: int, hidden: int) -> torch.Tensor:
    """Return the sorted noise of many sequences of this length."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    module = torch.nn.Module()
    module.neftune_noise_alpha = ALPHA
    drawn = [neftune_post_forward_hook(module, None, torch.zeros(1, length, hidden)) for _ in range(50)]
    return torch.cat(drawn).flatten().sort().values


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_noise_of_a_sequence_has_the_distribution_of_transformers(ours: dict, form: str) -> None:
    first, second, lengths = ours[form]
    assert not np.array_equal(first, second) and len(np.unique(first)) > 0.9 * first.size
    rows = torch.from_numpy(first).flatten(0, 1)
    for own in rows.split(lengths):
        theirs, mine = drawn_by_transformers(*own.shape), own.flatten().sort().values
        places = torch.arange(1, len(mine)) * len(theirs) // len(mine)
        gap = (mine[1:] - theirs[places]).abs().max() / theirs[-1]
        assert gap < 4 / len(mine) ** 0.5 and mine.abs().max() <= 1.0001 * theirs.abs().max()


def test_losses_are_those_of_transformers_with_this_noise_and_evaluation_has_none(
    ours: dict, folder: Path
) -> None:
    def loss_of(model: Any, config: RunConfig, iteration: int) -> torch.Tensor:
        batches = seeded_batches(config, iteration)
        fields = ("tokens", "labels", "loss_mask")
        tokens, labels, mask = (torch.cat([getattr(batch, name) for batch in batches]) for name in fields)
        embeddings = model.get_input_embeddings()(tokens) + torch.from_numpy(noise[iteration])
        logits = model(inputs_embeds=embeddings).logits
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (each * mask.flatten()).sum() / mask.sum()

    config, noise = small_run(**LOOP), ours["noise"]
    losses, _, model = transformers_steps(config, folder, loss_of=loss_of)
    assert ours["losses"][:-1] == pytest.approx(losses, abs=2e-6)
    noise = [np.zeros_like(noise[0])] * 2
    with torch.no_grad():
        valid = [loss_of(model, config, iteration) for iteration in range(2)]
    weights = [sum(batch.loss_mask.sum() for batch in seeded_batches(config, i)) for i in range(2)]
    mean = sum(loss * weight for loss, weight in zip(valid, weights, strict=True)) / sum(weights)
    assert ours["losses"][-1] == pytest.approx(float(mean), abs=2e-6)


def test_resumed_steps_have_the_same_noise(ours: dict) -> None:
    assert ours["resumed"] == ours["losses"][2:STEPS]


@torch.no_grad()
def largest_noise(rank: int, world_size: int, folder: Path) -> float:
    run = build_untrained(family_run(folder), folder)
    embedding, noise, tokens = run.stages[0].embedding, run.stages[0].embedding_noise, torch.arange(64)[None]
    plain = embedding(tokens, None)
    noise.keys, noise.scales = tokens, torch.ones_like(tokens, dtype=torch.float32)
    return (embedding(tokens, None) - plain).abs().max().item()


@pytest.mark.parametrize(("name", "factor"), [("gemma-2", 1.0), ("granite", 12.0)])
def test_noise_is_of_the_embedding_of_transformers(tmp_path: Path, name: str, factor: float) -> None:
    """Gemma's embedding multiplies; Granite's model does, after the hook of NEFTune."""
    family_model(name, tmp_path)
    assert run_distributed(largest_noise, 1, tmp_path)[0] == pytest.approx(factor, rel=1e-2)
