"""Objectives of pairs, as in TRL: the chosen answer of a pair gains on the rejected one.

    DPO      arXiv:2305.18290   by the sums of log-probabilities, beside those of the start weights
    SimPO    arXiv:2405.14734   by the means over tokens, with a margin; no reference
    ORPO     arXiv:2403.07691   by the odds of these means, and the chosen sequence's SFT loss; no reference

Source of the losses: `DPOTrainer`, and of `trl.experimental` `CPOTrainer` and `ORPOTrainer`, of TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from patch.config.schema import RunConfig
from patch.data import Batch
from patch.distributed.collectives import sum_over
from patch.training.objectives.objective import Objective
from patch.training.objectives.reference import ReferenceObjective

if TYPE_CHECKING:
    from patch.training.setup import Run

_LARGEST_LOG = -1e-7
"""The logarithm of the largest probability whose odds are finite in float32."""


class Scores(NamedTuple):
    """Values of the n sequences of a micro-batch, [n] each."""

    sums: torch.Tensor
    """Log-probabilities of the learned tokens."""
    reported: torch.Tensor
    """Values whose means are `logps/chosen` and `logps/rejected`."""
    values: torch.Tensor
    """Values that are compared; beta times a value is a reward."""


class PairObjective(Objective):
    """A mean loss over pairs of a chosen and a rejected sequence."""

    unit, has_token_losses = "pairs", True
    reported: Sequence[str] = (
        "loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
        "logps/chosen", "logps/rejected",
    )  # fmt: skip
    """TRL's names."""

    def scores(self, sums: torch.Tensor, batch: Batch) -> Scores:
        """Return the scores of the sequences, from the sums of their log-probabilities."""
        means = sums / self.learned(batch)
        return Scores(sums, means, means)

    def losses(self, margins: torch.Tensor, scores: Scores, batch: Batch) -> torch.Tensor:
        """Return the loss of each pair [n], at its chosen sequence. `margins` are differences of rewards."""
        raise NotImplementedError

    def learned(self, batch: Batch) -> torch.Tensor:
        """Return the number of learned tokens of each sequence, at least 1."""
        return self.sums_of_sequences(batch.loss_mask, batch).clamp(min=1)

    def shares(self, batch: Batch, divisor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of each sequence in a mean over chosen and in a mean over rejected sequences."""
        sign, count = batch.of_sequences["sign"], divisor * self.groups.cp.size()
        return sign.clamp(min=0) / count, sign.clamp(max=0) / -count

    def count(self, batch: Batch) -> float:
        """Return the number of pairs, divided by CP."""
        return (batch.of_sequences["sign"] > 0).sum().item() / self.groups.cp.size()

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """Return means over pairs, and `sums`: the summed log-probabilities of each sequence.

        The rejected sequence follows the chosen sequence of its pair, so neighbours are compared.
        """
        beta = self.config.training.dpo_beta
        scores = self.scores(self.sums_of_sequences(-output * batch.loss_mask, batch), batch)
        margins = beta * (scores.values - scores.values.roll(-1))
        shares, others = self.shares(batch, divisor)
        return {
            "loss": (shares * self.losses(margins, scores, batch)).sum(),
            "rewards/chosen": beta * (shares * scores.values).sum(),
            "rewards/rejected": beta * (others * scores.values).sum(),
            "rewards/margins": (shares * margins).sum(),
            "rewards/accuracies": (shares * (margins > 0)).sum(),
            "logps/chosen": (shares * scores.reported).sum(),
            "logps/rejected": (others * scores.reported).sum(),
            "sums": scores.sums,
        }

    def evaluated(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return loss, reward margin, and the share of pairs whose chosen sequence has the larger reward."""
        names = {"valid_margin": "rewards/margins", "valid_accuracy": "rewards/accuracies"}
        return {"valid_loss": means["loss"]} | {key: means[name] for key, name in names.items()}


class Preference(PairObjective, ReferenceObjective):
    """DPO."""

    def scores(self, sums: torch.Tensor, batch: Batch) -> Scores:
        """Compare gains over the reference."""
        return Scores(sums, sums, self.gains(sums, batch))

    def losses(self, margins: torch.Tensor, scores: Scores, batch: Batch) -> torch.Tensor:
        """Return the losses of `--dpo-loss-type`, and the SFT loss of `--dpo-sft-weight`."""
        training, gains = self.config.training, scores.values
        smoothing = training.dpo_label_smoothing
        if training.dpo_loss_type == "ipo":
            means = gains / self.learned(batch)
            losses = (means - means.roll(-1) - 1 / (2 * training.dpo_beta)) ** 2
        elif training.dpo_loss_type == "hinge":
            losses = torch.relu(1 - margins)
        elif training.dpo_loss_type == "robust":
            flipped = smoothing * F.logsigmoid(-margins)
            losses = (flipped - (1 - smoothing) * F.logsigmoid(margins)) / (1 - 2 * smoothing)
        else:
            losses = -F.logsigmoid(margins)
        if training.dpo_sft_weight:
            losses = losses - training.dpo_sft_weight * scores.sums / self.learned(batch)
        return losses


class SimpleMargin(PairObjective):
    """SimPO: TRL's CPO with `loss_type="simpo"` and `cpo_alpha=0`."""

    def losses(self, margins: torch.Tensor, scores: Scores, batch: Batch) -> torch.Tensor:
        """Ask for a margin of `--simpo-gamma`."""
        return -F.logsigmoid(margins - self.config.training.simpo_gamma)


class OddsRatio(PairObjective):
    """ORPO.

    The SFT loss is the mean over all tokens of the chosen sequences of a global batch, prompts included.
    """

    reported = (*PairObjective.reported, "nll_loss")

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._tokens_of_a_pair = 1.0
        """Tokens of the chosen sequences of the global batch, divided by its pairs."""

    def before_step(self, run: Run, batches: list[Batch]) -> None:
        """Count the tokens of the chosen sequences."""
        tokens = 0.0
        for batch in batches:
            assert batch.cu_seqlens is not None, "a row has two sequences"
            tokens += batch.cu_seqlens.diff()[batch.of_sequences["sign"] > 0].sum().item()
        pairs = sum(map(self.count, batches)) * run.groups.cp.size()
        tokens, pairs = sum_over(run.groups.dp, [tokens, pairs], run.device)
        self._tokens_of_a_pair = max(tokens, 1.0) / max(pairs, 1.0)

    def losses(self, margins: torch.Tensor, scores: Scores, batch: Batch) -> torch.Tensor:
        """Compare the odds p / (1 - p), where p is the mean probability of a learned token."""
        means = scores.values.clamp(max=_LARGEST_LOG)  # padding has 0
        odds = means - torch.log(-torch.expm1(means))
        return -self.config.training.dpo_beta * F.logsigmoid(odds - odds.roll(-1))

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """Add the SFT loss."""
        report, (shares, _) = super().report(output, batch, divisor), self.shares(batch, divisor)
        nll = (shares * self.sums_of_sequences(output, batch)).sum() / self._tokens_of_a_pair
        return {**report, "loss": report["loss"] + nll, "nll_loss": nll}
