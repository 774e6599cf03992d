"""Selective recomputation (`AC=sel`): backward recomputes what is large and cheap, but no matrix product.

    norms        their outputs (upstream's `layernorm`), except in fp32 on a CPU and with --precision-align
    activation   the product of silu(gate) and up: one of an MLP's three widths (gated_mlp.py)
    attention    only with --precision-align, where the eager one keeps its scores (upstream's `core_attn`)

Fused attention keeps no scores, so recomputing it, as upstream does by default, saves nothing.
"""

from __future__ import annotations

from collections.abc import Set

import torch


def recomputed_modules(dtype: torch.dtype, aligned: Set[str], *, cuda: bool) -> list[str]:
    """Upstream's `recompute_modules` for AC=sel.

    Norms are left out if torch computes them by several operations, each of which adds a gradient to the
    norm's input. If they were recomputed, these gradients would be summed before the residual's gradient is
    added instead of after it, which gives other bits.

    Args:
        dtype: the dtype of activations.
        aligned: the operations (of `SOURCES`) in Hugging Face's order.
        cuda: whether the model is on a GPU.
    """
    is_one_operation = "rmsnorm" not in aligned and (cuda or dtype != torch.float32)
    attention = ["core_attn"] if "attention" in aligned else []
    return [*attention, "layernorm"] if is_one_operation else attention
