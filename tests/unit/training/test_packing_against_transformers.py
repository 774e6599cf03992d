"""Packed and padded steps against transformers, conversation by conversation: loss and all gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from packed_runs import PACKED, PADDED, SIZES, Talks, batches_of, build_untrained
from small_runs import hf_llama, small_run
from training_runs import build_seeded_run, hf_gradients

from patch.data.samples import learned_tokens
from patch.training.setup import Run
from patch.training.step import run_schedule, train_step

BOUND = 2e-6
"""On losses near 5.6 and gradients whose norm is near 2: fp32 sums in other orders."""


CASES = {
    "all": Talks(0),
    "a pack that is one full sequence": Talks(0, learned=[0]),
    "one learned token": Talks(0),
    "pad equal to eos": Talks(0),
    "ranks without learned tokens": Talks(0, learned=[0, 1]),
}
CASES["one learned token"].learn_one_token(4, 3)
CASES["pad equal to eos"].end_with_padding()


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
    batches = batches_of(talks, run.config)
    losses = run_schedule(run, batches, learned_tokens(batches), loss_scale=1.0)
    return float(sum(losses)), hf_gradients(run.stages, run.config)


def run_cases(rank: int, world_size: int, folder: Path) -> dict[tuple[str, str], Any]:
    found = {}
    for form, changes in (("packed", PACKED), ("padded", PADDED)):
        run = build_untrained(small_run(**changes), folder)
        for case, talks in CASES.items():
            loss, gradients = our_step(run, talks)
            found[form, case] = loss, {name: gradient.numpy() for name, gradient in gradients.items()}
        new_job()
    return found


def run_masked_rank(rank: int, world_size: int, folder: Path) -> tuple[float, float]:
    """A step over two replicas, of which the second has nothing to learn."""
    config = small_run(dp=2, data_parallel_sharding="optimizer", **PACKED)
    run = build_seeded_run(config, folder)
    batches = batches_of(CASES["ranks without learned tokens"], config)[rank::2]
    assert learned_tokens(batches) == (0 if rank else 16 + 5)
    run.train_reader.step = lambda iteration: batches  # type: ignore[method-assign]
    result = train_step(run, 0)
    return result.loss, result.grad_norm


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    hf_llama(small_run(), folder)
    return folder


@pytest.fixture(scope="module")
def theirs(hf_folder: Path) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    hf = LlamaForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    return {case: hf_step(hf, talks) for case, talks in CASES.items()}


@pytest.fixture(scope="module")
def ours(hf_folder: Path) -> dict[tuple[str, str], Any]:
    return run_distributed(run_cases, 1, hf_folder)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["packed", "padded"])
def test_loss_and_gradients_are_those_of_transformers(ours: dict, theirs: dict, form: str, case: str) -> None:
    (loss, gradients), (their_loss, their_gradients) = ours[form, case], theirs[case]
    assert loss == pytest.approx(their_loss, abs=BOUND)
    assert gradients.keys() == their_gradients.keys()
    for name, expected in their_gradients.items():
        actual = torch.from_numpy(gradients[name])
        assert torch.allclose(actual, expected, rtol=1e-4, atol=BOUND), name


def test_rank_without_learned_tokens_leaves_the_right_mean(hf_folder: Path, theirs: dict) -> None:
    loss, gradients = theirs["ranks without learned tokens"]
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    for our_loss, our_norm in run_distributed(run_masked_rank, 2, hf_folder):
        assert our_loss == pytest.approx(loss, abs=BOUND)
        assert our_norm == pytest.approx(norm, rel=1e-5)
