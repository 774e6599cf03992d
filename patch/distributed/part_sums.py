"""The sum of ranks' parts in Triton, in the order of ranks: one kernel that reads each number once.

Eager torch launches an operation for each rank, which reads and writes the sum again. The bits are the same.
With TRITON_INTERPRET=1 before the import, Triton's interpreter runs it on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = tl.constexpr(512)
"""Small, because the shards of many ranks are: enough programs for all of a GPU."""
_AT_ONCE = tl.constexpr(8)
"""Parts whose numbers are on their way together."""
_BITS_OF_MINUS_ZERO = tl.constexpr(-(2**31))
"""It changes no number that is added to it; Triton makes 0.0 of -0.0."""


def add_parts(
    received: torch.Tensor, out: torch.Tensor, *, own: torch.Tensor | None = None, rank: int = 0
) -> None:
    """Write the sum of parts to `out`.

    Without `own` it is added up in float32, and rounded once; with it each addition is rounded to its type.

    Args:
        received: [parts, ...], contiguous.
        out: in the shape of a part, contiguous, of any type.
        own: one more part, contiguous, of the type of `received`.
        rank: how many of the received parts are added before it.
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
