"""Muon: momentum of matrices, orthogonalized as a whole, in place of their gradients.

A matrix is orthogonalized on the compute device, wherever its momentum is. Between the final gradients and
the update, a step does the following:

    each rank       momentum and direction of its shards; they are elementwise and never fused
    gather          each matrix to one data-parallel rank, and there over TP
    orthogonalize   each Hugging Face tensor of the matrix (q, k and v, gate and up) by itself
    scatter         the results take the place of the gradients; the kernel's update has no moments

Source: Jordan et al., 2024 (Muon); Newton-Schulz iteration and coefficients are those of torch.optim.Muon.
The factors of the rate are Megatron-LM's --muon-scale-mode (emerging_optimizers, get_muon_scale_factor).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist

from patch.compat.torch_internals import newton_schulz
from patch.config.choices import MuonScaleMode
from patch.config.schema import OptimizerConfig
from patch.features.optimizers import MOMENTUM
from patch.memory.disk import on_host, write_values
from patch.optimizer.buckets.buffer_group import FlatLayout
from patch.optimizer.grad_norm import GradNorm
from patch.optimizer.param_groups import Matrix
from patch.optimizer.states.hybrid_adam import HybridAdam

_COEFFICIENTS, _EPS = (3.4445, -4.7750, 2.0315), 1e-7
FACTORS: dict[MuonScaleMode, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""Factor of the rate of a matrix, by --muon-scale-mode."""

_Piece = tuple[int, torch.Tensor, torch.Tensor]
"""First element of a part of a parameter, and the part's momentum and gradient."""


_WHOLE = Matrix(None, list, lambda local, parts: local.copy_(parts[0]))
"""A parameter that is one whole matrix."""


class Muon:
    """The momentum of the matrices in parameter groups with `orthogonalizes`, and their directions.

    Args:
        matrices: how parameters are made of matrices; a parameter without entry is one whole matrix.
    """

    def __init__(
        self,
        layout: FlatLayout,
        norm: GradNorm,
        adam: HybridAdam,
        config: OptimizerConfig,
        matrices: Mapping[torch.nn.Parameter, Matrix],
    ) -> None:
        self._norm, self._adam, self._config, self._matrices = norm, adam, config, matrices
        self._device, groups = layout.held.device, layout.held.groups
        self._trained = [
            (parameter, layout.buffer_groups[spec.buffer_group])
            for parameter, spec in zip(layout.held.parameters, layout.specs, strict=True)
            if groups[spec.group].orthogonalizes
        ]

    def orthogonalize(self, grad_scale: float) -> None:
        """Replace the final gradients of matrices by orthogonalized momenta; a collective of the job."""
        pieces: dict[torch.nn.Parameter, list[_Piece]] = defaultdict(list)
        momenta = self._norm.state_ranges(partial(self._adam.state, MOMENTUM))
        for kept, new in zip(momenta, self._norm.state_ranges(self._gradients), strict=True):
            pieces[kept.parameter].append((kept.first, kept.values, new.values))
        # As many at once as ranks can share: each then has a whole matrix, never all of them.
        size = max((buffers.num_shards for _, buffers in self._trained), default=1)
        for first in range(0, len(self._trained), size):
            self._orthogonalize_some(range(len(self._trained))[first : first + size], pieces, grad_scale)

    def _orthogonalize_some(
        self, numbers: range, pieces: Mapping[torch.nn.Parameter, list[_Piece]], grad_scale: float
    ) -> None:
        gathered: dict[int, torch.Tensor] = {}
        for number in numbers:
            parameter, buffers = self._trained[number]
            whole = torch.zeros(parameter.numel(), device=self._device)
            for first, momentum, gradient in pieces[parameter]:
                whole[first : first + len(momentum)] = self._direction(momentum, gradient, grad_scale)
            owner = number % buffers.num_shards
            if buffers.num_shards > 1:
                dist.reduce(whole, group_dst=owner, group=buffers.shard_group)
            if owner == buffers.shard_group.rank() or buffers.num_shards == 1:
                gathered[number] = whole
        for number, whole in gathered.items():
            self._orthogonalize(self._trained[number][0], whole)
        for number in numbers:
            parameter, buffers = self._trained[number]
            whole = gathered.pop(number, torch.empty(0))
            if buffers.num_shards > 1:
                whole = whole if len(whole) else torch.empty(parameter.numel(), device=self._device)
                dist.broadcast(whole, group_src=number % buffers.num_shards, group=buffers.shard_group)
            for first, _, gradient in pieces[parameter]:
                gradient.copy_(whole[first : first + len(gradient)])

    def _gradients(self, index: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the gradients of a part of a shard, cut like its momentum."""
        for first, momentum in self._adam.state(MOMENTUM, index, begin, end):
            yield first, self._norm.shards[index].grad[first : first + len(momentum)]

    def _direction(self, kept: torch.Tensor, gradient: torch.Tensor, scale: float) -> torch.Tensor:
        """Update the momentum of some elements, and return it, or with Nesterov a step ahead of it."""
        beta, g = self._config.muon_momentum, gradient.to(self._device).float() * scale
        momentum = (on_host(kept) if kept.is_meta else kept).to(self._device) * beta
        g *= 1 - beta
        momentum += g
        write_values(kept, momentum)
        return g + momentum * beta if self._config.muon_use_nesterov else momentum

    def _orthogonalize(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> None:
        local, matrix = whole.view(parameter.shape), self._matrices.get(parameter, _WHOLE)
        shards = [local]
        if matrix.group is not None:
            shards = [torch.empty_like(local) for _ in range(matrix.group.size())]
            dist.all_gather(shards, local, group=matrix.group)
        matrix.join(local, [self._scaled(part) for part in matrix.split(shards)])

    def _scaled(self, matrix: torch.Tensor) -> torch.Tensor:
        config = self._config
        factor = FACTORS[config.muon_scale_mode](*matrix.shape) * config.muon_extra_scale_factor
        return newton_schulz(matrix, _COEFFICIENTS, config.muon_num_ns_steps, _EPS).float() * factor
