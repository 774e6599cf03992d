"""Output layer and cross entropy in one operation, chunk by chunk over tokens, so that logits are not kept.

Forward computes the logits of a chunk, its losses, and at once the gradients of hidden states and weight, in
the order of megatron-core's operations. Backward only returns these gradients. So forward needs the gradient
of the loss in advance (`LossMask`). If that gradient depends on the losses (as in DPO), forward returns each
token's loss, and backward computes the chunks again.

With one chunk the result is bitwise that of megatron-core's `ColumnParallelLinear` and
`vocab_parallel_cross_entropy`. Several chunks change the order of sums in the gradient of the weight, which
are float32 also for fp16 and bf16. On CUDA two Triton kernels compute the losses and the gradients of the
logits (kernels/fused_loss.py), with another order of sums. There backward adds the gradient of the weight to
the main gradient: by one product from the gradients of all logits, if these take no more memory than a
float32 gradient of the weight (`keeps_logits`); otherwise from such a gradient, summed over chunks.

Without a `LossMask` the logits are kept, and the loss is megatron-core's vocabulary-parallel
cross entropy, or `aligned_losses` in Hugging Face's order.

Shapes: S sequence, B micro-batch, T tokens, H hidden, V rows of the padded vocabulary on this TP rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from patch.layout import chunk_length, keeps_logits
from patch.model.weight_gradient import add_gradient, add_product, has_epilogue, weight_gradient


class TeacherTokens(NamedTuple):
    """A teacher's log-probabilities of a micro-batch, and their part in the loss (distillation).

    The K + 1 outcomes of a token are the chosen tokens, and all other tokens together. Teacher and student
    give them the probabilities p and q at the temperature T (arXiv:1503.02531). The loss of a token is

        alpha * T**2 * sum(p * log(p / q)) + (1 - alpha) * cross entropy
    """

    taught: torch.Tensor
    """Float32 [B, S, 2 K + 1]: the ids of the chosen tokens, all different; log p of each, then of the other
    tokens together."""
    alpha: float
    temperature: float


class LossMask(NamedTuple):
    """The loss mask of a micro-batch, and the gradient that backward will bring."""

    mask: torch.Tensor
    """[B, S]: the weight of each label, 0 for labels that are not trained; with CP this rank's part of each
    row.
    """
    gradient: float | None
    """Expected gradient of the summed loss: loss scale / divisor. If backward brings another value, the
    result is rescaled (one extra rounding). None if it is not known: forward then returns each token's loss.
    """
    teacher: TeacherTokens | None = None
    """With a teacher, forward returns three sums: loss, cross entropy, and divergence from the teacher."""


class LikeliestTokens(NamedTuple):
    """Tokens whose likeliest successors are returned, without training."""

    mask: torch.Tensor
    """[B, S]: not 0 where they are asked for; with CP this rank's part."""
    number: int
    """K, at most the size of the vocabulary."""
    temperature: float


class ScoredTokens(NamedTuple):
    """Tokens whose log-probabilities are returned, without training."""

    choices: torch.Tensor
    """int64 [B, S, K]: ids of candidates for the next token, -1 for none; with CP this rank's part."""


class VocabularyShard(NamedTuple):
    """The part of the vocabulary on this TP rank."""

    first: int
    """The token id of the first row."""
    num_rows: int
    """Rows of the real vocabulary; later rows are padding."""
    group: dist.ProcessGroup
    cap: float | None = None
    """Logits are cap * tanh(logits / cap), or not changed (`final_logit_softcapping`)."""

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Cap logits in place."""
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def places(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of tokens, 0 where they are not on this rank, and whether they are; -1 never is."""
        rows = ids - self.first
        is_own = (rows >= 0) & (rows < self.num_rows)
        return torch.where(is_own, rows, 0), is_own

    def subtract_largest(self, logits: torch.Tensor) -> None:
        """Subtract from logits [T, V] the largest of each token over all ranks, in place."""
        largest = logits.max(dim=-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        logits -= largest[:, None]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    learned: LossMask,
    part: VocabularyShard,
    *,
    is_fused: bool,
    chunk: int | None = None,
) -> torch.Tensor:
    """Return the summed loss of the trained tokens, or each token's loss if `learned.gradient` is None.

    With a teacher or capped logits, Triton's kernels are not used: they have neither.

    Backward may run only once. With each token's loss, backward computes the logits again.

    Args:
        hidden: [S, B, H], equal on all TP ranks. Each rank returns a partial gradient; the caller
            sums over TP.
        weight: [V, H].
        labels: [B, S], token ids of the full vocabulary.
        chunk: tokens per chunk; by default `chunk_length`.
    Returns:
        float32 [], or [3] with a teacher, or [B, S]; equal on all TP ranks.
    """
    chunk = chunk or chunk_length(*weight.shape, cuda=weight.is_cuda)
    needed = [tensor.requires_grad and torch.is_grad_enabled() for tensor in (hidden, weight)]
    is_written = is_fused and hasattr(weight, "main_grad_writer")
    has_kernel = is_fused and learned.teacher is None and part.cap is None
    is_kept = is_written and needed[1]
    is_kept &= keeps_logits(labels.numel(), weight.shape[1], weight.element_size())
    how = _LossOptions(part, chunk, has_kernel, needed, is_written, is_kept, learned.teacher)
    return _LinearCrossEntropy.apply(hidden, weight, labels, learned, how)


def answers(
    hidden: torch.Tensor, weight: torch.Tensor, asked: ScoredTokens | LikeliestTokens, part: VocabularyShard
) -> torch.Tensor:
    """Return what is asked of the tokens, chunk by chunk.

    Args:
        hidden: [S, B, H], equal on all TP ranks.
    Returns:
        [B, S, N] float32, equal on all TP ranks; 0 where nothing is asked. Ids below 2**24 are exact.
        With `ScoredTokens` N = 1 + K: the id of the most likely token (the lowest of equals), then the
        log-probability of each choice. With `LikeliestTokens` N = 2 K + 1: K ids, likeliest first, then their
        log-probabilities, last that of all other tokens together.
    """
    chunk = chunk_length(*weight.shape)
    is_asked = (asked.choices >= 0).any(dim=2) if isinstance(asked, ScoredTokens) else asked.mask != 0
    rows = hidden.transpose(0, 1)[is_asked].split(chunk)
    logits = (torch.mm(own, weight.t()).float() for own in rows)
    if isinstance(asked, ScoredTokens):
        choices = asked.choices[is_asked].split(chunk)
        found = [_scores(own, ids, part) for own, ids in zip(logits, choices, strict=True)]
    else:
        found = [_likeliest(own, asked, part) for own in logits]
    values = torch.cat(found)
    whole = hidden.new_zeros(*is_asked.shape, values.shape[1], dtype=torch.float32)
    whole[is_asked] = values
    return whole


def _scores(logits: torch.Tensor, choices: torch.Tensor, part: VocabularyShard) -> torch.Tensor:
    """Return the most likely token and the choices' log-probabilities, [T, 1 + K], from logits [T, V]."""
    first, num_rows, group, _ = part
    part.capped(logits)[:, num_rows:] = torch.finfo(logits.dtype).min
    own_largest, rows = logits.max(dim=-1)
    largest = own_largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    likeliest = torch.where(own_largest == largest, rows + first, torch.iinfo(rows.dtype).max)
    dist.all_reduce(likeliest, op=dist.ReduceOp.MIN, group=group)
    logits -= largest[:, None]
    cells, is_own = part.places(choices)
    chosen = torch.where(is_own, logits.gather(1, cells), 0.0)
    sums = torch.cat((logits.exp_().sum(dim=-1, keepdim=True), chosen), dim=1)
    dist.all_reduce(sums, group=group)
    return torch.cat((likeliest[:, None].float(), sums[:, 1:] - sums[:, :1].log()), dim=1)


class _LossOptions(NamedTuple):
    part: VocabularyShard
    chunk: int
    is_fused: bool
    needed: list[bool]
    """Whether hidden states and weight need gradients."""
    is_written: bool
    """Whether backward adds the weight's gradient, in float32, to the main gradient."""
    is_kept: bool
    """Whether it does so by one product, so that the gradients of all logits are kept."""
    teacher: TeacherTokens | None = None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        learned: LossMask,
        how: _LossOptions,
    ) -> torch.Tensor:
        mask, ctx.expected, ctx.how = learned.mask, learned.gradient, how
        ctx.weight = weight if how.is_written else None  # a normalized copy is freed
        if ctx.expected is None:
            ctx.save_for_backward(hidden, weight, labels)
            how = how._replace(needed=[False, False], is_kept=False)
            return _in_chunks(hidden, weight, labels, mask, how)[0]
        losses, gradients = _in_chunks(hidden, weight, labels, mask * ctx.expected, how)
        ctx.save_for_backward(*gradients, hidden if how.is_kept else None)
        if how.teacher is not None:
            return torch.stack([(each * mask).sum() for each in losses])
        return (losses * mask).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.expected is None:
            hidden, weight, labels = ctx.saved_tensors
            of_hidden, of_weight = _in_chunks(hidden, weight, labels, gradient, ctx.how)[1]
            factor = gradient.new_ones(())
        else:
            of_loss = gradient if ctx.how.teacher is None else gradient[0]
            (of_hidden, of_weight, hidden), factor = ctx.saved_tensors, of_loss / ctx.expected
            # In place, because a copy of the weight's gradient would be large. Autograd raises if a
            # retained graph runs again.
            for own in (of_hidden, None if ctx.how.is_written else of_weight):
                if own is not None:
                    own.mul_(factor)
        if of_weight is not None and ctx.how.is_kept:
            of_weight = weight_gradient(ctx.weight, of_weight, hidden.flatten(0, 1) * factor)
        elif of_weight is not None and ctx.how.is_written:
            of_weight = add_gradient(ctx.weight, of_weight, factor)
        return of_hidden, of_weight, None, None, None


def _in_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    gradient: torch.Tensor,
    how: _LossOptions,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return losses [B, S], or [3, B, S] with a teacher, and gradients of hidden states and weight.

    If `how.is_kept`, the gradients of the logits [T, V] replace the gradient of the weight. `gradient` [B, S]
    is that of the losses.
    """
    flat = hidden.flatten(0, 1)
    chunks = _Chunks(flat, weight, how)
    each = (tensor.t().flatten().split(how.chunk) for tensor in (labels, gradient))
    begins = range(0, len(flat), how.chunk)
    found = [chunks.add(begin, ids, own) for begin, ids, own in zip(begins, *each, strict=True)]
    losses = torch.cat(found, dim=-1).unflatten(-1, hidden.shape[:2]).transpose(-1, -2).contiguous()
    return losses, chunks.gradients(hidden.shape)


class _Chunks:
    """The gradients of hidden states [T, H] and weight [V, H], accumulated over chunks."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, how: _LossOptions) -> None:
        self._hidden, self._weight, self._part, self._is_fused = hidden, weight, how.part, how.is_fused
        self._teacher = how.teacher
        if how.teacher is not None:
            self._teacher = how.teacher._replace(taught=how.teacher.taught.transpose(0, 1).flatten(0, 1))
        self._is_kept, num_rows = how.is_kept, min(how.chunk, len(hidden))
        self._logits = hidden.new_empty(len(hidden) if how.is_kept else num_rows, len(weight))
        self._wide: torch.Tensor | None = None
        """Float32 copy of the logits, or None if they are float32 or Triton is used."""
        if not how.is_fused and hidden.dtype != torch.float32:
            self._wide = self._logits.new_empty(num_rows, len(weight), dtype=torch.float32)
        self._hidden_gradient = torch.empty_like(hidden) if how.needed[0] else None
        self._weight_gradient: torch.Tensor | None = None
        if how.needed[1] and not how.is_kept:
            dtype = torch.float32 if how.is_written else weight.dtype
            self._weight_gradient = torch.empty_like(weight, dtype=dtype)
        self._is_written = how.is_written
        is_narrow = hidden.dtype != torch.float32
        self._adds_in_float32 = is_narrow and has_epilogue(hidden.device, hidden.dtype, torch.float32)
        self._weight_sum: torch.Tensor | None = None
        """Float32 sum of the chunks' fp16 or bf16 gradients."""

    def add(self, begin: int, labels: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Compute a chunk: labels and gradient [chunk] in, float32 losses [chunk] out."""
        hidden = self._hidden[begin : begin + len(labels)]
        logits = self._logits[begin if self._is_kept else 0 :][: len(labels)]
        torch.mm(hidden, self._weight.t(), out=logits)
        losses = self._losses_and_gradients(logits, labels, gradient, begin)
        if self._hidden_gradient is not None:
            torch.mm(logits, self._weight, out=self._hidden_gradient[begin : begin + len(labels)])
        if self._weight_gradient is not None:
            self._add_to_weight(self._weight_gradient, logits, hidden, is_first=begin == 0)
        return losses

    def _losses_and_gradients(
        self, logits: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor, begin: int
    ) -> torch.Tensor:
        first, num_rows, group, cap = self._part
        if self._is_fused:
            # Only CUDA builds of torch have Triton.
            from patch.model.kernels.fused_loss import losses_and_gradients

            return losses_and_gradients(logits, labels, gradient, first=first, num_rows=num_rows, group=group)
        logits[:, num_rows:].fill_(torch.finfo(logits.dtype).min)  # assignment would block the host
        wide = logits if self._wide is None else self._wide[: len(labels)].copy_(logits)
        slope = None
        if cap is not None:
            slope = 1 - (self._part.capped(wide[:, :num_rows]) / cap).square()
        if self._teacher is None:
            losses = _losses_and_gradients(wide, labels, gradient, self._part)
        else:
            teacher = self._teacher._replace(taught=self._teacher.taught[begin : begin + len(labels)])
            losses = _losses_of_student(wide, labels, gradient, teacher, self._part)
        if slope is not None:
            wide[:, :num_rows] *= slope
        if self._wide is not None:
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
        """Return the gradients of hidden states, in this shape, and weight or logits; None if not needed."""
        if self._weight_sum is not None and self._weight_gradient is not None:
            self._weight_gradient.copy_(self._weight_sum)
        hidden = self._hidden_gradient
        of_weight = self._logits if self._is_kept else self._weight_gradient
        return [None if hidden is None else hidden.view(shape), of_weight]


def _losses_and_gradients(
    logits: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor, part: VocabularyShard
) -> torch.Tensor:
    """Return losses [chunk], and overwrite float32 logits [chunk, V] with their gradients."""
    # The operations of megatron-core's `VocabParallelCrossEntropy` (cross_entropy.py) in its order.
    part.subtract_largest(logits)
    rows, is_own = part.places(labels)
    cells = torch.arange(len(labels), device=labels.device), rows
    predicted = torch.where(is_own, logits[cells], 0.0)
    sums = torch.stack((predicted, logits.exp_().sum(dim=-1)))
    dist.all_reduce(sums, group=part.group)
    logits /= sums[1][:, None]
    logits[cells] -= is_own.float()
    logits *= gradient[:, None]
    return torch.log(sums[1]) - sums[0]


def _losses_of_student(
    logits: torch.Tensor,
    labels: torch.Tensor,
    gradient: torch.Tensor,
    teacher: TeacherTokens,
    part: VocabularyShard,
) -> torch.Tensor:
    """Return loss, cross entropy and divergence [3, chunk]; overwrite float32 logits with their gradients."""
    taught, alpha, temperature = teacher
    others, (ids, goal) = logits / temperature, taught.tensor_split([taught.shape[1] // 2], dim=1)
    logs, cells, is_own = _outcomes(others, ids.long(), part)
    p, q = goal.exp(), logs.exp()
    divergence = (p * (goal - logs)).sum(dim=1)
    # The divergence's gradient: q - p of each outcome; the others share theirs by their own probabilities.
    per_outcome = (q - p) * (gradient * (alpha * temperature))[:, None]
    others *= per_outcome[:, -1:]
    others.scatter_add_(1, cells, torch.where(is_own, per_outcome[:, :-1], 0.0))
    cross_entropy = _losses_and_gradients(logits, labels, gradient * (1 - alpha), part)
    logits += others
    loss = alpha * temperature**2 * divergence + (1 - alpha) * cross_entropy
    return torch.stack((loss, cross_entropy, divergence))


def _outcomes(
    logits: torch.Tensor, ids: torch.Tensor, part: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of tokens `ids` [T, K], and last of all other tokens together, [T, K + 1].

    Overwrites logits [T, V]: 0 for the chosen tokens and the padding, else the share of the token in the
    probability of the other tokens. Also returns the rows [T, K] of the chosen tokens, 0 where they are not
    on this TP rank, and whether they are.
    """
    part.subtract_largest(logits)
    cells, is_own = part.places(ids)
    chosen = torch.where(is_own, logits.gather(1, cells), 0.0)
    logits.exp_()
    logits[:, part.num_rows :].zero_()
    # The chosen are taken out first: what is left of a likely token's 1 would have no precision.
    logits.scatter_add_(1, cells, -torch.where(is_own, logits.gather(1, cells), 0.0))
    sums = torch.cat((chosen, logits.sum(dim=1, keepdim=True)), dim=1)
    dist.all_reduce(sums, group=part.group)
    rest = sums[:, -1:].clamp(min=torch.finfo(sums.dtype).tiny)
    logits /= rest
    logs = torch.cat((sums[:, :-1], rest.log()), dim=1)
    return logs - logs.logsumexp(dim=1, keepdim=True), cells, is_own


def _likeliest(logits: torch.Tensor, asked: LikeliestTokens, part: VocabularyShard) -> torch.Tensor:
    first, num_rows, group, _ = part
    logits = part.capped(logits) / asked.temperature
    logits[:, num_rows:] = torch.finfo(logits.dtype).min
    own, rows = logits.topk(min(asked.number, logits.shape[1]), dim=1)
    parts = [torch.empty_like(own) for _ in range(group.size())], [rows.clone() for _ in range(group.size())]
    for into, tensor in zip(parts, (own, rows + first), strict=True):
        dist.all_gather(into, tensor.contiguous(), group=group)
    values, ids = (torch.cat(each, dim=1) for each in parts)
    order = values.sort(dim=1, descending=True, stable=True).indices[:, : asked.number]
    ids = ids.gather(1, order)
    return torch.cat((ids.float(), _outcomes(logits, ids, part)[0]), dim=1)


def hide_padded_vocabulary(logits: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return logits [S, B, V] with the dtype's lowest value in the padding; in place if contiguous."""
    logits = logits.contiguous()
    # Detached, because autograd would copy the gradient of all logits for this assignment. The gradient of
    # the padding is zero anyway, as its softmax is.
    logits.detach()[..., num_rows:] = torch.finfo(logits.dtype).min
    return logits


def aligned_losses(labels: torch.Tensor, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the float32 loss [B, S] over the real vocabulary in Hugging Face's order, from [S, B, V] at TP
    1.
    """
    flat = logits[..., :vocab_size].transpose(0, 1).float().flatten(0, 1)
    return F.cross_entropy(flat, labels.flatten(), reduction="none").view_as(labels)


def sum_aligned(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the summed loss of trained tokens (mask > 0) in the order of torch's and Hugging Face's loss."""
    ignored = torch.where(mask > 0, 0, -100)
    return F.nll_loss(-losses.reshape(-1, 1), ignored.flatten(), ignore_index=-100, reduction="sum")
