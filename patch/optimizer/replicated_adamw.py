"""AdamW with float32 masters, the whole state on every data-parallel rank.

Parameters, gradients and states live in flat buffers of one order: parameters with weight decay first,
then those without (norms, biases), so that a step is a handful of operations on two slices.

    state per parameter: weight (2 bytes in bf16, 4 in fp32) + gradient 4 + exp_avg 4 + exp_avg_sq 4
                         + master 4 in bf16; in fp32 the weight is the master
"""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import OptimizerConfig
from patch.optimizer.adamw import AdamWScalars, adamw_update
from patch.optimizer.gradients import GradientBuffer
from patch.optimizer.rounding import round_to_bf16

_STATES = ("master", "exp_avg", "exp_avg_sq")


class ReplicatedAdamW:
    """The optimizer of one model stage.

    Args:
        model: its trainable parameters are re-pointed into one flat buffer; their dtype is kept.
        optimizer: rates, decay, clipping.
        groups: process groups of the gradient reduction and of the norm.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: OptimizerConfig, groups: ProcessGroupCollection
    ) -> None:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        decayed = [parameter for parameter in trainable if parameter.ndim > 1]
        self.parameters = decayed + [parameter for parameter in trainable if parameter.ndim <= 1]
        self.config = optimizer
        self.step_count = 0
        self._num_decayed = sum(parameter.numel() for parameter in decayed)
        self.gradients = GradientBuffer(self.parameters, groups)
        self._weights = _flatten(self.parameters)
        self.state = {name: torch.zeros_like(self.gradients.flat) for name in _STATES[1:]}
        self._has_masters = self._weights.dtype != torch.float32
        self.state["master"] = self._weights.float() if self._has_masters else self._weights

    def refresh_masters(self) -> None:
        """Take the model's weights as masters; call after weights were loaded into the model."""
        if self._has_masters:
            self.state["master"].copy_(self._weights)

    def step(self, lr: float, grad_norm: float) -> None:
        """Clip and update from the reduced gradients, then write the model's weights.

        Args:
            lr: rate of this step. grad_norm: global norm of the reduced gradients, finite.
        """
        self.step_count += 1
        limit = self.config.clip_grad
        scale = min(1.0, limit / (grad_norm + 1e-6)) if limit > 0 else 1.0
        for begin, end, decay in (
            (0, self._num_decayed, self.config.weight_decay),
            (self._num_decayed, self._weights.numel(), 0.0),
        ):
            slices = [self.state[name][begin:end] for name in _STATES]
            scalars = AdamWScalars(
                lr=lr,
                beta1=self.config.adam_beta1,
                beta2=self.config.adam_beta2,
                eps=self.config.adam_eps,
                weight_decay=decay,
                step=self.step_count,
                grad_scale=scale,
            )
            adamw_update(slices[0], self.gradients.flat[begin:end], slices[1], slices[2], scalars)
        if self._has_masters:
            round_to_bf16(self.state["master"], self._weights)

    def sharded_state_dict(self, model_state: ShardedStateDict) -> ShardedStateDict:
        """States as sharded tensors, keyed `optimizer.state.<state>.<weight's key>`.

        They are views: loading into them loads the optimizer. fp32 weights are their own masters and
        are left to the model's state.

        Args:
            model_state: the model's sharded_state_dict, whose entries hold the parameters themselves.
        """
        shards = get_param_id_to_sharded_param_map(model_state, self.parameters)
        numels = [parameter.numel() for parameter in self.parameters]
        sharded: ShardedStateDict = {}
        for name in _STATES if self._has_masters else _STATES[1:]:
            pieces = self.state[name].split(numels)
            for index, (parameter, piece) in enumerate(zip(self.parameters, pieces, strict=True)):
                sharded[f"{name}.{index}"] = make_sharded_optimizer_tensor(
                    shards[index], piece.view(parameter.shape), prefix=f"optimizer.state.{name}"
                )
        return sharded


@torch.no_grad()
def _flatten(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Move parameters of one dtype and device into one flat buffer that they become views of."""
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = view.view(parameter.shape)
    return flat
