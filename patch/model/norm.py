"""Norms that support sequence parallelism.

megatron-core's local norm refuses sequence parallelism (megatron/core/transformer/torch_norm.py:32). Here
weight and bias have the mark `sequence_parallel`: each TP rank sees only a part of the tokens, so the
gradients are summed over TP once per step (optimizer/overlapped_optimizer.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 inside the kernel.

    Source: Zhang & Sennrich, arXiv:1910.07467.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_sbh: torch.Tensor) -> torch.Tensor:
        """Normalize [S, B, H], or other leading dimensions; same shape and dtype."""
        return F.rms_norm(hidden_sbh, self.weight.shape, self.weight, self.eps)


class HeadRMSNorm(RMSNorm):
    """RMSNorm of each query or key head, with one weight for all heads (Qwen 3).

    Each TP rank sees only its own heads, so the gradient of the weight is summed over TP even without SP.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        is_cut = config.tensor_model_parallel_size > 1
        self.weight.sequence_parallel = is_cut  # type: ignore[attr-defined]


class LayerNorm(RMSNorm):
    """Layer norm over the last dimension, with a bias (Ba et al., arXiv:1607.06450)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_sbh: torch.Tensor) -> torch.Tensor:
        """Normalize [S, B, H]; same shape and dtype."""
        return F.layer_norm(hidden_sbh, self.weight.shape, self.weight, self.bias, self.eps)
