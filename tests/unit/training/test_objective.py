"""DPO in any layout: its factors of sequences follow from the losses of their tokens.

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
from training_runs import build_seeded_run, transformers_steps

from patch.data import Batch, BatchReader
from patch.data.packing import PairSource
from patch.distributed.collectives import max_over_world
from patch.distributed.context_group import Zigzag
from patch.training.evaluation import evaluate
from patch.training.objectives.preference import Preference
from patch.training.setup import RunData
from patch.training.step import train_step

BETA = 0.2
BOUND = 1e-4
"""Relative, of fp32 sums in another order, after updates. Factors of sequences differ by more than a half."""
TALKS = Talks(0)
PAIRS = [(1, 2), (3, 4), (6, 7), (7, 3)]
"""Conversations of a row, the better one first; the first row has no padding."""
RUN = {**PACKED, "lr_warmup_iters": 0, "dpo_beta": BETA}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "pp": {"pp": 2, "micro_batch_size": 1},
    "aligned": {"dp": 2, "precision_align": "eager"},
    "packed": {"dp": 2},
}


class Pairs(Talks):
    """Talks in which neighbours are a pair."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        super().__init__(0)
        self.order = np.array(pairs).flatten()
        self.sizes = self.sizes[self.order]

    def conversation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return super().conversation(self.order[index])


class Step:
    """The pairs, in their order, as the batches of each step."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def step(self, iteration: int) -> list[Batch]:
        return self._reader.step(0)


def train_everywhere(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, float]]:
    """By layout: loss and norm of each step, the last margin, the evaluation of three of the four pairs."""
    found = {}
    for name, changes in LAYOUTS.items():
        config = small_run(
            **RUN | changes, objective="dpo", output_path=str(folder / name), cache_dir=str(folder / name)
        )
        run = build_seeded_run(config, folder)
        own = {
            "dp_rank": run.groups.dp.rank(),
            "dp_size": run.groups.dp.size(),
            "zigzag": Zigzag.of(run.groups.cp),
        }
        own |= {
            "micro_batch_size": config.training.micro_batch_size,
            "global_batch_size": 4,
            "seed": 1,
            "shuffle": False,
        }
        objective = Preference(config)
        sources = [PairSource(Pairs(PAIRS), LENGTH, is_packed=name == "packed")]
        sources += [PairSource(Pairs(PAIRS[:3]), LENGTH, is_packed=name == "packed", first=8)]
        sources[1].source.fingerprint = "three"
        objective.sets = sources
        train, valid = (BatchReader(source, **own) for source in sources)
        run.data = RunData(objective, Step(train), {"pairs": valid})
        (folder / name).mkdir(exist_ok=True)
        objective.prepare(run)
        numbers = {}
        for iteration in range(run.config.training.train_iters):
            result = train_step(run, iteration)
            loss, numbers["margin"] = max_over_world(
                [result.loss, result.extra_metrics["rewards/margins"]], run.device
            )
            numbers |= {f"loss {iteration}": loss, f"norm {iteration}": result.grad_norm}
        found[name] = numbers | evaluate(run)
        new_job()
    return found


def log_probability(model: Any, index: int) -> torch.Tensor:
    """Of the learned tokens of a conversation, by transformers."""
    ids, learned = (torch.from_numpy(part) for part in TALKS.conversation(index))
    labels = torch.where(learned[1:], ids[1:].long(), -100)
    return -F.cross_entropy(model(ids[None, :-1].long()).logits[0], labels, reduction="sum")


@pytest.mark.long
def test_factors_of_sequences_follow_from_their_losses_in_any_layout(tmp_path: Path) -> None:
    model, seen = hf_llama(small_run(), tmp_path), list[torch.Tensor]()
    with torch.no_grad():
        reference = [log_probability(model, index) for index in range(len(TALKS.sizes))]

    def loss(model: Any, *_: Any, number: int = 4) -> torch.Tensor:
        gains = [[log_probability(model, one) - reference[one] for one in pair] for pair in PAIRS[:number]]
        seen.append(torch.stack([better - worse for better, worse in gains]))
        return -F.logsigmoid(BETA * seen[-1]).mean()

    losses, norms, trained = transformers_steps(small_run(**RUN), tmp_path, loss_of=loss)
    factors, margin = torch.sigmoid(-BETA * seen[-1]), BETA * seen[-1].mean().item()
    assert factors.max() > 1.5 * factors.min()
    steps = {f"{name} {k}": x for name, own in (("loss", losses), ("norm", norms)) for k, x in enumerate(own)}
    last = {"valid_loss": loss(trained, number=3).item(), "valid_margin": BETA * seen[-1].mean().item()}
    last["valid_accuracy"] = (seen[-1] > 0).float().mean().item()
    expected = {**steps, "margin": margin, **last, "valid_pairs": 3}
    first, second = run_distributed(train_everywhere, 2, tmp_path)
    assert first == second, "all ranks know the numbers"
    for name, found in first.items():
        assert found["loss 0"] == torch.tensor(2.0).log().item(), f"{name}: nothing has changed yet"
        assert found == pytest.approx(expected, rel=BOUND), name
