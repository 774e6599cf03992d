"""The operations of `LayerKernels` in torch, bitwise equal to megatron-core's operations and their autograd.

megatron-core: megatron/core/transformer/mlp.py (glu), models/common/embeddings/rope_utils.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from patch.amax import largest_of


def swiglu(gate_up: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
    """See LayerKernels."""
    gate, up = gate_up.chunk(2, dim=-1)
    product = F.silu(gate).mul_(up)  # in place saves a pass through memory
    if amax is not None:
        amax.copy_(largest_of(product))
    return product


def swiglu_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor, amax: torch.Tensor | None = None
) -> torch.Tensor:
    """See LayerKernels."""
    gate, up = gate_up.chunk(2, dim=-1)
    of_gate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    of_gate, of_up = of_gate_up.chunk(2, dim=-1)
    torch.mul(gradient, up, out=of_gate)
    torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
    torch.ops.aten.silu.out(gate, out=of_up).mul_(gradient)
    if amax is not None:
        amax.copy_(largest_of(of_gate_up))
    return of_gate_up


def rotate(heads: torch.Tensor, table: torch.Tensor, *, back: bool) -> torch.Tensor:
    """See LayerKernels."""
    cos, sin = table.to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    if back:
        return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def split_qkv(mixed: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See LayerKernels."""
    size = 2 * table.shape[-1]
    query, key, value = mixed.split([mixed.shape[-1] - 2 * size, size, size], dim=-1)
    query = query.unflatten(-1, (-1, size)).flatten(2, 3)
    # A view of v would keep the merged product in memory until backward.
    return rotate(query, table, back=False), rotate(key, table, back=False), value.clone()


def join_qkv(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """See LayerKernels."""
    query = rotate(query, table, back=True).unflatten(2, (key.shape[2], -1)).flatten(3)
    return torch.cat((query, rotate(key, table, back=True), value), dim=-1)
