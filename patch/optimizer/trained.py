"""What is trained: the parameters in about the order of backward, and what the layout asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from patch.layout.buckets import ParamSpec
from patch.optimizer.refusals import Named


def trained_in(
    stages: Sequence[torch.nn.Module],
) -> tuple[list[tuple[str, torch.nn.Parameter]], list[int]]:
    """The trainable parameters with their names, in about the order in which backward completes them.

    And the index of each one's stage.
    """
    named, stage_indices = [], []
    for stage, model in reversed(list(enumerate(stages))):
        for name, parameter in reversed(list(model.named_parameters())):
            if parameter.requires_grad:
                named.append((name, parameter))
                stage_indices.append(stage)
    return named, stage_indices


def specs_of(
    named: Named, stage_indices: list[int], group_indices: list[int], domain_indices: list[int]
) -> list[ParamSpec]:
    """What the layout needs to know; a tied embedding, which two pipeline stages must cut alike, is alone."""
    indices = zip(group_indices, stage_indices, domain_indices, strict=True)
    return [
        ParamSpec(parameter.numel(), group, getattr(parameter, "shared_embedding", False), stage, domain)
        for (_, parameter), (group, stage, domain) in zip(named, indices, strict=True)
    ]


def like_trained(parameters: list[torch.nn.Parameter], stages: Sequence[torch.nn.Module]) -> torch.Tensor:
    """A tensor of the type and device that is trained; where nothing is, of the frozen parameters."""
    frozen = chain.from_iterable(stage.parameters() for stage in stages)
    return next(chain(parameters, frozen), torch.empty(0)).detach()
