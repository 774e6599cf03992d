"""torch's fused attention with the log-sum-exp of its scores, and its backward for a part of the keys.

Context parallelism computes attention one key chunk at a time. To merge the results it needs the log-sum-exp.
In backward it gives each chunk the log-sum-exp and the output over all chunks. torch's public function
returns neither; `varlen_attn` does, on CUDA and in forward only. torch's own ring attention
(torch/distributed/tensor/experimental/_context_parallel/_attention.py:658-900) calls the same private
functions; it has no kernel for CPUs, takes no mask, and is itself private. Delete when torch has a public
attention, forward and backward, that takes and returns the log-sum-exp.

    CPU                             flash kernel: fp64, fp32, bf16, fp16; masks; grouped heads
    CUDA, fp16 or bf16, no mask     cuDNN on request (its plan is for one shape), else FlashAttention:
                                    grouped heads
    CUDA otherwise                  memory-efficient attention: masks; heads are repeated

Shapes: B rows, N query heads, G key/value heads with G dividing N, Q queries, K keys, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_aten = torch.ops.aten
_NO_DROPOUT = 0.0
_LARGEST_FLASH_HEAD = 256
_LARGEST_CUDNN_HEAD = 128
_LSE_ALIGNMENT = 32
"""The memory-efficient kernel pads the log-sum-exp to a multiple of this (kAlignLSE)."""
_BIAS_ALIGNMENT = 16
"""Rows of the memory-efficient kernel's bias begin at multiples of this many elements."""


def attend_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    takes_cudnn: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output and the log-sum-exp of the scores.

    Args:
        query: [B, N, Q, D]; key, value: [B, G, K, D].
        bias: [Q, K] of the same dtype, added to the scores; -inf hides a key from a query.
        is_causal: query i sees keys 0 to i; only without bias and with Q == K.
        scale: factor of the scores.
        takes_cudnn: use cuDNN on CUDA if it supports the inputs.
    Returns:
        [B, N, Q, D] of the same dtype, and [B, N, Q] in float32 (float64 for float64).
    """
    if not query.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, _NO_DROPOUT, is_causal, attn_mask=bias, scale=scale
        )
    if takes_cudnn and _takes_16_bits(query, bias, _LARGEST_CUDNN_HEAD):
        out, lse = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, _NO_DROPOUT, is_causal, scale=scale
        )[:2]
        return out, lse.squeeze(-1)
    if _takes_16_bits(query, bias, _LARGEST_FLASH_HEAD):
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, _NO_DROPOUT, is_causal, scale=scale
        )[:2]
    key, value = _repeat(query, key), _repeat(query, value)
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, _aligned_bias(query, bias), True, _NO_DROPOUT, is_causal, scale=scale
    )
    return out, lse[..., : query.shape[2]]


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
    takes_cudnn: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, as far as they come from these keys.

    Args:
        gradient: [B, N, Q, D], of the output over all keys.
        query, key, value, bias, is_causal, scale, takes_cudnn: as in `attend_with_lse`.
        out: [B, N, Q, D], the output over all keys.
        lse: [B, N, Q], the log-sum-exp over all keys.
    """
    lse = lse.contiguous()
    if not query.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, _NO_DROPOUT, is_causal, attn_mask=bias, scale=scale
        )
    # Without dropout the kernels do not read the state of the random generator.
    if takes_cudnn and _takes_16_bits(query, bias, _LARGEST_CUDNN_HEAD):
        random = query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)
        return _aten._scaled_dot_product_cudnn_attention_backward(
            gradient, query, key, value, out, lse[..., None], *random, None, None, None, query.shape[2],
            key.shape[2], _NO_DROPOUT, is_causal, scale=scale,
        )  # fmt: skip
    if _takes_16_bits(query, bias, _LARGEST_FLASH_HEAD):
        # No copies: the kernel takes [B, Q, N, D], which is the memory layout of one row.
        random = query.new_empty(2, dtype=torch.uint64), query.new_empty(0, dtype=torch.uint64)
        return _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, lse, None, None, query.shape[2], key.shape[2], _NO_DROPOUT,
            is_causal, *random, scale=scale,
        )  # fmt: skip
    # In fp16 and bf16 the kernel assumes the forward kernel's layout, [B, Q, N, D], and ignores the strides
    # of the output (mem_eff_attention/kernel_backward.h:684).
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    gradient = gradient.contiguous()
    lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_ALIGNMENT), value=torch.inf)
    seed = torch.zeros((), dtype=torch.int64)
    gradients = _aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, _repeat(query, key), _repeat(query, value), _aligned_bias(query, bias), out, lse,
        seed, seed, _NO_DROPOUT, [True, True, True, False], is_causal, scale=scale,
    )  # fmt: skip
    of_query, *of_pair = gradients[:3]
    of_key, of_value = (repeated.unflatten(1, (key.shape[1], -1)).sum(2) for repeated in of_pair)
    return of_query, of_key, of_value


def _takes_16_bits(query: torch.Tensor, bias: torch.Tensor | None, largest_head: int) -> bool:
    return (
        bias is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= largest_head
    )


def _repeat(query: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Repeat each head for its query heads: [B, G, K, D] to [B, N, K, D]."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _aligned_bias(query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Expand [Q, K] to [B, N, Q, K] without a copy for each head, with aligned rows."""
    if bias is None:
        return None
    num_keys = bias.shape[1]
    padded = F.pad(bias, (0, -num_keys % _BIAS_ALIGNMENT))[:, :num_keys]
    return padded.expand(*query.shape[:2], *bias.shape)
