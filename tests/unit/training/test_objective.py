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

BETA = 0.2
BOUND = 1e-4
"""Relative, of fp32 sums in another order, after updates. Factors of sequences differ by more than a half."""
TALKS = Talks(0)
PAIRS = [(1, 2), (3, 4), (6, 7), (5, 3)]
"""Conversations of a row, the better one first; the first row has no padding."""
RUN = {**PACKED, "lr_warmup_iters": 0}
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
        losses = -F.logsigmoid(BETA * margins)
        return {"loss": (shares * losses).sum(), "margin": (shares * margins).sum(), "sums": sums}

    def evaluated(self, means: Any) -> dict[str, float]:
        return {"valid_loss": means["loss"], "valid_margin": means["margin"]}


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


def train_everywhere(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, float]]:
    """By layout: loss and norm of each step, the last margin, the evaluation of three of the four pairs."""
    found = {}
    for name, changes in LAYOUTS.items():
        run = build_seeded_run(small_run(**RUN | changes), folder)
        dp, cp = run.groups.dp, Zigzag.of(run.groups.cp)
        run.data.train_reader = SeededReader(run.config, dp.rank(), cp, batches_of)
        run.data.objective = Preference(run.config)
        run.data.objective.prepare(run)
        numbers = {}
        for iteration in range(run.config.training.train_iters):
            result = train_step(run, iteration)
            loss, numbers["margin"] = max_over_world([result.loss, result.further["margin"]], run.device)
            numbers |= {f"loss {iteration}": loss, f"norm {iteration}": result.grad_norm}
        sizes = {"micro_batch_size": run.config.training.micro_batch_size, "global_batch_size": 4}
        ranks = {"dp_rank": dp.rank(), "dp_size": dp.size(), "zigzag": cp}
        run.data.valid_readers = {"pairs": BatchReader(rows()[:3], **sizes, **ranks, seed=1, shuffle=False)}
        found[name] = numbers | evaluate(run)
        new_job()
    return found


def log_probability(model: Any, index: int) -> torch.Tensor:
    """Of the learned tokens of a conversation, by transformers."""
    ids, learned = (torch.from_numpy(part) for part in TALKS.conversation(index))
    labels = torch.where(learned[1:], ids[1:].long(), -100)
    return -F.cross_entropy(model(ids[None, :-1].long()).logits[0], labels, reduction="sum")


def test_factors_of_sequences_follow_from_their_losses_in_any_layout(tmp_path: Path) -> None:
    model, seen = hf_llama(small_run(), tmp_path), list[torch.Tensor]()
    with torch.no_grad():
        reference = [log_probability(model, index) for index in range(len(TALKS.sizes))]

    def loss(model: Any, *_: Any, number: int = 4) -> torch.Tensor:
        gains = [[log_probability(model, one) - reference[one] for one in pair] for pair in PAIRS[:number]]
        seen.append(torch.stack([better - worse for better, worse in gains]))
        return -F.logsigmoid(BETA * seen[-1]).mean()

    losses, norms, trained = transformers_steps(small_run(**RUN), tmp_path, loss_of=loss)
    factors, margin = torch.sigmoid(-BETA * seen[-1]), seen[-1].mean().item()
    assert factors.max() > 1.5 * factors.min()
    steps = {f"{name} {k}": x for name, own in (("loss", losses), ("norm", norms)) for k, x in enumerate(own)}
    last = {"valid_loss": loss(trained, number=3).item(), "valid_margin": seen[-1].mean().item()}
    expected = {**steps, "margin": margin, **last, "valid_pairs": 3}
    first, second = run_distributed(train_everywhere, 2, tmp_path)
    assert first == second, "all ranks know the numbers"
    for name, found in first.items():
        assert found["loss 0"] == torch.tensor(2.0).log().item(), f"{name}: nothing has changed yet"
        assert found == pytest.approx(expected, rel=BOUND), name
