"""The loss: output layer and cross entropy in one, chunk by chunk over tokens, so that no logits are held.

A chunk's logits give its losses, and at once its gradients of the hidden states and of the weight, in the
order of upstream's operations. So backward holds no logits either; it only hands the gradients on. For that,
forward has to know what backward will bring: `LearnedTokens`. Where it follows from the losses themselves
(a factor for each sequence of a pair), forward gives each token's loss, and backward computes chunks again.

One chunk gives the bits of upstream's `ColumnParallelLinear` and `vocab_parallel_cross_entropy`. Several give
another order of summation in the weight's gradient, in float32 also for fp16 and bf16. On CUDA the losses
and the logits' gradients are two Triton kernels (kernels/fused_loss.py), with another order of sums, and the
weight's gradient stays in float32 until backward adds it to the main gradient.

Where logits exist (each token's loss, `--precision-align`), the loss is upstream's vocabulary-parallel cross
entropy, or in Hugging Face's order of operations `aligned_losses`.

Shapes: S sequence, B micro-batch, T tokens, H hidden, V rows of the padded vocabulary on this TP rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from patch.layout import chunk_length
from patch.model.weight_gradient import add_gradient, add_product, has_epilogue


class LearnedTokens(NamedTuple):
    """Which tokens of a micro-batch are learned, and the gradient that backward will bring."""

    mask: torch.Tensor
    """[B, S]: the weight of each label, 0 where nothing is learned; with CP this rank's part of each row."""
    gradient: float | None
    """Expected gradient of the sum of losses: loss scale / divisor. If backward brings another value, the
    result is rescaled (one extra rounding). None: it is not known; then each token's own loss comes out."""


class ScoredTokens(NamedTuple):
    """Tokens whose log-probabilities are asked for; nothing is learned from them."""

    choices: torch.Tensor
    """int64 [B, S, K]: ids of tokens that may follow each token, -1 for none; with CP this rank's part."""


class VocabularyPart(NamedTuple):
    """The part of the vocabulary that this TP rank has."""

    first: int
    """The token id of its first row."""
    num_rows: int
    """Rows of the real vocabulary; those after them are padding."""
    group: dist.ProcessGroup
    """The TP ranks."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    learned: LearnedTokens,
    part: VocabularyPart,
    *,
    is_fused: bool,
    chunk: int | None = None,
) -> torch.Tensor:
    """The sum of the learned tokens' losses; without a known gradient each token's loss, learned or not.

    Backward may run once, as through any graph that is not retained. Of single losses it computes the logits
    again.

    Args:
        hidden: [S, B, H], equal on all TP ranks; each gets its own part of their gradient.
        weight: [V, H].
        labels: [B, S], token ids of the whole vocabulary.
        learned: see there.
        part: see there.
        is_fused: whether losses and gradients of logits are Triton kernels.
        chunk: tokens of a chunk; None: `chunk_length`.
    Returns:
        a float32 number, or [B, S] float32, equal on all TP ranks.
    """
    chunk = chunk or chunk_length(*weight.shape, cuda=weight.is_cuda)
    needed = [tensor.requires_grad and torch.is_grad_enabled() for tensor in (hidden, weight)]
    is_written = is_fused and hasattr(weight, "main_grad_writer")
    how = _How(part, chunk, is_fused, needed, is_written)
    return _LinearCrossEntropy.apply(hidden, weight, labels, learned, how)


def log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, choices: torch.Tensor, part: VocabularyPart
) -> torch.Tensor:
    """The log-probabilities of tokens, and the likeliest tokens, chunk by chunk over those asked for.

    Args:
        hidden: [S, B, H], equal on all TP ranks.
        weight: [V, H].
        choices: [B, S, K], see `ScoredTokens`.
        part: see there.
    Returns:
        [1 + K, B, S] float32, equal on all TP ranks: the id of the likeliest token (the lowest of equals;
        float32 has all ids below 2**24), then each choice's log-probability; 0 where nothing is asked.
    """
    is_asked = (choices >= 0).any(dim=2)
    chunk = chunk_length(*weight.shape)
    chunks = zip(hidden.transpose(0, 1)[is_asked].split(chunk), choices[is_asked].split(chunk), strict=True)
    found = [_scores(torch.mm(own, weight.t()).float(), ids, part) for own, ids in chunks]
    scores = hidden.new_zeros(*is_asked.shape, 1 + choices.shape[2], dtype=torch.float32)
    scores[is_asked] = torch.cat(found)
    return scores.permute(2, 0, 1)


def _scores(logits: torch.Tensor, choices: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
    """The likeliest token and the choices' log-probabilities, [T, 1 + K], of logits [T, V]."""
    first, num_rows, group = part
    logits[:, num_rows:] = torch.finfo(logits.dtype).min
    own_largest, rows = logits.max(dim=-1)
    largest = own_largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    likeliest = torch.where(own_largest == largest, rows + first, torch.iinfo(rows.dtype).max)
    dist.all_reduce(likeliest, op=dist.ReduceOp.MIN, group=group)
    logits -= largest[:, None]
    rows = choices - first
    is_own = (rows >= 0) & (rows < logits.shape[1]) & (choices >= 0)
    chosen = torch.where(is_own, logits.gather(1, torch.where(is_own, rows, 0)), 0.0)
    sums = torch.cat((logits.exp_().sum(dim=-1, keepdim=True), chosen), dim=1)
    dist.all_reduce(sums, group=group)
    return torch.cat((likeliest[:, None].float(), sums[:, 1:] - sums[:, :1].log()), dim=1)


class _How(NamedTuple):
    part: VocabularyPart
    chunk: int
    is_fused: bool
    needed: list[bool]
    """Whether hidden states and weight need gradients."""
    is_written: bool
    """Whether backward adds the weight's gradient, in float32, where the optimizer collects it."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        learned: LearnedTokens,
        how: _How,
    ) -> torch.Tensor:
        mask, ctx.expected, ctx.how, ctx.weight = learned.mask, learned.gradient, how, weight
        if ctx.expected is None:
            ctx.save_for_backward(hidden, weight, labels)
            return _in_chunks(hidden, weight, labels, mask, how._replace(needed=[False, False]))[0]
        losses, gradients = _in_chunks(hidden, weight, labels, mask * ctx.expected, how)
        ctx.save_for_backward(*gradients)
        return (losses * mask).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.expected is None:
            hidden, weight, labels = ctx.saved_tensors
            of_hidden, of_weight = _in_chunks(hidden, weight, labels, gradient, ctx.how)[1]
            factor = gradient.new_ones(())
        else:
            (of_hidden, of_weight), factor = ctx.saved_tensors, gradient / ctx.expected
            # In place: a copy of the weight's gradient would be large. So a retained graph cannot be used
            # again; autograd says so.
            for own in (of_hidden, None if ctx.how.is_written else of_weight):
                if own is not None:
                    own.mul_(factor)
        if of_weight is not None and ctx.how.is_written:
            of_weight = add_gradient(ctx.weight, of_weight, factor)
        return of_hidden, of_weight, None, None, None


def _in_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor, how: _How
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Each token's loss [B, S], and the gradients of hidden states and weight where they are needed.

    Args:
        hidden: [S, B, H]. weight: [V, H]. labels: [B, S]. how: see there.
        gradient: [B, S]: of each token's loss.
    """
    flat = hidden.flatten(0, 1)
    chunks = _Chunks(flat, weight, how)
    each = (tensor.t().flatten().split(how.chunk) for tensor in (labels, gradient))
    begins = range(0, len(flat), how.chunk)
    losses = torch.cat([chunks.add(begin, ids, own) for begin, ids, own in zip(begins, *each, strict=True)])
    return losses.view(hidden.shape[:2]).t().contiguous(), chunks.gradients(hidden.shape)


class _Chunks:
    """The gradients of hidden states and weight, to which chunks are added.

    Args:
        hidden: [T, H]. weight: [V, H].
        how: see there; only the last chunk may have fewer tokens than it says.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, how: _How) -> None:
        self._hidden, self._weight, self._part, self._is_fused = hidden, weight, how.part, how.is_fused
        self._logits = hidden.new_empty(min(how.chunk, len(hidden)), len(weight))
        self._wide: torch.Tensor | None = None
        """A copy of the logits in float32, where they are not and the plain form is used."""
        if not how.is_fused and hidden.dtype != torch.float32:
            self._wide = self._logits.new_empty(self._logits.shape, dtype=torch.float32)
        self._hidden_gradient = torch.empty_like(hidden) if how.needed[0] else None
        self._weight_gradient: torch.Tensor | None = None
        if how.needed[1]:
            dtype = torch.float32 if how.is_written else weight.dtype
            self._weight_gradient = torch.empty_like(weight, dtype=dtype)
        self._is_written = how.is_written
        is_narrow = hidden.dtype != torch.float32
        self._adds_in_float32 = is_narrow and has_epilogue(hidden.device, hidden.dtype, torch.float32)
        self._weight_sum: torch.Tensor | None = None
        """In float32, where fp16 or bf16 chunks are summed."""

    def add(self, begin: int, labels: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Compute a chunk.

        Args:
            begin: its first token.
            labels: [chunk].
            gradient: [chunk], float32: of each token's loss.
        Returns:
            [chunk] float32: each token's loss.
        """
        hidden = self._hidden[begin : begin + len(labels)]
        logits = self._logits[: len(labels)]
        torch.mm(hidden, self._weight.t(), out=logits)
        losses = self._losses_and_gradients(logits, labels, gradient)
        if self._hidden_gradient is not None:
            torch.mm(logits, self._weight, out=self._hidden_gradient[begin : begin + len(labels)])
        if self._weight_gradient is not None:
            self._add_to_weight(self._weight_gradient, logits, hidden, is_first=begin == 0)
        return losses

    def _losses_and_gradients(
        self, logits: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        """Losses [chunk] in float32 of logits [chunk, V], which become their gradients."""
        first, num_rows, group = self._part
        if self._is_fused:
            # Imported here, because only torch's CUDA builds come with Triton.
            from patch.model.kernels.fused_loss import losses_and_gradients

            return losses_and_gradients(logits, labels, gradient, first=first, num_rows=num_rows, group=group)
        logits[:, num_rows:].fill_(torch.finfo(logits.dtype).min)  # an assigned number would be waited for
        if self._wide is None:
            return _losses_and_gradients(logits, labels, gradient, self._part)
        wide = self._wide[: len(labels)].copy_(logits)
        losses = _losses_and_gradients(wide, labels, gradient, self._part)
        logits.copy_(wide)
        return losses

    def _add_to_weight(
        self, gradient: torch.Tensor, logits: torch.Tensor, hidden: torch.Tensor, *, is_first: bool
    ) -> None:
        is_only = len(hidden) == len(self._hidden)
        if self._is_written:
            add_product(gradient, logits.t(), hidden, overwrite=is_first)
        elif not is_only and self._adds_in_float32:
            if self._weight_sum is None:
                self._weight_sum = torch.empty_like(gradient, dtype=torch.float32)
            add_product(self._weight_sum, logits.t(), hidden, overwrite=is_first)
        elif is_first:
            torch.mm(logits.t(), hidden, out=gradient)
        elif gradient.dtype == torch.float32:
            gradient.addmm_(logits.t(), hidden)
        else:
            if self._weight_sum is None:
                self._weight_sum = gradient.float()
            self._weight_sum += torch.mm(logits.t(), hidden, out=gradient)

    def gradients(self, shape: torch.Size) -> list[torch.Tensor | None]:
        """Gradients of the hidden states, in this shape, and of the weight; None where none is needed."""
        if self._weight_sum is not None and self._weight_gradient is not None:
            self._weight_gradient.copy_(self._weight_sum)
        hidden = self._hidden_gradient
        return [None if hidden is None else hidden.view(shape), self._weight_gradient]


def _losses_and_gradients(
    logits: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor, part: VocabularyPart
) -> torch.Tensor:
    """Losses [chunk] of float32 logits [chunk, V], which become their gradients.

    The operations are those of upstream's `VocabParallelCrossEntropy` (cross_entropy.py), in its order.
    """
    largest = logits.max(dim=-1).values
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=part.group)
    logits -= largest[:, None]
    own = labels - part.first
    is_own = (own >= 0) & (own < logits.shape[1])
    cells = torch.arange(len(labels), device=labels.device), torch.where(is_own, own, 0)
    predicted = torch.where(is_own, logits[cells], 0.0)
    sums = torch.stack((predicted, logits.exp_().sum(dim=-1)))
    dist.all_reduce(sums, group=part.group)
    logits /= sums[1][:, None]
    logits[cells] -= is_own.float()
    logits *= gradient[:, None]
    return torch.log(sums[1]) - sums[0]


def hide_padded_vocabulary(logits: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Logits whose softmax is that of the real vocabulary.

    Args:
        logits: [S, B, V]; changed in place if they are contiguous.
        num_rows: rows of the real vocabulary on this TP rank.
    Returns:
        Logits of the same shape, with the dtype's lowest number in the padding.
    """
    logits = logits.contiguous()
    # Detached, because autograd would copy the gradient of all logits for this assignment. It is not needed:
    # the softmax of the padding is zero, and so is its gradient.
    logits.detach()[..., num_rows:] = torch.finfo(logits.dtype).min
    return logits


def aligned_losses(labels: torch.Tensor, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Cross entropy in float32 over the real vocabulary, in Hugging Face's order of operations.

    Args:
        labels: [B, S].
        logits: [S, B, V], at TP 1.
        vocab_size: rows of the real vocabulary.
    Returns:
        [B, S] float32.
    """
    flat = logits[..., :vocab_size].transpose(0, 1).float().flatten(0, 1)
    return F.cross_entropy(flat, labels.flatten(), reduction="none").view_as(labels)


def sum_aligned(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of the learned tokens' losses in the order of torch's own loss function, Hugging Face's.

    Args:
        losses: [B, S].
        mask: [B, S], above 0 for a learned token; the losses are weighted already.
    """
    ignored = torch.where(mask > 0, 0, -100)
    return F.nll_loss(-losses.reshape(-1, 1), ignored.flatten(), ignore_index=-100, reduction="sum")
