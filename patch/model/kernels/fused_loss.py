"""The cross entropy of a chunk of logits in Triton: two reads, one write, no float32 copy.

The first kernel computes the largest logit and the sum of exponentials of each row in one pass. Then the TP
ranks combine their parts. The second kernel overwrites the logits with their gradients. The result is that of
`patch/model/loss.py`, in float32, with another order of sums. With TRITON_INTERPRET=1 before the import,
Triton's interpreter runs the kernels on the CPU.

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
    """Return the loss of each token, [T] float32, and overwrite the logits with their gradients.

    Args:
        logits: [T, V], contiguous, of any floating dtype; columns from `num_rows` on are padding.
        labels: [T], token ids of the full vocabulary; a label outside of it has no loss.
        gradient: [T] float32, the gradient of each token's loss.
        first: the token id of this rank's first row.
        num_rows: rows of the real vocabulary on this rank.
        group: the TP ranks.
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
    """Return the largest logit per row [T]; and [2, T]: the label's logit (else 0), the sum of exps."""
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
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * num_columns
    peak = tl.full((_BLOCK,), _LOWEST, tl.float32)
    total = tl.full((_BLOCK,), 0.0, tl.float32)
    for offset in range(0, num_columns, _BLOCK):
        j = offset + tl.arange(0, _BLOCK)
        x = tl.load(begin + j, j < num_columns, other=0.0).to(tl.float32)
        distance = tl.where(j < num_rows, x, float("-inf")) - peak
        # One exponential serves both cases: x above the lane's largest value, or not. Each lane has a
        # largest value and a sum; they are combined after the loop.
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
    """Write (softmax - one-hot) * gradient over a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    at = logits + row * num_columns + j
    number = tl.load(at, j < num_columns, other=0.0)
    x = tl.where(j < num_rows, number.to(tl.float32), float("-inf"))
    softmax = tl.exp(x - tl.load(largest + row)) / tl.load(total + row)
    is_label = j == tl.load(own + row)
    out = (softmax - tl.where(is_label, 1.0, 0.0)) * tl.load(gradient + row)
    tl.store(at, out.to(number.dtype), j < num_columns)
