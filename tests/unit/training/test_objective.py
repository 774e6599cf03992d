"""Preferences in any layout: factors of sequences follow from the losses of their tokens.

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

from patch.config.choices import ROW_KINDS
from patch.data import Batch, BatchReader
from patch.data.packing import SOURCES
from patch.distributed.collectives import max_over_world
from patch.distributed.context_group import Zigzag
from patch.training import OBJECTIVES
from patch.training.evaluation import evaluate
from patch.training.setup import RunData
from patch.training.step import train_step

BETA = 0.2
BOUND = 1e-4
"""Relative, of fp32 sums in another order, after updates. Factors of sequences differ by more than a half."""
TALKS = Talks(0)
PAIRS = [(1, 2), (3, 4), (6, 7), (7, 3)]
"""Conversations of a row, the better one first; the first row has no padding."""
ORDER = np.array(PAIRS).flatten()
"""Conversations of KTO's rows, every second one undesirable; packed they fill four rows."""
RUN = {**PACKED, "lr_warmup_iters": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "pp": {"pp": 2, "micro_batch_size": 1},
    "aligned": {"dp": 2, "precision_align": "eager"},
    "packed": {"dp": 2},
}


class Pairs(Talks):
    """Talks in which neighbours are a pair, or every second one is undesirable."""

    def __init__(self, number: int) -> None:
        super().__init__(0)
        self.sizes = self.sizes[ORDER[: 2 * number]]

    def conversation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids, learned = super().conversation(ORDER[index])
        return ids, np.append(index % 2 == 0, learned[1:])

    def place(self, index: int) -> str:
        return f"talk {index}"


class Step:
    """The pairs, in their order, as the batches of each step."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def step(self, iteration: int) -> list[Batch]:
        return self._reader.step(0)


def train_everywhere(rank: int, world_size: int, folder: Path, kind: str) -> dict[str, dict[str, float]]:
    """By layout: loss and norm of each step, the last margin, the evaluation of three of the four pairs."""
    found = {}
    for name, changes in LAYOUTS.items():
        place = f"{folder}/{kind} {name}"
        own: dict[str, Any] = {"objective": kind, "dpo_beta": BETA, "output_path": place, "cache_dir": place}
        if kind == "kto":
            own |= {"undesirable_weight": 0.1, "global_batch_size": 4 if name == "packed" else 8}
        config = small_run(**RUN | changes | own)
        run = build_seeded_run(config, folder)
        own = {
            "dp_rank": run.groups.dp.rank(),
            "dp_size": run.groups.dp.size(),
            "zigzag": Zigzag.of(run.groups.cp),
        }
        own |= {
            "micro_batch_size": config.training.micro_batch_size,
            "global_batch_size": config.training.global_batch_size,
            "seed": 1,
            "shuffle": False,
        }
        objective, source = OBJECTIVES[kind](config), SOURCES[config.row_kind]
        sources = [source(Pairs(4), LENGTH, is_packed=name == "packed")]
        first = 2 * len(sources[0].sizes)
        sources += [source(Pairs(3), LENGTH, is_packed=name == "packed", first=first)]
        sources[1].source.fingerprint = "three"
        objective.sets = sources
        train, valid = (BatchReader(source, **own) for source in sources)
        run.data = RunData(objective, Step(train), {"three": valid})
        Path(config.checkpoint.output_path).mkdir(exist_ok=True)
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


def log_probability(model: Any, ids: np.ndarray, learned: np.ndarray) -> torch.Tensor:
    """Of the learned tokens of a conversation, by transformers."""
    wide = torch.from_numpy(ids).long()
    labels = torch.where(torch.from_numpy(learned[1:]), wide[1:], -100)
    return -F.cross_entropy(model(wide[None, :-1]).logits[0], labels, reduction="sum")


def with_answer_before(number: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A prompt of the first `size` conversations, with the answer of the one before it."""
    (ids, learned), (others, answered) = (TALKS.conversation(ORDER[k % size]) for k in (number, number - 1))
    whole = np.append(ids[~learned], others[answered])
    return whole, np.arange(len(whole)) >= (~learned).sum()


class Oracle:
    """The losses in plain torch; `margin` is that of the last call."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.margins = name, torch.zeros(0)
        with torch.no_grad():
            self.before = self.sums(model)
            self.mismatched_before = {size: self.mismatched(model, size) for size in (6, 8)}

    def sums(self, model: Any) -> torch.Tensor:
        return torch.stack([log_probability(model, *TALKS.conversation(index)) for index in ORDER])

    def mismatched(self, model: Any, size: int) -> torch.Tensor:
        talks = (with_answer_before(number, size) for number in range(size))
        return torch.stack([log_probability(model, *talk) for talk in talks])

    def __call__(self, model: Any, *_: Any, number: int = 4) -> torch.Tensor:
        sums, size = self.sums(model)[: 2 * number], 2 * number
        gains = sums - self.before[:size]
        if self.name == "kto":
            kl = (self.mismatched(model, size) - self.mismatched_before[size]).mean().detach().clamp(min=0)
            self.kl, self.margins = kl, BETA * (gains[::2].mean() - gains[1::2].mean())
            good, bad = BETA * (gains[::2] - kl), BETA * (kl - gains[1::2])
            return torch.cat([1 - torch.sigmoid(good), 0.1 * (1 - torch.sigmoid(bad))]).mean()
        talks = [TALKS.conversation(index) for index in ORDER[:size]]
        means = sums / torch.tensor([learned[1:].sum() for _, learned in talks])
        chosen, rejected = (gains if self.name == "dpo" else means).view(-1, 2).T
        self.margins = BETA * (chosen - rejected)
        if self.name == "dpo":
            return -F.logsigmoid(self.margins).mean()
        if self.name == "simpo":
            return -F.logsigmoid(self.margins - 0.5).mean()
        odds, others = (torch.log(each.exp() / (1 - each.exp())) for each in (chosen, rejected))
        texts = [log_probability(model, ids, np.ones(len(ids), bool)) for ids, _ in talks[::2]]
        nll = -sum(texts) / sum(len(ids) - 1 for ids, _ in talks[::2])
        return nll - BETA * F.logsigmoid(odds - others).mean()

    def numbers(self) -> dict[str, float]:
        """The metrics of an evaluation beside the loss."""
        found = {"valid_margin": self.margins.mean().item()}
        if self.name == "kto":
            return found | {"valid_kl": self.kl.item(), "valid_rows": 6}
        return found | {"valid_accuracy": (self.margins > 0).float().mean().item(), "valid_pairs": 3}


@pytest.mark.long
@pytest.mark.parametrize("name", ROW_KINDS)
def test_factors_of_sequences_follow_from_their_losses_in_any_layout(name: str, tmp_path: Path) -> None:
    loss = Oracle(name, hf_llama(small_run(), tmp_path))
    losses, norms, trained = transformers_steps(small_run(**RUN), tmp_path, loss_of=loss)
    steps = (("loss", losses), ("norm", norms))
    expected = {f"{key} {k}": x for key, own in steps for k, x in enumerate(own)}
    expected["margin"] = loss.margins.mean().item()
    assert name != "kto" or loss.kl > 0
    expected["valid_loss"] = loss(trained, number=3).item()
    expected |= loss.numbers()
    first, second = run_distributed(train_everywhere, 2, tmp_path, name)
    assert first == second, "all ranks know the numbers"
    for layout, found in first.items():
        assert name != "dpo" or found["loss 0"] == torch.tensor(2.0).log().item(), "nothing has changed yet"
        assert found == pytest.approx(expected, rel=BOUND), layout
