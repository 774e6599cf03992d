"""An objective whose gradient follows from the losses: a preference of two sequences of a row, in any layout.

The oracle is plain torch over transformers, each conversation alone.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed_runner import new_job, run_distributed
from packed_runs import LENGTH, PACKED, Talks
from small_runs import hf_llama, small_run
from training_runs import SeededReader, build_seeded_run, transformers_steps

from patch.config.schema import RunConfig
from patch.data import Batch, BatchReader
from patch.data.packing import PackedSource, Packs
from patch.data.samples import Sample, collate
from patch.distributed.collectives import max_over_world
from patch.distributed.context_group import Zigzag
from patch.training.evaluation import evaluate, evaluating
from patch.training.objective import Objective
from patch.training.step import run_schedule, train_step

BETA, STEPS = 0.2, 3
BOUND = 1e-4
"""Relative, of fp32 sums in another order, after updates. Factors of sequences differ by more than a half."""
TALKS = Talks(0)
PAIRS = [(1, 2), (3, 4), (6, 7), (5, 3)]
"""Conversations of a row, the better one first; the first row has no padding."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "pp": {"pp": 2, "micro_batch_size": 1},
    "aligned": {"dp": 2, "precision_align": "eager"},
}


class Preference(Objective):
    """Direct preference optimization against the weights that the run begins with (arXiv:2305.18290)."""

    unit, reported, has_token_losses = "pairs", ("loss", "margin"), True

    def prepare(self, run: Any) -> None:
        super().prepare(run)
        self.reference, batches = torch.zeros(3 * len(PAIRS)), run.data.train_reader.step(0)
        with evaluating(run):
            reports = run_schedule(run, batches, 1.0, loss_scale=None)
        for batch, report in zip(batches, reports, strict=False):  # the last stage alone has reports
            self.reference[batch.of_sequences["number"]] = report["sums"]

    def count(self, batch: Batch) -> float:
        return (batch.of_sequences["sign"] > 0).sum().item() / self.groups.cp.size()

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> dict[str, torch.Tensor]:
        sums = self.sums_of_sequences(-output * batch.loss_mask, batch)
        sign, number = batch.of_sequences["sign"], batch.of_sequences["number"]
        none = sums.new_zeros(len(PAIRS))
        margins = none.index_add(0, number // 3, sign * (sums - self.reference[number]))
        shares = none.index_add(0, number // 3, sign.clamp(min=0)) / divisor / self.groups.cp.size()
        return {
            "loss": -(shares * F.logsigmoid(BETA * margins)).sum(),
            "margin": (shares * margins).sum(),
            "sums": sums,
        }

    def evaluated(self, means: Any) -> dict[str, float]:
        return {**super().evaluated(means), "valid_margin": means["margin"]}


def rows() -> list[Sample]:
    source = PackedSource(TALKS, Packs(LENGTH, np.array(PAIRS).flatten(), np.array([2, 4, 6, 8])))
    samples = []
    for pair in range(len(PAIRS)):
        size = len((sample := source[pair]).lengths)
        own = {"sign": torch.tensor([1.0, -1.0, 0.0])[:size], "number": 3 * pair + torch.arange(size)}
        samples.append(sample._replace(of_sequences=own))
    return samples


def batches_of(config: RunConfig, iteration: int) -> list[Batch]:
    size = config.training.micro_batch_size
    return [collate(rows()[begin : begin + size]) for begin in range(0, len(PAIRS), size)]


def train_everywhere(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """By layout: loss, margin and norm of each step; then the evaluation of three of the four pairs."""
    found = {}
    for name, changes in LAYOUTS.items():
        config = small_run(**{**PACKED, "lr_warmup_iters": 0, "train_iters": STEPS, **changes})
        run = build_seeded_run(config, folder)
        run.data.train_reader = SeededReader(
            config, run.groups.dp.rank(), Zigzag.of(run.groups.cp), batches_of
        )
        run.data.objective = Preference(config)
        run.data.objective.prepare(run)
        steps = []
        for iteration in range(STEPS):
            result = train_step(run, iteration)
            loss, margin = max_over_world([result.loss, result.further["margin"]], run.device)
            steps += [loss, result.grad_norm]
        valid = BatchReader(
            rows()[:3], micro_batch_size=config.training.micro_batch_size, global_batch_size=4, seed=1,
            dp_rank=run.groups.dp.rank(), dp_size=run.groups.dp.size(), zigzag=Zigzag.of(run.groups.cp),
            shuffle=False,
        )  # fmt: skip
        run.data.valid_readers = {"pairs": valid}
        found[name] = {"steps": steps, "margin": margin, **evaluate(run)}
        new_job()
    return found


def log_probability(model: Any, index: int) -> torch.Tensor:
    """Of the learned tokens of a conversation, by transformers."""
    ids, learned = (torch.from_numpy(part) for part in TALKS.conversation(index))
    logits = model(ids[None, :-1].long()).logits[0]
    labels = torch.where(learned[1:], ids[1:].long(), -100)
    return -F.cross_entropy(logits, labels, reduction="sum")


def test_factors_of_sequences_follow_from_their_losses_in_any_layout(tmp_path: Path) -> None:
    config = small_run(**PACKED, lr_warmup_iters=0)
    model = hf_llama(config, tmp_path)
    with torch.no_grad():
        reference = [log_probability(model, index) for index in range(len(TALKS.sizes))]

    def margins(model: Any, pairs: list[tuple[int, int]] = PAIRS) -> torch.Tensor:
        gains = [[log_probability(model, one) - reference[one] for one in pair] for pair in pairs]
        return torch.stack([better - worse for better, worse in gains])

    seen: list[torch.Tensor] = []

    def loss(model: Any, config: RunConfig, iteration: int) -> torch.Tensor:
        seen.append(margins(model))
        return -F.logsigmoid(BETA * seen[-1]).mean()

    losses, norms, trained = transformers_steps(config, tmp_path, loss_of=loss)
    factors = torch.sigmoid(-BETA * seen[-1])
    assert factors.max() > 1.5 * factors.min()
    with torch.no_grad():
        left = margins(trained, PAIRS[:3])
    expected = {
        "steps": [number for step in zip(losses, norms, strict=True) for number in step],
        "margin": seen[-1].mean().item(),
        "valid_loss": -F.logsigmoid(BETA * left).mean().item(),
        "valid_margin": left.mean().item(),
        "valid_pairs": 3,
    }
    first, second = run_distributed(train_everywhere, 2, tmp_path)
    assert first == second, "all ranks know the numbers"
    for name, found in first.items():
        assert found["steps"][0] == torch.tensor(2.0).log().item(), f"{name}: nothing has changed yet"
        assert found.pop("valid_ppl") > 1
        assert found.pop("steps") == pytest.approx(expected["steps"], rel=BOUND), name
        assert found == pytest.approx({key: expected[key] for key in found}, rel=BOUND), name
