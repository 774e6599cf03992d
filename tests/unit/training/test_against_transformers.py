"""Training against transformers: twenty steps of a plain loop; a step's loss and gradients, packed or not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import family_model, family_run
from packed_runs import PACKED, PADDED, SIZES, Talks, batches_of, build_untrained
from small_runs import hf_llama, small_run
from training_runs import build_seeded_run, hf_gradients, train, transformers_steps

from patch.training.setup import Run
from patch.training.step import run_schedule, train_step

BOUND = 2e-6
"""On losses near 5.6 and gradients whose norm is near 2: fp32 sums in other orders."""
LOOPS = {
    "untied": small_run(train_iters=20),
    "frozen": small_run(
        train_iters=20, freeze=r"embed|layers\.[02]\..*mlp|input_layernorm", train_only="embed|layers",
        recompute_granularity="full",
    ),
    "tied": small_run(train_iters=20, untie_embeddings_and_output_weights=False),
    "bloom": small_run(
        train_iters=20, model_type="bloom", num_attention_heads=6, num_query_groups=6, kv_channels=8,
        hidden_size=48, ffn_hidden_size=192, num_layers=2, untie_embeddings_and_output_weights=False,
        use_rope_scaling=False,
    ),
}  # fmt: skip
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("untied", PACKED),
    "packed, aligned": ("untied", PACKED | {"precision_align": "eager"}),
    "padded": ("untied", PADDED),
    "bloom, packed": ("bloom", PACKED),
    "bloom, padded and recomputed": ("bloom", PADDED | {"recompute_granularity": "selective"}),
}
"""Name -> model of LOOPS, and what differs from its run."""
CASES = {
    "all": Talks(0),
    "a pack that is one full sequence": Talks(0, learned=[0]),
    "one learned token": Talks(0),
    "pad equal to eos": Talks(0),
    "ranks without learned tokens": Talks(0, learned=[0, 1]),
}
CASES["one learned token"].learn_one_token(4, 3)
CASES["pad equal to eos"].end_with_padding()


def run_all(rank: int, world_size: int, folders: dict[str, Path]) -> dict[Any, Any]:
    """The losses of LOOPS; and by form and case the loss and the gradients of a step."""
    found: dict[Any, Any] = {}
    for name, config in LOOPS.items():
        found[name] = [result.loss for result in train(config, folders[name])[:-1]]
    for form, (name, changes) in FORMS.items():
        run = build_untrained(family_run(folders[name], **changes), folders[name])
        for case, talks in CASES.items():
            loss, gradients = our_step(run, talks)
            found[form, case] = loss, {name: gradient.numpy() for name, gradient in gradients.items()}
        new_job()
    return found


def hf_step(hf: Any, talks: Talks) -> tuple[float, dict[str, torch.Tensor]]:
    """transformers' mean loss over the learned tokens, each conversation alone, and the gradients."""
    hf.zero_grad()
    total = sum(int(talks.conversation(index)[1][1:].sum()) for index in range(len(SIZES)))
    losses = []
    for index in range(len(SIZES)):
        ids, learned = (torch.from_numpy(part) for part in talks.conversation(index))
        logits = hf(ids[None, :-1].long()).logits[0]
        labels = torch.where(learned[1:], ids[1:].long(), -100)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / total
        loss.backward()
        losses.append(loss.item())
    return sum(losses), {name: weight.grad for name, weight in hf.named_parameters()}


def our_step(run: Run, talks: Talks) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by our step on megatron-core's schedule."""
    for stage in run.stages:
        stage.zero_grad()
    batches = batches_of(run.config, talks)
    learned = float(sum(batch.loss_mask.sum() for batch in batches))
    reports = run_schedule(run, batches, learned, loss_scale=1.0)
    return float(sum(report["loss"] for report in reports)), hf_gradients(run.stages, run.config)


def run_masked_rank(rank: int, world_size: int, folder: Path) -> tuple[float, float]:
    """A step over two replicas, of which the second has nothing to learn."""
    config = small_run(dp=2, data_parallel_sharding="optimizer", **PACKED)
    run = build_seeded_run(config, folder)
    batches = batches_of(config, CASES["ranks without learned tokens"])[rank::2]
    assert sum(map(run.data.objective.count, batches)) == (0 if rank else 16 + 5)
    run.data.train_reader.step = lambda iteration: batches  # type: ignore[method-assign]
    result = train_step(run, 0)
    return result.loss, result.grad_norm


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders with random weights, tied and untied."""
    folders = {name: tmp_path_factory.mktemp(name) for name in LOOPS}
    for name, folder in folders.items():
        if name == "bloom":
            family_model(name, folder)
        else:
            hf_llama(LOOPS[name], folder)
    return folders


@pytest.fixture(scope="module")
def theirs(folders: dict[str, Path]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    models = {
        name: AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
        for name in ("untied", "bloom")
    }
    return {(name, case): hf_step(hf, CASES[case]) for name, hf in models.items() for case in CASES}


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[Any, Any]:
    return run_distributed(run_all, 1, folders)[0]


@pytest.mark.parametrize("name", LOOPS)
def test_twenty_losses_are_those_of_a_plain_transformers_loop(
    folders: dict[str, Path], ours: dict, name: str
) -> None:
    assert ours[name] == pytest.approx(transformers_steps(LOOPS[name], folders[name])[0], abs=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_those_of_transformers(ours: dict, theirs: dict, form: str, case: str) -> None:
    (loss, gradients), (their_loss, their_gradients) = ours[form, case], theirs[FORMS[form][0], case]
    assert loss == pytest.approx(their_loss, abs=BOUND)
    assert gradients.keys() == their_gradients.keys()
    for name, expected in their_gradients.items():
        actual = torch.from_numpy(gradients[name])
        assert torch.allclose(actual, expected, rtol=1e-4, atol=BOUND), name


def test_rank_without_learned_tokens_leaves_the_right_mean(folders: dict, theirs: dict) -> None:
    loss, gradients = theirs["untied", "ranks without learned tokens"]
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    for our_loss, our_norm in run_distributed(run_masked_rank, 2, folders["untied"]):
        assert our_loss == pytest.approx(loss, abs=BOUND)
        assert our_norm == pytest.approx(norm, rel=1e-5)
