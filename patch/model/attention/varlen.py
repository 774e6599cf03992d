"""Attention of packed sequences in one kernel: torch's varlen_attn on CUDA, or the package flash-attn 2.

The arguments of varlen_attn differ between torch 2.11 and 2.13, so they are looked up. Those of flash-attn
are of version 2.8 (flash_attn/flash_attn_interface.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from patch.model.attention.packed_sequences import PackedSequences

_LARGEST_HEAD = 256
_AMPERE = (8, 0)


@cache
def _kernel() -> Callable[..., Any] | None:
    """Return torch's varlen_attn, or None if torch has none or one without windows."""
    try:  # imported late: it imports torch's compiler, which takes seconds
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= _arguments(varlen_attn) else None


def _arguments(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def takes_varlen(query: torch.Tensor) -> bool:
    """Return whether varlen_attn supports queries [T, N, D] of this dtype, device and head size."""
    return query.is_cuda and takes_package(query) and _kernel() is not None


def takes_package(query: torch.Tensor) -> bool:
    """Return whether flash-attn 2 supports queries [..., D] of this dtype, device and head size."""
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= _LARGEST_HEAD
        and (not query.is_cuda or torch.cuda.get_device_capability(query.device) >= _AMPERE)
    )


def attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedSequences,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend causally within each sequence; the result is [T, N, D].

    Args:
        query: [T, N, D], for which `takes_varlen` holds.
        key, value: [T, G, D] with G dividing N.
        window: tokens that a token attends to, including itself, or None for all earlier tokens.
    """
    kernel = _kernel()
    assert kernel is not None
    grouped: dict[str, Any] = {}
    if "enable_gqa" in _arguments(kernel):
        grouped["enable_gqa"] = True
    else:
        num_queries = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(num_queries, dim=1) for heads in (key, value))
    borders = packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv
    left = -1 if window is None else window - 1
    return kernel(query, key, value, *borders, scale=scale, window_size=(left, 0), **grouped)


def attend_by_package(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedSequences | None,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
) -> torch.Tensor:
    """Attend causally by flash-attn 2, in each row or in each packed sequence; shaped as the query.

    Args:
        query: [B, S, N, D], or [T, N, D] with packed sequences, for which `takes_package` holds.
        key, value: the same with G heads, G dividing N.
        window: tokens that a token attends to, including itself, or None for all earlier tokens.
        cap: see CausalAttention.
    """
    import flash_attn

    arguments: dict[str, Any] = {
        "softmax_scale": scale,
        "softcap": cap or 0.0,
        "causal": True,
        "window_size": (-1 if window is None else window - 1, 0),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if packed is None:
        return flash_attn.flash_attn_func(query, key, value, **arguments)
    borders = packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv
    return flash_attn.flash_attn_varlen_func(query, key, value, *borders, **arguments)
