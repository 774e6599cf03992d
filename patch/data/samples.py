"""Samples, micro-batches, and the interface of a data set that has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from patch.distributed.context_group import Zigzag


class Sample(NamedTuple):
    """S tokens of one sequence, or of several that are packed; the labels are already shifted."""

    tokens: torch.Tensor
    """int64 [S]."""
    labels: torch.Tensor
    """int64 [S]: labels[i] follows tokens[i]."""
    loss_mask: torch.Tensor
    """float32 [S]: 1 where the label is learned."""
    lengths: torch.Tensor | None = None
    """int32 [n]: tokens of each packed sequence, in their order; the sum is S. None: it is one sequence."""


def lengths_between(ends: torch.Tensor) -> torch.Tensor:
    """int32 [n]: tokens of each sequence in a sample.

    Args:
        ends: bool [S]: whether a token is the last of its sequence; that of the sample always is.
    """
    starts = torch.nonzero(ends[:-1]).flatten() + 1
    return torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), len(ends))]).diff().int()


class Batch(NamedTuple):
    """One micro-batch on the CPU: the fields of Sample, stacked to [B, S], or of a CP rank [B, S / CP]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    """int32 [n + 1]: where the packed sequences begin and end among the B * S tokens, counted row after row,
    with 0 and B * S. No sequence goes over the end of a row. None: each row is one sequence."""


def collate(samples: Sequence[Sample]) -> Batch:
    """Samples of equal length S as one micro-batch, in their order; also a DataLoader's `collate_fn`.

    If one of them has several sequences, the others count as one sequence of S tokens each.
    """
    tokens = torch.stack([sample.tokens for sample in samples])
    labels = torch.stack([sample.labels for sample in samples])
    loss_mask = torch.stack([sample.loss_mask for sample in samples])
    if all(sample.lengths is None for sample in samples):
        return Batch(tokens, labels, loss_mask)
    whole = torch.tensor([tokens.shape[1]], dtype=torch.int32)
    lengths = [whole if sample.lengths is None else sample.lengths for sample in samples]
    ends = torch.cat(lengths).cumsum(0, dtype=torch.int32)
    return Batch(tokens, labels, loss_mask, torch.cat([ends.new_zeros(1), ends]))


def cut_batch(batch: Batch, zigzag: Zigzag) -> Batch:
    """A context-parallel rank's part [B, S / CP] of each row; `cu_seqlens` stay those of the whole rows."""
    tokens, labels, loss_mask = (zigzag.cut(tensor, 1) for tensor in batch[:3])
    return Batch(tokens, labels, loss_mask, batch.cu_seqlens)


class StepWork(NamedTuple):
    """The data of one step. It is read and counted while the previous step ends."""

    iteration: int
    """Counted from 0."""
    batches: list[Batch]
    """This rank's micro-batches."""
    tokens: float
    """Learned tokens of the global batch: the sum over all ranks."""
    attended_pairs: float
    """Attended pairs of the global batch's packed sequences (`patch.plan`); 0 without packing."""


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

    def place(self, index: int) -> str:
        """Where a sample comes from, for people: its file and row or document, as far as that is known."""
