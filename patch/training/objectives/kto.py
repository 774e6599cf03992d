"""KTO (arXiv:2402.01306) as in TRL: single answers that are desirable or not, against a reference point.

The reference point is the KL divergence from the start weights, estimated from mismatched answers: each
prompt of the global batch with the answer of the row before it in its set. It is computed without gradients
before the step, so all micro-batches on all ranks have the same one.

Source: `KTOTrainer` of TRL 1.16, which pairs within the micro-batch of one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from patch.config.schema import RunConfig
from patch.data import Batch
from patch.data.packing import mismatched
from patch.training.evaluation import evaluating, forward_only
from patch.training.objectives.reference import ReferenceObjective

if TYPE_CHECKING:
    from patch.training.setup import Run


class Kto(ReferenceObjective):
    """The mean loss over labelled answers."""

    unit = "rows"
    reported = (
        "loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected",
        "kl", "desirable",
    )  # fmt: skip
    """TRL's names, and the share of desirable answers. A reward is beta times a gain."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._kl = torch.zeros(())
        """The reference point of the global batch."""

    def passes(self, batches: list[Batch]) -> list[list[Batch]]:
        """Return the micro-batches, and those of the mismatched answers."""
        return [batches, [mismatched(batch) for batch in batches]]

    def before_step(self, run: Run, batches: list[Batch]) -> None:
        """Compute the reference point with the current weights."""
        _, others = self.passes(batches)
        with evaluating(run) if torch.is_grad_enabled() else nullcontext():
            reports = forward_only(run, others)
        total = torch.zeros(2, dtype=torch.float64, device=run.device)
        for batch, report in zip(others, reports, strict=False):
            own = batch.to(run.device)
            gains = self.gains(report["sums"], own)
            is_real = own.of_sequences["sign"].abs()
            total += torch.stack([(gains * is_real).sum(), is_real.sum()])
        torch.distributed.all_reduce(total, group=run.groups.dp)
        self._kl = (total[0] / total[1].clamp(min=1)).clamp(min=0).float()

    def count(self, batch: Batch) -> float:
        """Return the number of answers, divided by CP."""
        return (batch.of_sequences["sign"] != 0).sum().item() / self.groups.cp.size()

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """Return shares of means over answers, and `sums`: the summed log-probabilities of each sequence."""
        sign, training = batch.of_sequences["sign"], self.config.training
        sums = self.sums_of_sequences(-output * batch.loss_mask, batch)
        gains = self.gains(sums, batch)
        losses = 1 - torch.sigmoid(sign * training.dpo_beta * (gains - self._kl))
        count = divisor * self.groups.cp.size()
        good, bad = sign.clamp(min=0) / count, sign.clamp(max=0) / -count
        weights = good * training.desirable_weight + bad * training.undesirable_weight
        chosen, rejected = (training.dpo_beta * (own * gains).sum() for own in (good, bad))
        return {
            "loss": (weights * losses).sum(),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "logps/chosen": (good * sums).sum(),
            "logps/rejected": (bad * sums).sum(),
            "kl": self._kl * (good + bad).sum(),
            "desirable": good.sum(),
            "sums": sums,
        }

    def logged(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return rewards and log-probabilities as means over the answers of one kind; 0 if there is none."""
        found, share = dict(means), means["desirable"]
        if math.isfinite(share):
            for kind, size in (("chosen", share), ("rejected", 1 - share)):
                for name in ("rewards", "logps"):
                    found[f"{name}/{kind}"] /= max(size, 1e-6)
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found

    def evaluated(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return loss, reward margin and reference point."""
        found, names = self.logged(means), {"loss": "loss", "margin": "rewards/margins", "kl": "kl"}
        return {f"valid_{key}": found[name] for key, name in names.items()}
