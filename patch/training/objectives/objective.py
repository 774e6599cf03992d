"""The objective of training: an object that defines the rows, their count and their loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import RunConfig
from patch.data import Batch, BatchReader, DataSets, Sample, build_datasets, collate
from patch.data.samples import SampleSource
from patch.distributed.context_group import Zigzag
from patch.model import LikeliestTokens, LlamaModel, LossMask, PackedSequences, ScoredTokens, sum_aligned
from patch.storage.names import DATA_INDEX_FOLDER

if TYPE_CHECKING:
    from patch.training.setup import Run

_LARGEST_EXPONENT = 700.0
"""exp of a larger number overflows a float."""


class Objective:
    """The mean of the token losses weighted by `Sample.loss_mask`: the objective of SFT and of pre-training.

    SFT and pre-training share this class, because only their data sets differ.
    """

    unit = "tokens"
    """The unit of `count`, as in the metric `valid_tokens`."""
    reported: Sequence[str] = ("loss",)
    """The names of the values that `report` returns for reduction; the loss is first."""
    has_token_losses = False
    """Whether `report` gets the loss of each token [B, S], masked or not, with autograd. Otherwise it gets
    the weighted sum, whose gradient is known before forward: one matrix product less in the output layer."""
    groups: ProcessGroupCollection
    """This rank's process groups, set by `prepare`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._is_aligned = config.model.precision_align is not None

    def show_data(self, stream: TextIO) -> int | None:
        """Print the run's data for `--dry-run`; return the samples per epoch, or None if they are not known.

        This runs without process groups and writes no files.
        """
        from patch.data.preview.preview import show_data  # a worker does not need it

        config, output = self.config, Path(self.config.checkpoint.output_path)
        return show_data(
            config.data, config.model, config.tokenizer_folder, sft=config.training.sft, output=output,
            stream=stream, row_kind=config.row_kind,
        )  # fmt: skip

    def build_datasets(self, tokenizer: Any, num_train_samples: Callable[[int], int]) -> DataSets:
        """Read the data sets of the run; a collective over the job.

        `num_train_samples` maps the samples per epoch to the samples that the run consumes.
        """
        config = self.config
        return build_datasets(
            config.data, config.model, tokenizer, sft=config.training.sft, seed=config.training.seed,
            num_train_samples=num_train_samples,
            index_folder=Path(config.checkpoint.output_path) / DATA_INDEX_FOLDER, row_kind=config.row_kind,
        )  # fmt: skip

    def goes_on(self, run: Run) -> bool:
        """Return whether a resumed run can do without its start weights; a collective over the job.

        If False, `prepare` runs with the start weights, and the checkpoint's weights are loaded afterwards.
        """
        return True

    def prepare(self, run: Run) -> None:
        """Prepare on all ranks before the first step, with the start weights or the resumed weights.

        An objective may compute a reference here (`run_schedule` inside `evaluating`), or read it on resume.
        """
        self.groups = run.groups

    def before_step(self, run: Run, batches: list[Batch]) -> None:
        """Compute what the losses of a global batch share; a collective over the job.

        This runs before the first forward of each step and of each global batch of an evaluation.

        Args:
            batches: this rank's micro-batches, on the host.
        """

    def reader(
        self, source: SampleSource, groups: ProcessGroupCollection, *, shuffle: bool = False, ahead: int = 0
    ) -> BatchReader:
        """Return the reader of this rank's micro-batches of a set; see `BatchReader`."""
        training = self.config.training
        return BatchReader(
            source, micro_batch_size=training.micro_batch_size, global_batch_size=training.global_batch_size,
            dp_rank=groups.dp.rank(), dp_size=groups.dp.size(), seed=training.seed, shuffle=shuffle,
            zigzag=Zigzag.of(groups.cp), ahead=ahead, make_batch=self.collate,
        )  # fmt: skip

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Build a micro-batch of whole samples on the host; it is then cut for each context-parallel rank."""
        return collate(samples)

    def count(self, batch: Batch) -> float:
        """Return the contribution of a micro-batch (on the CPU) to the divisor of its step.

        The divisor is the sum over the global batch, known before the first forward. A context-parallel rank
        counts its part of the rows.
        """
        return batch.loss_mask.sum(dtype=torch.float64).item()

    def forward(
        self, model: LlamaModel, batch: Batch, packed: PackedSequences | None, gradient: float
    ) -> torch.Tensor:
        """Return the output of a pipeline stage.

        Args:
            batch: the micro-batch, on the device.
            packed: the sequences of packed rows.
            gradient: the gradient that backward gets for the sum of losses: loss scale / divisor.
        """
        asked = self.asked(batch, gradient)
        # RoPE needs no position ids, causal attention no mask.
        return model(batch.tokens, None, None, labels=batch.labels, loss_mask=asked, packed_seq_params=packed)

    def asked(self, batch: Batch, gradient: float) -> LossMask | LikeliestTokens | ScoredTokens | None:
        """Return what the last stage computes of each token. Arguments as in `forward`."""
        known = None if self.has_token_losses else gradient
        return None if self._is_aligned else LossMask(batch.loss_mask, known)

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """Return a micro-batch's share of the loss and of the other reported values; the shares are summed.

        Args:
            output: output of the last stage: the summed loss. With `has_token_losses` or precision_align, the
                losses [B, S]; precision_align needs them for Hugging Face's order of summation.
            batch: the micro-batch, on the device.
            divisor: see `count`; 1 in an evaluation, which divides the sums of a whole set.
        """
        mask = batch.loss_mask
        return {"loss": (sum_aligned(output * mask, mask) if self._is_aligned else output) / divisor}

    def logged(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics of a step, including `loss`, from its means; -inf on stages before the last."""
        return means

    def evaluated(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics, including `valid_loss`, from the means over one validation set or all sets."""
        loss = means["loss"]
        return {"valid_loss": loss, "valid_ppl": math.exp(min(loss, _LARGEST_EXPONENT))}

    def sums_of_sequences(self, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Sum values [B, S] over each of the batch's n sequences; return [n] on each context-parallel rank.

        Each context-parallel rank then computes the same result, and must report 1 / CP of it.
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


class TokenQuery(Objective):
    """Reports what is asked of each token as `found`; nothing is learned."""

    def __init__(self, config: RunConfig, ask: Callable[[Batch], LikeliestTokens | ScoredTokens]) -> None:
        super().__init__(config)
        self._ask = ask

    def asked(self, batch: Batch, gradient: float) -> LikeliestTokens | ScoredTokens:
        """See `Objective`."""
        return self._ask(batch)

    def report(self, output: torch.Tensor, batch: Batch, divisor: float) -> Mapping[str, torch.Tensor]:
        """Return the output itself, and a zero loss that upstream's schedules require."""
        return {"loss": output.new_zeros(()), "found": output}
