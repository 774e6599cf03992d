"""HybridAdam: the optimizer states of this rank's shards, and their AdamW update.

The half of the optimizer that knows nothing of communication: it is given shards whose gradients are final
and leaves new weights in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from patch.config.schema import OptimizerConfig
from patch.optimizer.kernels import AdamScalars, Segment, States, adam_kernel


class Run(NamedTuple):
    """Neighbouring elements [begin, end) of a shard with one weight decay."""

    begin: int
    end: int
    is_decayed: bool


class Shard(NamedTuple):
    """This rank's part of one bucket, all that the two halves of the optimizer share."""

    gradient: torch.Tensor
    """(n,) the reduced gradient."""
    weight: torch.Tensor
    """(n,) a view of the flat buffer of weights."""
    runs: list[Run]
    """Its elements without padding."""


class HybridAdam:
    """AdamW states by shard.

    Args:
        shards: in the order of backward; their tensors stay where they are.
        config: betas, eps, decay.
    """

    def __init__(self, shards: Sequence[Shard], config: OptimizerConfig) -> None:
        self.shards, self._config = shards, config
        self.step_count = 0
        self._kernel = adam_kernel(shards[0].weight.device)
        self.has_masters = shards[0].weight.dtype != torch.float32
        """Whether masters are states of their own; fp32 weights are their own masters."""
        self.names = ("exp_avg", "exp_avg_sq") + ("master",) * self.has_masters
        numels = [shard.weight.numel() for shard in shards]
        self._states: dict[str, Sequence[torch.Tensor]] = {
            name: torch.zeros(sum(numels), dtype=torch.float32, device=shards[0].weight.device).split(numels)
            for name in self.names
        }
        if self.has_masters:
            self.refresh_masters()
        else:
            self._states["master"] = [shard.weight for shard in shards]

    def refresh_masters(self) -> None:
        """Take the model's weights as masters; call after weights were loaded into the model."""
        if self.has_masters:
            for shard, master in zip(self.shards, self._states["master"], strict=True):
                master.copy_(shard.weight)

    def start_update(self) -> None:
        """Begin a step: the shards' `update`s that follow belong to it."""
        self.step_count += 1

    @torch.no_grad()
    def update(self, index: int, lr: float, grad_scale: float) -> None:
        """New weights for shard `index`.

        Args:
            lr: rate of this step. grad_scale: factor on the gradient (clipping, fp16's scale undone).
        """
        shard = self.shards[index]
        scalars = AdamScalars(
            lr=lr,
            beta1=self._config.adam_beta1,
            beta2=self._config.adam_beta2,
            eps=self._config.adam_eps,
            weight_decay=self._config.weight_decay,
            step=self.step_count,
            grad_scale=grad_scale,
        )
        tensors = [self._states[name][index] for name in ("master", "exp_avg", "exp_avg_sq")]
        segments = []
        for begin, end, is_decayed in shard.runs:
            master, exp_avg, exp_avg_sq = (tensor[begin:end] for tensor in tensors)
            weight = shard.weight[begin:end] if self.has_masters else None
            states = States(master, exp_avg, exp_avg_sq, weight)
            segments.append(Segment(shard.gradient[begin:end], states, is_decayed))
        self._kernel.update(segments, scalars)

    def state(self, name: str, index: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Views of a state of elements [begin, end) of shard `index`, each with its first element."""
        yield begin, self._states[name][index][begin:end]
