"""Samples, micro-batches, and the interface of a data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from patch.device import send
from patch.distributed.context_group import Zigzag


class Sample(NamedTuple):
    """S tokens of one sequence, or of several packed sequences; the labels are already shifted."""

    tokens: torch.Tensor
    """int64 [S]."""
    labels: torch.Tensor
    """int64 [S]: labels[i] is the token after tokens[i]."""
    loss_mask: torch.Tensor
    """float32 [S]: weight of each label in the loss: 0 without a loss, else 1 or the objective's weight."""
    lengths: torch.Tensor | None = None
    """int32 [n]: tokens of each packed sequence, in order; the sum is S. None for one sequence."""
    extra_tensors: Mapping[str, torch.Tensor] = {}
    """Additional values of each token for an objective, by name: [S, ...]."""
    of_sequences: Mapping[str, torch.Tensor] = {}
    """Values of each sequence, by name: [n, ...]; zeros in a sample that only fills up a batch."""


def lengths_between(ends: torch.Tensor) -> torch.Tensor:
    """Return the tokens of each sequence of a sample, int32 [n]. `ends`, bool [S], marks the last token of
    each sequence; the value of the sample's last token is ignored."""
    starts = torch.nonzero(ends[:-1]).flatten() + 1
    return torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), len(ends))]).diff().int()


class Batch(NamedTuple):
    """One micro-batch: the fields of Sample, stacked to [B, S], or to [B, S / CP] on a CP rank."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    """int32 [n + 1]: boundaries of the packed sequences among the B * S tokens of all rows, from 0 to B * S.
    No sequence crosses the end of a row. None if each row is one sequence."""
    extra_tensors: Mapping[str, torch.Tensor] = {}
    of_sequences: Mapping[str, torch.Tensor] = {}
    """[n, ...] for the batch's n sequences; complete on each CP rank."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return the batch with `change` applied to all tensors that have a value per token."""
        extra_tensors = {name: change(tensor) for name, tensor in self.extra_tensors.items()}
        tokens, labels, loss_mask = map(change, (self.tokens, self.labels, self.loss_mask))
        return Batch(tokens, labels, loss_mask, self.cu_seqlens, extra_tensors, self.of_sequences)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device. `cu_seqlens` stays on the host, which reads it."""
        of_sequences = {name: send(tensor, device) for name, tensor in self.of_sequences.items()}
        return self.each(lambda tensor: send(tensor, device))._replace(of_sequences=of_sequences)


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples of equal length S to one micro-batch; also a DataLoader's `collate_fn`. If a sample is
    packed, each unpacked sample counts as one sequence of S tokens."""
    names = ("tokens", "labels", "loss_mask")
    tokens, labels, loss_mask = (torch.stack([getattr(each, name) for each in samples]) for name in names)
    cu_seqlens = None
    if any(sample.lengths is not None for sample in samples):
        whole = torch.tensor([tokens.shape[1]], dtype=torch.int32)
        lengths = [whole if sample.lengths is None else sample.lengths for sample in samples]
        ends = torch.cat(lengths).cumsum(0, dtype=torch.int32)
        cu_seqlens = torch.cat([ends.new_zeros(1), ends])
    extra_tensors = {
        name: torch.stack([each.extra_tensors[name] for each in samples]) for name in samples[0].extra_tensors
    }
    named = {name: [each.of_sequences[name] for each in samples] for name in samples[0].of_sequences}
    of_sequences = {name: torch.cat(tensors) for name, tensors in named.items()}
    return Batch(tokens, labels, loss_mask, cu_seqlens, extra_tensors, of_sequences)


def cut_batch(batch: Batch, zigzag: Zigzag) -> Batch:
    """Return a CP rank's part [B, S / CP] of each row. `cu_seqlens` still describes the whole rows."""
    return batch.each(lambda tensor: zigzag.cut(tensor, 1))


class SampleSource(Protocol):
    """Data set: samples of equal length, read by index."""

    @property
    def is_shuffled(self) -> bool:
        """Whether the source's own order is already random, so that training does not shuffle it again."""

    def __len__(self) -> int: ...  # noqa: D105

    def __getitem__(self, index: int) -> Sample: ...  # noqa: D105

    def place(self, index: int) -> str:
        """Return the file and the row or document of a sample, as far as known, for messages."""
