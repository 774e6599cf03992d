"""Samples, micro-batches, and the interface of a data set that has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from patch.device import send
from patch.distributed.context_group import Zigzag


class Sample(NamedTuple):
    """S tokens of one sequence, or of several that are packed; the labels are already shifted."""

    tokens: torch.Tensor
    """int64 [S]."""
    labels: torch.Tensor
    """int64 [S]: labels[i] follows tokens[i]."""
    loss_mask: torch.Tensor
    """float32 [S]: the label's weight in the loss: 1, or as an objective says; 0 where it is not learned."""
    lengths: torch.Tensor | None = None
    """int32 [n]: tokens of each packed sequence, in their order; the sum is S. None: it is one sequence."""
    further: Mapping[str, torch.Tensor] = {}
    """Further values of each token for an objective, by name: [S, ...]."""
    of_sequences: Mapping[str, torch.Tensor] = {}
    """Values of each sequence, by name: [n, ...], zeros in a sample that only fills up a batch."""


def lengths_between(ends: torch.Tensor) -> torch.Tensor:
    """int32 [n]: tokens of each sequence in a sample.

    Args:
        ends: bool [S]: whether a token is the last of its sequence; that of the sample always is.
    """
    starts = torch.nonzero(ends[:-1]).flatten() + 1
    return torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), len(ends))]).diff().int()


class Batch(NamedTuple):
    """One micro-batch: the fields of Sample, stacked to [B, S], or of a CP rank [B, S / CP]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    """int32 [n + 1]: where the packed sequences begin and end among the B * S tokens, counted row after row,
    with 0 and B * S. No sequence goes over the end of a row. None: each row is one sequence."""
    further: Mapping[str, torch.Tensor] = {}
    of_sequences: Mapping[str, torch.Tensor] = {}
    """[n, ...] of the batch's n sequences, which a CP rank has whole."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with the tensors of its tokens changed."""
        further = {name: change(tensor) for name, tensor in self.further.items()}
        tokens, labels, loss_mask = map(change, (self.tokens, self.labels, self.loss_mask))
        return Batch(tokens, labels, loss_mask, self.cu_seqlens, further, self.of_sequences)

    def to(self, device: torch.device) -> Batch:
        """The batch on a device, but for `cu_seqlens`, which the host reads."""
        of_sequences = {name: send(tensor, device) for name, tensor in self.of_sequences.items()}
        return self.each(lambda tensor: send(tensor, device))._replace(of_sequences=of_sequences)


def collate(samples: Sequence[Sample]) -> Batch:
    """Samples of equal length S as one micro-batch, in their order; also a DataLoader's `collate_fn`.

    If one of them has several sequences, the others count as one sequence of S tokens each.
    """
    names = ("tokens", "labels", "loss_mask")
    tokens, labels, loss_mask = (torch.stack([getattr(each, name) for each in samples]) for name in names)
    cu_seqlens = None
    if any(sample.lengths is not None for sample in samples):
        whole = torch.tensor([tokens.shape[1]], dtype=torch.int32)
        lengths = [whole if sample.lengths is None else sample.lengths for sample in samples]
        ends = torch.cat(lengths).cumsum(0, dtype=torch.int32)
        cu_seqlens = torch.cat([ends.new_zeros(1), ends])
    further = {name: torch.stack([each.further[name] for each in samples]) for name in samples[0].further}
    named = {name: [each.of_sequences[name] for each in samples] for name in samples[0].of_sequences}
    of_sequences = {name: torch.cat(tensors) for name, tensors in named.items()}
    return Batch(tokens, labels, loss_mask, cu_seqlens, further, of_sequences)


def cut_batch(batch: Batch, zigzag: Zigzag) -> Batch:
    """A context-parallel rank's part [B, S / CP] of each row; `cu_seqlens` stay those of the whole rows."""
    return batch.each(lambda tensor: zigzag.cut(tensor, 1))


class SampleSource(Protocol):
    """A data set: samples of equal length, read by index."""

    @property
    def is_shuffled(self) -> bool:
        """Whether the source's own order is already random, so that training does not shuffle it again."""

    def __len__(self) -> int: ...  # noqa: D105

    def __getitem__(self, index: int) -> Sample: ...  # noqa: D105

    def place(self, index: int) -> str:
        """Where a sample comes from, for people: its file and row or document, as far as that is known."""
