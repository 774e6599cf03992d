"""What training minimises: one object says which rows are read, how they are counted, what their loss is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from patch.config.schema import RunConfig
from patch.data import Batch, DataSets, Sample, build_datasets, collate
from patch.model import LearnedTokens, LlamaModel, PackedSequences, sum_aligned
from patch.storage.names import DATA_INDEX_FOLDER

_LARGEST_EXPONENT = 700.0
"""exp of more is no float."""


class Objective:
    """The mean of the labels' losses by their weights (`Sample.loss_mask`): that of SFT and of pre-training.

    Both are this class, because only their data sets differ. Another objective overrides what it has
    otherwise.

    Args:
        config: the run.
    """

    unit = "tokens"
    """What `count` counts: the metric `valid_tokens` is named after it."""
    reported: Sequence[str] = ("loss",)
    """The names of what `report` gives; the loss is the first one."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._is_aligned = config.model.precision_align is not None

    def build_datasets(self, tokenizer: Any, num_train_samples: Callable[[int], int]) -> DataSets:
        """Read the data sets of the run; a collective over the job.

        Args:
            tokenizer: encodes raw rows.
            num_train_samples: how many samples the run takes, given those of one pass over the training sets.
        """
        config = self.config
        return build_datasets(
            config.data, config.model, tokenizer, sft=config.training.sft, seed=config.training.seed,
            num_train_samples=num_train_samples,
            index_folder=Path(config.checkpoint.output_path) / DATA_INDEX_FOLDER,
        )  # fmt: skip

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """A micro-batch of whole samples, on the host; a context-parallel rank then gets its part of it."""
        return collate(samples)

    def count(self, batch: Batch) -> float:
        """What a micro-batch adds to the divisor of its step.

        The divisor is the sum over the global batch, known before the first forward. A context-parallel rank
        counts its part of the rows.

        Args:
            batch: on the CPU.
        """
        return batch.loss_mask.sum(dtype=torch.float64).item()

    def forward(
        self, model: LlamaModel, batch: Batch, packed: PackedSequences | None, gradient: float
    ) -> torch.Tensor:
        """The output of a pipeline stage.

        Args:
            model: the stage.
            batch: on its device.
            packed: the sequences of packed rows.
            gradient: what backward will bring for the sum of losses: loss scale / divisor.
        """
        learned = None if self._is_aligned else LearnedTokens(batch.loss_mask, gradient)
        # RoPE needs no position ids, causal attention no mask.
        return model(
            batch.tokens, None, None, labels=batch.labels, loss_mask=learned, packed_seq_params=packed
        )

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """A micro-batch's share of the loss and of what else is reported, as sums over the global batch.

        Args:
            output: of the last stage: the summed loss; aligned: the losses [B, S], for Hugging Face's order
                of summation.
            batch: on the device.
            divisor: see `count`; 1 in an evaluation, which divides the sums of a whole set.
        """
        mask = batch.loss_mask
        return {"loss": (sum_aligned(output * mask, mask) if self._is_aligned else output) / divisor}

    def evaluated(self, means: Mapping[str, float]) -> dict[str, float]:
        """The metrics of an evaluation, `valid_loss` among them.

        Args:
            means: of what `report` gives, over a validation set or all.
        """
        loss = means["loss"]
        return {"valid_loss": loss, "valid_ppl": math.exp(min(loss, _LARGEST_EXPONENT))}
