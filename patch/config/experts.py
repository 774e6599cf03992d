"""Section `experts` of a run (mixture of experts).

The number of experts and their routing are part of the model (`patch/families/shape.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from patch.flag_field import flag

TokenDispatcher = Literal["allgather", "alltoall"]
"""How tokens reach the experts of other ranks; megatron-core's names."""

LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss"]
"""Tokens over which the load balancing loss averages; megatron-core's names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """How the experts of a layer are distributed, and what keeps their load even."""

    expert_model_parallel_size: int = flag("processes that share the experts of a layer (EP)", 1, at_least=1)
    expert_tensor_parallel_size: int | None = flag(
        "processes that share each expert (ETP); 0: as many as other layers (TP)", none=0
    )
    moe_token_dispatcher_type: TokenDispatcher = flag(
        "token dispatcher: each token to its experts (alltoall), or all tokens to all experts (allgather)",
        "alltoall",
    )
    moe_router_load_balancing_type: LoadBalancing = flag(
        "load balancing loss over the tokens of a micro-batch (aux_loss) or of each row (seq_aux_loss)",
        "aux_loss",
    )
    moe_aux_loss_coeff: float = flag(
        "coefficient of the load balancing loss; Qwen uses 1e-3, Mixtral 0.02", 0.0, at_least=0
    )
    moe_z_loss_coeff: float = flag(
        "coefficient of a penalty on large router logits; 1e-3 in the ST-MoE paper", 0.0, at_least=0
    )
    moe_router_bias_update_rate: float = flag(
        "step of a router's expert bias, up for experts below the mean load and down above it; 0: none",
        1e-3,
        at_least=0,
    )
    moe_expert_capacity_factor: float | None = flag(
        "capacity of an expert as a multiple of its even share of a rank's tokens; the most probable tokens "
        "stay; 0: no limit",
        none=0,
    )

    def etp_size(self, tp_size: int) -> int:
        """Return the number of ranks that share each expert (ETP); `tp_size` ranks share the other layers."""
        return self.expert_tensor_parallel_size or tp_size
