"""The cross entropy of a chunk of logits in Triton: read twice, written once, without a float32 copy.

One kernel finds the largest logit and the sum of exponentials of each row in one pass; between them the TP
ranks put their parts together; one turns the logits into their gradients. It computes what the plain form in
`patch/model/loss.py` does, in float32, with another order of sums. With TRITON_INTERPRET=1 before the
import, Triton's interpreter runs it on the CPU.

Shapes: T tokens of the chunk, V rows of the padded vocabulary on this TP rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

_BLOCK = tl.constexpr(4096)
_WARPS = 8
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def losses_and_gradients(
    logits: torch.Tensor,
    labels: torch.Tensor,
    gradient: torch.Tensor,
    *,
    first: int,
    num_rows: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Each token's loss; the logits become their gradients.

    Args:
        logits: [T, V], contiguous, of any floating type; those after `num_rows` are padding.
        labels: [T], token ids of the whole vocabulary; any other number has no loss.
        gradient: [T] float32: of each token's loss.
        first: the token id of this rank's first row.
        num_rows: rows of the real vocabulary; the gradient of the others is zero.
        group: the TP ranks.
    Returns:
        [T] float32.
    """
    own = labels - first
    largest, sums = _statistics(logits, own, num_rows)
    if group.size() > 1:
        ours = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        sums[1] *= torch.exp(ours - largest)
        dist.all_reduce(sums, group=group)
    _turn_into_gradients(logits, own, largest, sums[1], gradient, num_rows)
    return torch.log(sums[1]) - (sums[0] - largest)


def _statistics(logits: torch.Tensor, own: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row [T]; and [2, T]: its label's (0 if it is another rank's), the sum."""
    largest = logits.new_empty(len(logits), dtype=torch.float32)
    sums = logits.new_empty(2, len(logits), dtype=torch.float32)
    if len(logits):
        _statistics_of_row[(len(logits),)](
            logits, own, largest, sums, logits.shape[1], num_rows, num_warps=_WARPS
        )
    return largest, sums


def _turn_into_gradients(
    logits: torch.Tensor,
    own: torch.Tensor,
    largest: torch.Tensor,
    total: torch.Tensor,
    gradient: torch.Tensor,
    num_rows: int,
) -> None:
    if len(logits):
        grid = len(logits), triton.cdiv(logits.shape[1], _BLOCK.value)
        _gradients[grid](logits, own, largest, total, gradient, logits.shape[1], num_rows, num_warps=_WARPS)


@triton.jit
def _statistics_of_row(
    logits: tl.tensor, own: tl.tensor, largest: tl.tensor, sums: tl.tensor,
    num_columns: tl.constexpr, num_rows: tl.tensor,
) -> None:  # fmt: skip
    """The row's largest logit, its label's, and the sum of exponentials, in one pass.

    Each lane has a largest number and a sum of its own, which are put together at the end. The exponential
    of the distance between a number and the lane's largest one serves whichever of the two is larger.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * num_columns
    peak = tl.full((_BLOCK,), _LOWEST, tl.float32)
    total = tl.full((_BLOCK,), 0.0, tl.float32)
    for offset in range(0, num_columns, _BLOCK):
        j = offset + tl.arange(0, _BLOCK)
        x = tl.load(begin + j, j < num_columns, other=0.0).to(tl.float32)
        distance = tl.where(j < num_rows, x, float("-inf")) - peak
        e = tl.exp(-tl.abs(distance))
        total = tl.where(distance > 0, total * e + 1.0, total + e)
        peak = tl.where(distance > 0, x, peak)
    top = tl.max(peak, axis=0)
    label = tl.load(own + row)
    is_own = (label >= 0) & (label < num_columns)
    tl.store(largest + row, top)
    tl.store(sums + row, tl.load(begin + label, is_own, other=0.0).to(tl.float32))
    tl.store(sums + tl.num_programs(0) + row, tl.sum(total * tl.exp(peak - top), axis=0))


@triton.jit
def _gradients(
    logits: tl.tensor, own: tl.tensor, largest: tl.tensor, total: tl.tensor, gradient: tl.tensor,
    num_columns: tl.tensor, num_rows: tl.tensor,
) -> None:  # fmt: skip
    """A block of a row: (softmax - one-hot) * gradient, in place."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    at = logits + row * num_columns + j
    number = tl.load(at, j < num_columns, other=0.0)
    x = tl.where(j < num_rows, number.to(tl.float32), float("-inf"))
    softmax = tl.exp(x - tl.load(largest + row)) / tl.load(total + row)
    is_label = j == tl.load(own + row)
    out = (softmax - tl.where(is_label, 1.0, 0.0)) * tl.load(gradient + row)
    tl.store(at, out.to(number.dtype), j < num_columns)
