"""What an Adam update takes, whoever computes it: scalars of a step, segments of states, the kernel's face.

    g = grad * scale
    p = p * (1 - lr * weight_decay)          AdamW; Adam instead: g = g + weight_decay * p
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * (1 - beta2)) * g
    p = p - (lr / bias1) * (m / (sqrt(v) / sqrt(bias2) + eps))        bias_i = 1 - beta_i ** step

Every product, sum, quotient and root is one IEEE float32 operation, none fused; scalars are computed
in float64 and rounded once. Whoever follows this order gets the same bits, wherever the states lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class AdamScalars:
    """What one update needs besides the tensors; `step` counts updates from 1.

    Source: Loshchilov & Hutter, arXiv:1711.05101, algorithm 2: AdamW, or Adam where not `is_decoupled`.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0
    is_decoupled: bool = True

    def constants(self) -> tuple[float, ...]:
        """grad_scale, beta1, 1 - beta1, beta2, 1 - beta2, step size, root of bias2, eps; not yet rounded."""
        bias1, bias2 = 1.0 - self.beta1**self.step, 1.0 - self.beta2**self.step
        moments = self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2
        return self.grad_scale, *moments, self.lr / bias1, math.sqrt(bias2), self.eps

    def decay(self, is_decayed: bool) -> float:
        """What a segment's masters (AdamW) or its gradient's L2 term (Adam) are multiplied by."""
        rate = self.weight_decay if is_decayed else 0.0
        return 1.0 - self.lr * rate if self.is_decoupled else rate


class States(NamedTuple):
    """(numel,) tensors of one device, contiguous: what an update reads and writes."""

    master: torch.Tensor
    """float32; or int16: the low bits of a split master, whose high bits are the bf16 weight."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    weight: torch.Tensor | None = None
    """The model's bf16 or fp16 weight, made from the master; None where the master is the weight."""


class Segment(NamedTuple):
    """A range of elements of one parameter group."""

    grad: torch.Tensor
    """(numel,) float32 or bfloat16; never changed."""

    states: States
    is_decayed: bool
    shadow: States | None = None
    """Where the results go, of the same types, `states` staying as they are; None: over `states`."""


class AdamKernel(Protocol):
    """An implementation of the update; all of them give the same bits."""

    def update(self, segments: Sequence[Segment], scalars: AdamScalars) -> None:
        """Update all segments, which overlap nowhere, in one go."""


def check(segment: Segment) -> None:
    """Assert that a segment's tensors can be handed to a kernel as bare pointers."""
    states, results = segment.states, segment.shadow or segment.states
    tensors = [tensor for tensor in (segment.grad, *states, *results) if tensor is not None]
    assert all(tensor.is_contiguous() for tensor in tensors), "a kernel takes contiguous tensors"
    assert len({(tensor.numel(), tensor.device) for tensor in tensors}) == 1, "one size and device a segment"
    kinds = [tensor.dtype for tensor in tensors]
    assert kinds[0] in (torch.float32, torch.bfloat16), f"gradient of {kinds[0]}"
    assert kinds[2:4] == [torch.float32] * 2, "moments are float32"
    types = [[getattr(tensor, "dtype", None) for tensor in these] for these in (states, results)]
    assert types[0] == types[1], "a shadow of other types"
    if is_split(segment):
        assert states.weight is not None and states.weight.dtype == torch.bfloat16, "only bf16 weights split"


def is_split(segment: Segment) -> bool:
    """Whether the master is the bf16 weight and 16 more bits."""
    return segment.states.master.dtype == torch.int16


def bf16_weight(states: States) -> torch.Tensor | None:
    """The weight that a kernel writes in its own pass."""
    is_bf16 = states.weight is not None and states.weight.dtype == torch.bfloat16
    return states.weight if is_bf16 else None


def pointers(segment: Segment) -> list[int | None]:
    """Addresses: gradient; master, moments and bf16 weight that are read; the same as they are written."""
    found: list[torch.Tensor | None] = [segment.grad]
    for states in (segment.states, segment.shadow or segment.states):
        found += [states.master, states.exp_avg, states.exp_avg_sq, bf16_weight(states)]
    return [None if tensor is None else tensor.data_ptr() for tensor in found]


@torch.no_grad()
def copy_other_weights(segments: Sequence[Segment]) -> None:
    """Write the weights that no kernel writes (fp16: to nearest, halves to even) from their new masters."""
    for segment in segments:
        results = segment.shadow or segment.states
        if results.weight is not None and bf16_weight(results) is None:
            results.weight.copy_(results.master)
