"""The objective of training: one object says which rows are read, how they count, and their loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import RunConfig
from patch.data import Batch, DataSets, Sample, build_datasets, collate
from patch.distributed.context_group import Zigzag
from patch.model import LearnedTokens, LlamaModel, PackedSequences, sum_aligned
from patch.storage.names import DATA_INDEX_FOLDER

if TYPE_CHECKING:
    from patch.training.setup import Run

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
    """The unit of `count`: the metric `valid_tokens` is named after it."""
    reported: Sequence[str] = ("loss",)
    """The names of what `report` reduces; the loss is the first one."""
    has_token_losses = False
    """Whether `report` gets each token's loss [B, S], learned or not, and autograd goes through it. Else it
    gets the weighted sum, whose gradient is known before forward: one product less in the output layer."""
    reads_pairs = False
    """Whether rows have a preferred answer and another one."""
    groups: ProcessGroupCollection
    """This rank's, from `prepare` on."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._is_aligned = config.model.precision_align is not None

    def show_data(self, stream: TextIO) -> int | None:
        """Print for `--dry-run` what the run reads; the samples of one pass over the training sets, if known.

        It runs without process groups, and writes no file.
        """
        from patch.data.preview import show_data  # a worker does not need it

        config, output = self.config, Path(self.config.checkpoint.output_path)
        return show_data(
            config.data, config.model, config.tokenizer_folder, sft=config.training.sft, output=output,
            stream=stream, pairs=self.reads_pairs,
        )  # fmt: skip

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
            index_folder=Path(config.checkpoint.output_path) / DATA_INDEX_FOLDER, pairs=self.reads_pairs,
        )  # fmt: skip

    def goes_on(self, run: Run) -> bool:
        """Whether a resumed run can do without the weights that it began with; a collective over the job.

        If not, `prepare` gets these, and those of the checkpoint are loaded after it.
        """
        return True

    def prepare(self, run: Run) -> None:
        """Called once on all ranks, with the weights that the run begins or goes on with, before any step.

        Here a reference is computed (`run_schedule` within `evaluating`) or, in a resumed run, read.
        """
        self.groups = run.groups

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """A micro-batch of whole samples, on the host; a context-parallel rank then gets its part of it."""
        return collate(samples)

    def count(self, batch: Batch) -> float:
        """The count that a micro-batch adds to the divisor of its step.

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
        known = None if self.has_token_losses else gradient
        learned = None if self._is_aligned else LearnedTokens(batch.loss_mask, known)
        # RoPE needs no position ids, causal attention no mask.
        return model(
            batch.tokens, None, None, labels=batch.labels, loss_mask=learned, packed_seq_params=packed
        )

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """A micro-batch's share of the loss and of what else is reported, as sums over the global batch.

        Args:
            output: of the last stage: the summed loss; with `has_token_losses` the losses [B, S], and also if
                aligned, for Hugging Face's order of summation.
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

    def sums_of_sequences(self, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The sums [n] of values [B, S] over the batch's n sequences, on each context-parallel rank.

        Each of these ranks then computes the same from them, and reports its share of it: 1 / CP.
        """
        cp, (rows, own) = self.groups.cp, values.shape
        ends = range(0, rows * own * cp.size() + 1, own * cp.size())
        borders = torch.tensor(ends) if batch.cu_seqlens is None else batch.cu_seqlens
        numbers = torch.arange(len(borders) - 1).repeat_interleave(borders.diff()).view(rows, -1)
        numbers = Zigzag.of(cp).cut(numbers, 1).flatten().to(values.device)
        sums = values.new_zeros(len(borders) - 1).index_add(0, numbers, values.flatten())
        total = sums.detach().clone()
        torch.distributed.all_reduce(total, group=cp)
        # The gradient of a sum over ranks is the sum of their gradients, which are equal.
        return total + cp.size() * (sums - sums.detach())
