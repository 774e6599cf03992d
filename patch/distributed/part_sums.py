"""The sum of all ranks' parts in rank order: a Triton kernel that reads each number once.

Eager torch launches an operation per rank, and each reads and writes the sum again. The bits are the same.
With TRITON_INTERPRET=1 before the import, Triton's interpreter runs it on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = tl.constexpr(512)
"""Small, because the shards of many ranks are small and need enough programs for a whole GPU."""
_AT_ONCE = tl.constexpr(8)
"""Number of parts with loads in flight together."""
_BITS_OF_MINUS_ZERO = tl.constexpr(-(2**31))
"""The bits of -0.0, which changes no number when summed; Triton turns a literal -0.0 into 0.0."""


def add_parts(
    received: torch.Tensor, out: torch.Tensor, *, own: torch.Tensor | None = None, rank: int = 0
) -> None:
    """Write the sum of parts to `out`.

    Without `own`, the sum is in float32 and rounded once. With `own`, each addition is rounded to its dtype.

    Args:
        received: [parts, ...], contiguous.
        out: shape of a part, contiguous, any dtype.
        own: one more part, contiguous, with the dtype of `received`.
        rank: number of received parts that are summed before `own`.
    """
    num_parts = len(received)
    if out.numel():
        has_own = own is not None
        numbers = own if has_own else received
        _add_parts[triton.cdiv(out.numel(), _BLOCK.value),](
            received, numbers, out, num_parts, rank if has_own else num_parts, out.numel(), has_own
        )


@triton.jit
def _add_parts(
    received: tl.tensor, own: tl.tensor, out: tl.tensor,
    num_parts: tl.tensor, rank: tl.tensor, numel: tl.tensor, has_own: tl.constexpr,
) -> None:  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    total = tl.full((_BLOCK,), _BITS_OF_MINUS_ZERO, tl.int32).to(tl.float32, bitcast=True)
    total = _added(total, received, i, 0, rank, numel, has_own)
    if has_own:
        part = tl.load(own + i, i < numel, other=0.0)
        total = (total + part.to(tl.float32)).to(part.dtype).to(tl.float32)
        total = _added(total, received, i, rank, num_parts, numel, has_own)
    tl.store(out + i, total, i < numel)


@triton.jit
def _added(
    total: tl.tensor, received: tl.tensor, i: tl.tensor, first: tl.tensor, end: tl.tensor, numel: tl.tensor,
    is_rounded: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A sum and the parts from the first one on."""
    for begin in range(first, end, _AT_ONCE):
        for ahead in tl.static_range(_AT_ONCE):
            index = begin + ahead
            at = received + tl.cast(index, tl.int64) * numel + i
            part = tl.load(at, (i < numel) & (index < end), other=0.0)
            more = total + part.to(tl.float32)
            if is_rounded:
                more = more.to(part.dtype).to(tl.float32)
            total = tl.where(index < end, more, total)
    return total
