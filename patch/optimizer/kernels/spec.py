"""The order of operations of every Adam kernel, and its arguments.

    g = grad * scale
    p = p * (1 - lr * weight_decay)          AdamW; Adam instead: g = g + weight_decay * p
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * (1 - beta2)) * g
    p = p - (lr / bias1) * (m / (sqrt(v) / sqrt(bias2) + eps))        bias_i = 1 - beta_i ** step

Every product, sum, quotient and root is one IEEE float32 operation, without fusion. Scalars are computed in
float64 and rounded once. All kernels follow this order, so they give the same bits on every device. Moments
in fewer bytes (low_bit_moments.py) are widened before the update, and rounded after p was computed from m and
v. If a moment has fewer bytes, both bias2 are folded into scalars, which saves a quotient:

    p = p - (lr / bias1 * sqrt(bias2)) * (m / (sqrt(v) + eps * sqrt(bias2)))

SGD has one moment. The weight decay is added to the gradient, as in torch.optim.SGD:

    g = grad * scale + weight_decay * p
    m = m * momentum + g
    p = p - lr * m                           without a moment: p - lr * g
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from patch.config.choices import MOMENT_BLOCK
from patch.optimizer.kernels.low_bit_moments import KINDS, RngCoords


@dataclass(frozen=True, kw_only=True)
class AdamScalars:
    """The scalars of one parameter group's update in one step.

    States without a second moment are updated by SGD, which takes no `beta2`, `eps` and `step`.
    Source: Loshchilov & Hutter, arXiv:1711.05101, algorithm 2: AdamW (`decoupled_weight_decay`) or Adam.
    """

    lr: float
    beta1: float
    """Decay of the first moment; SGD's momentum."""
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of updates of these states, including this one: 1 at the first."""
    grad_scale: float = 1.0
    """Factor on the gradient: clipping, and the inverse of fp16's loss scale."""
    decoupled_weight_decay: bool = True

    @cached_property
    def constants(self) -> tuple[float, ...]:
        """grad_scale, beta1, 1 - beta1, beta2, 1 - beta2, lr / bias1, sqrt(bias2), eps, decay; in float64.

        decay is the factor on the masters (AdamW: 1 - lr * weight_decay), or of the L2 term (Adam).
        """
        bias1, bias2 = 1.0 - self.beta1**self.step, 1.0 - self.beta2**self.step
        moments = self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2
        decay = 1.0 - self.lr * self.weight_decay if self.decoupled_weight_decay else self.weight_decay
        return self.grad_scale, *moments, self.lr / bias1, math.sqrt(bias2), self.eps, decay

    @cached_property
    def folded_constants(self) -> tuple[float, ...]:
        """Return `constants` with sqrt(bias2) multiplied into lr / bias1 and eps, and replaced by 1."""
        *others, step_size, root_bias2, eps, decay = self.constants
        return *others, step_size * root_bias2, 1.0, eps * root_bias2, decay

    @property
    def sgd_constants(self) -> tuple[float, ...]:
        """Return the scalars of SGD in the places of `constants`."""
        return self.grad_scale, self.beta1, 1.0, 0.0, 0.0, self.lr, 1.0, 0.0, self.weight_decay


class AdamStates(NamedTuple):
    """The states that an update reads and writes: contiguous (numel,) tensors on one device."""

    master: torch.Tensor
    """float32; or int16: the low bits of a split master, whose high bits are the bf16 parameter."""

    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    """Moments: each float32, bfloat16, or uint8 with a scale for each block (low_bit_moments.py). SGD has at
    most the first one, as float32."""

    param: torch.Tensor | None = None
    """The model's bf16 or fp16 parameter, rounded from the master; None if the master is the parameter."""

    exp_avg_scale: torch.Tensor | None = None
    exp_avg_sq_scale: torch.Tensor | None = None
    """(numel / MOMENT_BLOCK,) float32 scales of 8-bit moments, or None."""

    @property
    def bf16_param(self) -> torch.Tensor | None:
        """Return the bf16 parameter, which a kernel writes together with the states, or None."""
        return self.param if self.param is not None and self.param.dtype == torch.bfloat16 else None


class UpdateItem(NamedTuple):
    """Neighbouring elements of one parameter group."""

    grad: torch.Tensor
    """(numel,) float32 or bfloat16; not changed."""

    states: AdamStates
    scalars: AdamScalars
    out: AdamStates | None = None
    """Where the results are written, with the dtypes of `states`, or None to overwrite `states`."""

    draw: RngCoords | None = None
    """The coordinates of the random numbers for bf16 moments, or None."""

    @property
    def results(self) -> AdamStates:
        """Return where the results are written."""
        return self.out or self.states

    @property
    def is_sgd(self) -> bool:
        """Return whether the update is that of SGD, which has no second moment."""
        return self.states.exp_avg_sq is None

    @property
    def is_split(self) -> bool:
        """Return whether the master is split into the bf16 parameter and 16 low bits."""
        return self.states.master.dtype == torch.int16

    @property
    def moment_kinds(self) -> tuple[int, int]:
        """Return the indices of the moments' dtypes in KINDS; -1 for a moment that SGD does not have."""
        first, second = (-1 if each is None else KINDS.index(each.dtype) for each in self.states[1:3])
        return first, second

    @property
    def constants(self) -> tuple[float, ...]:
        """Return the scalars of the update, in the order of `AdamScalars.constants`."""
        if self.is_sgd:
            return self.scalars.sgd_constants
        return self.scalars.folded_constants if any(self.moment_kinds) else self.scalars.constants

    @property
    def rng_numbers(self) -> tuple[int, ...]:
        """Return the numbers of `draw` for kernels, or unused values without it."""
        return (0, 1, 1, 0, 0, 0) if self.draw is None else self.draw.numbers(self.scalars.step)

    @property
    def pointers(self) -> list[int | None]:
        """Return addresses of the gradient, of states and bf16 parameter to read and to write, of scales."""
        tensors: list[torch.Tensor | None] = [self.grad]
        for states in (self.states, self.results):
            tensors += [states.master, states.exp_avg, states.exp_avg_sq, states.bf16_param]
        for states in (self.states, self.results):
            tensors += [states.exp_avg_scale, states.exp_avg_sq_scale]
        return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


PreparedUpdate = Callable[[Sequence[AdamScalars]], None]
"""The update of some items; takes the scalars of each parameter group in this step."""


class AdamKernel(Protocol):
    """An implementation of the update; all implementations give the same bits."""

    def update(self, items: Sequence[UpdateItem]) -> None:
        """Update all items, which must not overlap, in one call."""

    def prepare(self, items: Sequence[UpdateItem], groups: Sequence[int]) -> PreparedUpdate:
        """Return the update, for many steps, of items whose memory stays where it is.

        `groups` are the indices of each item's scalars in those that the update takes.
        """
        pairs = list(zip(items, groups, strict=True))
        return lambda scalars: self.update([item._replace(scalars=scalars[group]) for item, group in pairs])


def check_item(item: UpdateItem) -> None:
    """Assert that a kernel can use an item's tensors as plain pointers."""
    states, results = item.states, item.results
    given = [tensor for tensor in (item.grad, *states, *results) if tensor is not None]
    assert all(tensor.is_contiguous() for tensor in given), "a kernel takes contiguous tensors"
    tensors = [t for t in (item.grad, *states[:4], *results[:4]) if t is not None]
    assert len({(tensor.numel(), tensor.device) for tensor in tensors}) == 1, "one size and device in an item"
    assert item.grad.dtype in (torch.float32, torch.bfloat16), f"gradient of {item.grad.dtype}"
    moments = {moment.dtype for moment in states[1:3] if moment is not None}
    assert moments <= ({torch.float32} if item.is_sgd else {*KINDS}), f"moments of {moments}"
    assert torch.bfloat16 not in moments or item.draw is not None, "bf16 moments need random numbers"
    for these in (states, results):
        for moment, scale in zip(these[1:3], these[4:], strict=True):
            sizes = None if scale is None else (scale.numel() * MOMENT_BLOCK, scale.dtype)
            is_scaled = moment is not None and moment.dtype == torch.uint8
            wanted = (item.grad.numel(), torch.float32) if is_scaled else None
            assert sizes == wanted, "8-bit moments have a float32 scale for each block, others none"
    types = [[getattr(tensor, "dtype", None) for tensor in these] for these in (states, results)]
    assert types[0] == types[1], "results of other types"
    assert states.bf16_param is not None or not item.is_split, "only bf16 splits"


@torch.no_grad()
def copy_other_params(items: Sequence[UpdateItem]) -> None:
    """Copy new masters to the parameters that kernels do not write (fp16: to nearest, ties to even)."""
    for item in items:
        results = item.results
        if results.param is not None and results.bf16_param is None:
            results.param.copy_(results.master)
