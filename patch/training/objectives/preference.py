"""Objectives of preferred and rejected answers, as in TRL.

    DPO      arXiv:2305.18290   pairs, by the sums of log-probabilities beside those of the start weights
    SimPO    arXiv:2405.14734   pairs, by the means over tokens, with a margin; no reference
    ORPO     arXiv:2403.07691   pairs, by the odds of these means, beside the chosen answer's SFT loss
    KTO      arXiv:2402.01306   single answers with a label, against a reference point

KTO's reference point is the KL divergence from the start weights, estimated from mismatched answers: each
prompt of the global batch with the answer of the row before it in its set. It is computed without gradients
before the step, so all micro-batches on all ranks have the same one. TRL pairs within the micro-batch of one
process.

Source of the losses: `DPOTrainer`, `KTOTrainer`, and of `trl.experimental` `CPOTrainer` and `ORPOTrainer`, of
TRL 1.16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from patch.data import Batch
from patch.data.packing import mismatched
from patch.distributed.collectives import sum_over
from patch.training.evaluation import evaluating, forward_only
from patch.training.objectives.objective import Objective
from patch.training.objectives.reference import ReferenceObjective

if TYPE_CHECKING:
    from patch.training.setup import Run

_LARGEST_LOG = -1e-7
"""The logarithm of the largest probability whose odds are finite in float32."""
_EVALUATED = {"accuracy": "rewards/accuracies", "kl": "kl", "loss": "loss", "margin": "rewards/margins"}
"""Metrics of an evaluation, and the reported values from which they come."""


class Scores(NamedTuple):
    """Values of the n sequences of a micro-batch, [n] each."""

    batch: Batch
    sums: torch.Tensor
    """Log-probabilities of the learned tokens."""
    values: torch.Tensor
    """Values that are compared; beta times a value is a reward."""
    margins: torch.Tensor
    """Rewards, minus those of the following sequences."""


class AnswerObjective(Objective):
    """A mean loss over pairs of a chosen and a rejected sequence, or over answers of both kinds.

    The rejected sequence follows the chosen sequence of its pair, so neighbours are compared.
    """

    unit, has_token_losses = "pairs", True
    reported: Sequence[str] = (
        "loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected",
        "rewards/accuracies",
    )  # fmt: skip
    """TRL's names."""

    def values(self, sums: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the values [n] that are compared, from the sums of the sequences' log-probabilities.

        Beta times a value is a reward.
        """
        return sums / self.learned(batch)

    def losses(self, of: Scores) -> torch.Tensor:
        """Return the loss of each pair at its chosen sequence, or of each answer, as [n]."""
        raise NotImplementedError

    def learned(self, batch: Batch) -> torch.Tensor:
        """Return the number of learned tokens of each sequence, at least 1."""
        return self.sums_of_sequences(batch.loss_mask, batch).clamp(min=1)

    def shares(self, batch: Batch, divisor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of each sequence in a mean over chosen and in a mean over rejected sequences."""
        sign, count = batch.of_sequences["sign"], divisor * self.groups.cp.size()
        return sign.clamp(min=0) / count, sign.clamp(max=0) / -count

    def count(self, batch: Batch) -> float:
        """Return the number of pairs, or of answers, divided by CP."""
        chosen, rejected = (each.sum().item() for each in self.shares(batch, 1.0))
        return chosen if self.unit == "pairs" else chosen + rejected

    def global_mean(self, run: Run, values: Sequence[torch.Tensor]) -> float:
        """Return the mean of the micro-batches' values [n] over the global batch; 0 without values."""
        sums = [sum(each.sum().item() for each in values), sum(map(len, values))]
        total, number = sum_over(run.groups.dp, sums, run.device)
        return total / max(number, 1)

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """Return means, and `sums`: the summed log-probabilities of each sequence."""
        beta, shares = self.config.training.dpo_beta, self.shares(batch, divisor)
        sums = self.sums_of_sequences(-output * batch.loss_mask, batch)
        values = self.values(sums, batch)
        logps = sums if isinstance(self, ReferenceObjective) else values
        margins = beta * (values - values.roll(-1))
        weights = shares[0] if self.unit == "pairs" else sum(shares)
        chosen, rejected = (beta * (own * values).sum() for own in shares)
        return {
            "loss": (weights * self.losses(Scores(batch, sums, values, margins))).sum(),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (shares[0] * (margins > 0)).sum(),
            "logps/chosen": (shares[0] * logps).sum(),
            "logps/rejected": (shares[1] * logps).sum(),
            "sums": sums,
        }

    def evaluated(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return loss, reward margin, and accuracy (the share of pairs with a margin above 0) or `kl`."""
        found = self.logged(means)
        return {f"valid_{key}": found[name] for key, name in _EVALUATED.items() if name in found}


class Preference(ReferenceObjective, AnswerObjective):
    """DPO."""

    def losses(self, of: Scores) -> torch.Tensor:
        """Return the losses of `--dpo-loss-type`, and the SFT loss of `--dpo-sft-weight`."""
        training, smoothing = self.config.training, self.config.training.dpo_label_smoothing
        if training.dpo_loss_type == "ipo":
            means = of.values / self.learned(of.batch)
            losses = (means - means.roll(-1) - 1 / (2 * training.dpo_beta)) ** 2
        elif training.dpo_loss_type == "hinge":
            losses = torch.relu(1 - of.margins)
        elif training.dpo_loss_type == "robust":
            flipped = smoothing * F.logsigmoid(-of.margins)
            losses = (flipped - (1 - smoothing) * F.logsigmoid(of.margins)) / (1 - 2 * smoothing)
        else:
            losses = -F.logsigmoid(of.margins)
        if training.dpo_sft_weight:
            losses = losses - training.dpo_sft_weight * of.sums / self.learned(of.batch)
        return losses


class SimpleMargin(AnswerObjective):
    """SimPO: TRL's CPO with `loss_type="simpo"` and `cpo_alpha=0`."""

    def losses(self, of: Scores) -> torch.Tensor:
        """Ask for a margin of `--simpo-gamma`."""
        return -F.logsigmoid(of.margins - self.config.training.simpo_gamma)


class OddsRatio(AnswerObjective):
    """ORPO.

    The SFT loss is the mean over all tokens of the chosen sequences of a global batch, prompts included.
    """

    reported = (*AnswerObjective.reported, "nll_loss")
    _tokens_of_a_pair = 1.0
    """Tokens of the chosen sequences of the global batch, divided by its pairs."""

    def before_step(self, run: Run, batches: list[Batch]) -> None:
        """Count the tokens of the chosen sequences."""
        found = []
        for batch in batches:
            assert batch.cu_seqlens is not None, "a row has two sequences"
            found.append(batch.cu_seqlens.diff()[batch.of_sequences["sign"] > 0])
        self._tokens_of_a_pair = self.global_mean(run, found) or 1.0

    def losses(self, of: Scores) -> torch.Tensor:
        """Compare the odds p / (1 - p), where p is the mean probability of a learned token."""
        means = of.values.clamp(max=_LARGEST_LOG)  # padding has 0
        odds = means - torch.log(-torch.expm1(means))
        return -self.config.training.dpo_beta * F.logsigmoid(odds - odds.roll(-1))

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """Add the SFT loss."""
        report, (shares, _) = super().report(output, batch, divisor), self.shares(batch, divisor)
        nll = (shares * self.sums_of_sequences(output, batch)).sum() / self._tokens_of_a_pair
        return {**report, "loss": report["loss"] + nll, "nll_loss": nll}


class Kto(ReferenceObjective, AnswerObjective):
    """KTO."""

    unit = "rows"
    reported = (*AnswerObjective.reported[:-1], "kl", "desirable")
    """TRL's names, and the share of desirable answers."""
    _kl, _lost = 0.0, torch.zeros(0, dtype=torch.int64)
    """The reference point of the global batch; the numbers of answers whose part in it is not finite."""

    def passes(self, batches: list[Batch]) -> list[list[Batch]]:
        """Return the micro-batches, and those of the mismatched answers."""
        return [batches, [mismatched(batch) for batch in batches]]

    def before_step(self, run: Run, batches: list[Batch]) -> None:
        """Compute the reference point with the current weights."""
        _, others = self.passes(batches)
        with evaluating(run) if torch.is_grad_enabled() else nullcontext():
            reports = forward_only(run, others)
        found, lost = [], [Kto._lost.to(run.device)]
        for batch, report in zip((each.to(run.device) for each in others), reports, strict=False):
            is_real, gains = batch.of_sequences["sign"] != 0, self.values(report["sums"], batch)
            found.append(gains[is_real & gains.isfinite()])
            lost.append(batch.of_sequences["number"][is_real & ~gains.isfinite()] - 1)
        self._kl, self._lost = max(self.global_mean(run, found), 0.0), torch.cat(lost)

    def losses(self, of: Scores) -> torch.Tensor:
        """Return the loss of each answer; NaN if its mismatched answer is not finite."""
        training = self.config.training
        sign, number = (of.batch.of_sequences[name] for name in ("sign", "number"))
        losses = 1 - torch.sigmoid(sign * training.dpo_beta * (of.values - self._kl))
        is_lost = (sign != 0) & torch.isin(number, self._lost.to(number.device))
        losses = losses.masked_fill(is_lost, math.nan)
        return torch.where(sign > 0, training.desirable_weight, training.undesirable_weight) * losses

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """Add the reference point and the share of desirable answers."""
        report, (good, bad) = super().report(output, batch, divisor), self.shares(batch, divisor)
        return {**report, "kl": self._kl * (good + bad).sum(), "desirable": good.sum()}

    def logged(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return rewards and log-probabilities as means over the answers of one kind; 0 if there is none."""
        found, share = dict(means), means["desirable"]
        if math.isfinite(share):
            for kind, size in (("chosen", share), ("rejected", 1 - share)):
                for name in ("rewards", "logps"):
                    found[f"{name}/{kind}"] /= max(size, 1e-6)
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found


CLASSES: dict[str, type[AnswerObjective]] = {
    "dpo": Preference, "orpo": OddsRatio, "simpo": SimpleMargin, "kto": Kto,
}  # fmt: skip
"""The classes by name of `--objective`."""
