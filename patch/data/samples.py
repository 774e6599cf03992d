"""Samples, micro-batches, and the interface of a data set that has them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Sample(NamedTuple):
    """One sequence of S tokens; the labels are already shifted."""

    tokens: torch.Tensor
    """int64 [S]."""
    labels: torch.Tensor
    """int64 [S]: labels[i] follows tokens[i]."""
    loss_mask: torch.Tensor
    """float32 [S]: 1 where the label is learned."""


class Batch(NamedTuple):
    """One micro-batch on the CPU: the fields of Sample, stacked to [B, S]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor


class StepWork(NamedTuple):
    """The data of one step. It is read and counted while the previous step ends."""

    iteration: int
    """Counted from 0."""
    batches: list[Batch]
    """This rank's micro-batches."""
    tokens: float
    """Learned tokens of the global batch: the sum over all ranks."""


def learned_tokens(batches: list[Batch]) -> float:
    """Tokens of these micro-batches that the loss covers."""
    return sum(batch.loss_mask.sum().item() for batch in batches)


class SampleSource(Protocol):
    """A data set: samples of equal length, read by index."""

    @property
    def is_shuffled(self) -> bool:
        """Whether the source's own order is already random, so that training does not shuffle it again."""

    def __len__(self) -> int: ...  # noqa: D105

    def __getitem__(self, index: int) -> Sample: ...  # noqa: D105
