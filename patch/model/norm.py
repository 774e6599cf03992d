"""Norms that support sequence parallelism.

megatron-core's local norm refuses sequence parallelism (megatron/core/transformer/torch_norm.py:32). Here
weight and bias have the mark `sequence_parallel`: each TP rank sees only a part of the tokens, so the
gradients are summed over TP once per step (optimizer/overlapped_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from patch.amax import note_amax


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 inside the kernel.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight, in float32 as Gemma does.
    Source: Zhang & Sennrich, arXiv:1910.07467.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self._is_zero_centered = eps, config.layernorm_zero_centered_gamma
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_sbh: torch.Tensor) -> torch.Tensor:
        """Normalize [S, B, H], or other leading dimensions; same shape and dtype."""
        if self._is_zero_centered:
            wide = F.rms_norm(hidden_sbh.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps)
            return wide.to(hidden_sbh.dtype)
        return F.rms_norm(hidden_sbh, self.weight.shape, self.weight, self.eps)


class FusedRMSNorm(RMSNorm):
    """RMSNorm in front of attention or MLP on CUDA. Backward adds the gradient of the residual in its kernel.

    megatron-core passes the same hidden states to the norm and, as the residual, to `ResidualAdd`. The norm
    attaches `through_norm` to them: the same values, whose gradient goes through the norm's backward.
    """

    notes_amax = False
    """Whether the amax of the result is noted, for casts to fewer bytes."""

    def forward(self, hidden_sbh: torch.Tensor) -> torch.Tensor:
        """See RMSNorm."""
        # Only CUDA builds of torch have Triton.
        from patch.model.kernels.fused_norm import NormAndResidual

        amax = hidden_sbh.new_zeros((), dtype=torch.float32) if self.notes_amax else None
        normed, through = NormAndResidual.apply(
            hidden_sbh, self.weight, self.eps, self._is_zero_centered, amax
        )
        if amax is not None:
            note_amax(normed, amax)
        if torch.is_grad_enabled():
            hidden_sbh.through_norm = through  # type: ignore[attr-defined]
        return normed


class AmaxRMSNorm(FusedRMSNorm):
    """FusedRMSNorm in front of products that cast their inputs: it notes the amax of its result."""

    notes_amax = True


class HeadRMSNorm(RMSNorm):
    """RMSNorm of each query or key head, with one weight for all heads (Qwen 3).

    Each TP rank sees only its own heads, so the gradient of the weight is summed over TP even without SP.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        is_cut = config.tensor_model_parallel_size > 1
        self.weight.sequence_parallel = is_cut  # type: ignore[attr-defined]


class AllHeadsRMSNorm(RMSNorm):
    """RMSNorm over all `num_heads` query or key heads of a token, with a weight per channel (OLMo 2).

    TP cuts the heads and the weight, so the squares are summed over `group`, the TP group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        num_heads: int,
        group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__(config, num_heads * hidden_size // group.size(), eps)
        self._width, self.group = num_heads * hidden_size, group
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.weight, group.size() > 1, 0, 1)

    def forward(self, heads_sbnd: torch.Tensor) -> torch.Tensor:
        """Normalize [S, B, heads of this rank, D] over all heads; same shape and dtype."""
        wide = heads_sbnd.flatten(2).float()
        squares = wide.pow(2).sum(-1, keepdim=True)
        if self.group.size() > 1:  # backward sums over the ranks too
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        normed = wide * torch.rsqrt(squares / self._width + self.eps)
        return (self.weight * normed).to(heads_sbnd.dtype).view_as(heads_sbnd)

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any]
    ) -> ShardedStateDict:
        """Return the weight's shard for megatron-core's dist_checkpointing."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=self.group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


class LayerNorm(RMSNorm):
    """Layer norm over the last dimension, with a bias (Ba et al., arXiv:1607.06450)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_sbh: torch.Tensor) -> torch.Tensor:
        """Normalize [S, B, H]; same shape and dtype."""
        return F.layer_norm(hidden_sbh, self.weight.shape, self.weight, self.bias, self.eps)


class ResidualAdd(torch.nn.Module):
    """residual + multiplier * norm(output + bias), in place of megatron-core's bias-dropout-add.

    `norm` is the class of the norm behind attention or MLP, or None.
    """

    def __init__(
        self, config: TransformerConfig, norm: type[torch.nn.Module] | None, multiplier: float
    ) -> None:
        super().__init__()
        self._multiplier = multiplier
        if norm is not None:
            self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)  # type: ignore[call-arg]

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Return the function that megatron-core calls; there is no dropout."""
        return self._add

    def _add(
        self, given: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        output, bias = given
        output = output if bias is None else output + bias
        if hasattr(self, "norm"):
            output = self.norm(output)
        residual = residual.__dict__.pop("through_norm", residual)
        return residual + (output if self._multiplier == 1.0 else output * self._multiplier)
