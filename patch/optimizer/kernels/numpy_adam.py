"""The update in NumPy: the reference of the other kernels in tests, and the kernel without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from patch.config.choices import MOMENT_BLOCK
from patch.optimizer.kernels.low_bit_moments import codes, midpoints
from patch.optimizer.kernels.spec import (
    AdamKernel,
    AdamScalars,
    AdamStates,
    UpdateItem,
    check_item,
    copy_other_params,
)

# Elements that are updated at a time, so few that temporaries stay in a core's cache.
_TILE = 1 << 16


class NumpyAdam(AdamKernel):
    """The update on CPU tensors, in one thread."""

    def update(self, items: Sequence[UpdateItem]) -> None:
        """See AdamKernel."""
        for item in items:
            check_item(item)
            for begin in range(0, item.grad.numel(), _TILE):
                part = slice(begin, begin + _TILE)
                with np.errstate(all="ignore"):
                    _update_part(item, part)
        copy_other_params(items)


def _update_part(item: UpdateItem, part: slice) -> None:
    states = _arrays(item.states, part)
    results = states if item.out is None else _arrays(item.out, part)
    master = states.master
    if item.is_split:
        assert states.param is not None
        master = join_split(states.param, states.master)
    grad = item.grad[part].float().numpy()
    moments = [_widened(states, which) for which in range(len(states.moments))]
    if item.is_sgd:
        new, *moments = sgd(master, grad, *moments, scalars=item.scalars)
    else:
        exp_avg, exp_avg_sq = moments
        is_folded = any(item.moment_kinds)
        new, *moments = adam(master, grad, exp_avg, exp_avg_sq, item.scalars, is_folded=is_folded)
    results.master[:] = low_bits(new) if item.is_split else new
    is_drawn = any(kept.dtype == np.uint16 for kept in states.moments)
    numbers = _numbers(item, part) if is_drawn else None
    for which, values in enumerate(moments):
        _keep(results, which, values, numbers)
    if results.param is not None:
        results.param[:] = round_to_bf16(new)


def _widened(states: _Arrays, which: int) -> np.ndarray:
    kept, scales = states.moments[which], states.scales[which]
    if kept.dtype == np.uint16:
        return (kept.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if scales is not None:
        return codes(signed=which == 0)[kept] * np.repeat(scales, MOMENT_BLOCK)
    return kept


def _keep(states: _Arrays, which: int, values: np.ndarray, numbers: np.ndarray | None) -> None:
    kept, scales = states.moments[which], states.scales[which]
    if kept.dtype == np.uint16:
        assert numbers is not None
        kept[:] = round_stochastically(
            values, numbers & np.uint32(0xFFFF) if which == 0 else numbers >> np.uint32(16)
        )
    elif scales is not None:
        kept[:], scales[:] = to_eight_bits(values, signed=which == 0)
    else:
        kept[:] = values


def _numbers(item: UpdateItem, part: slice) -> np.ndarray:
    assert item.draw is not None and isinstance(item.scalars, AdamScalars)
    first, row, stride, skip, *keys = item.draw.numbers(item.scalars.step)
    places = np.arange(skip + part.start, skip + min(part.stop, item.grad.numel()))
    return random_numbers((first + places // row * stride + places % row).astype(np.uint64), *keys)


def random_numbers(indices: np.ndarray, first_key: int, second_key: int) -> np.ndarray:
    """Return (n,) uint32: lowbias32 of the lower 32 bits of uint64 indices, with two 32-bit keys.

    Args:
        indices: (n,) indices of elements in their whole parameter; the upper 32 bits change both keys.
    """
    high = (indices >> np.uint64(32)).astype(np.uint32) * np.uint32(0x9E3779B9)
    second = np.uint32(second_key) + high
    x = indices.astype(np.uint32) ^ np.uint32(first_key) ^ high
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = ((x ^ (x >> np.uint32(15))) + second) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def round_stochastically(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the bits of (n,) float32 rounded to bf16 with (n,) uint32 of 16-bit random numbers; one NaN."""
    bits = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))
    return ((bits + numbers) >> np.uint32(16)).astype(np.uint16)


def to_eight_bits(values: np.ndarray, *, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the nearest codes, and a scale for each block.

    Args:
        values: (n,) finite float32, in whole blocks; not negative for second moments (not `signed`).
    """
    scales = np.abs(values.reshape(-1, MOMENT_BLOCK)).max(axis=1)
    is_normal = scales >= np.finfo(np.float32).tiny
    inverse = np.where(is_normal, np.float32(1) / scales, np.float32(0))
    ratios = values * np.repeat(inverse, MOMENT_BLOCK)
    ranks = np.searchsorted(midpoints(signed=signed), np.abs(ratios))
    if signed:
        below = np.searchsorted(midpoints(signed=True, negative=True), np.abs(ratios))
        indices = np.where(np.signbit(ratios), 127 - below, 127 + ranks)
    else:
        indices = np.maximum(ranks, 1)
    return indices.astype(np.uint8), np.where(is_normal, scales, np.float32(0))


def adam(
    master: np.ndarray,
    grad: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    scalars: AdamScalars,
    *,
    is_folded: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the reference update: new master, exp_avg and exp_avg_sq.

    Args:
        master: (n,) float32, like the other arrays.
        grad: (n,) gradients, before `grad_scale`.
        exp_avg: (n,) first moments.
        exp_avg_sq: (n,) second moments.
        is_folded: use folded scalars, as with moments in fewer bytes.
    """
    constants = scalars.folded_constants if is_folded else scalars.constants
    scale, beta1, rest1, beta2, rest2, step_size, root_bias2, eps, decay = map(np.float32, constants)
    is_decoupled = scalars.decoupled_weight_decay
    g = grad * scale if is_decoupled else grad * scale + decay * master
    p = master * decay if is_decoupled else master
    m = exp_avg * beta1 + g * rest1
    v = exp_avg_sq * beta2 + (g * rest2) * g
    return p - step_size * (m / (np.sqrt(v) / root_bias2 + eps)), m, v


def sgd(
    master: np.ndarray, grad: np.ndarray, exp_avg: np.ndarray | None = None, *, scalars: AdamScalars
) -> tuple[np.ndarray, ...]:
    """Return the reference update of SGD: new master, and exp_avg if it is given; see `adam`."""
    scale, momentum, *_, lr, _, _, decay = map(np.float32, scalars.sgd_constants)
    g = grad * scale + decay * master
    if exp_avg is None:
        return (master - lr * g,)
    m = exp_avg * momentum + g
    return master - lr * m, m


def round_to_bf16(master: np.ndarray) -> np.ndarray:
    """Return the bits of float32 rounded to bf16: to nearest, ties away from zero; all NaNs alike."""
    high = ((master.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(master), np.uint16(0x7FC0), high)


def low_bits(master: np.ndarray) -> np.ndarray:
    """Return the bits of a master that `round_to_bf16` drops; zero for NaN."""
    low = (master.view(np.uint32) & np.uint32(0xFFFF)).astype(np.uint16)
    return np.where(np.isnan(master), np.uint16(0), low)


def join_split(param: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Return the float32 masters with these bf16 bits and low bits: the inverse of the rounding."""
    high = param - (low >> np.uint16(15))
    return ((high.astype(np.uint32) << np.uint32(16)) | low).view(np.float32)


class _Arrays(NamedTuple):
    """NumPy views of some elements of the states; bf16 values and low bits of masters as uint16."""

    master: np.ndarray
    moments: list[np.ndarray]
    param: np.ndarray | None
    scales: list[np.ndarray | None]


def _arrays(states: AdamStates, part: slice) -> _Arrays:
    scaled = slice(part.start // MOMENT_BLOCK, part.stop // MOMENT_BLOCK)
    param = states.bf16_param
    return _Arrays(
        _array(states.master[part]),
        [_array(moment[part]) for moment in states[1:3] if moment is not None],
        None if param is None else _array(param[part]),
        [None if scale is None else scale[scaled].numpy() for scale in states[4:]],
    )


def _array(tensor: torch.Tensor) -> np.ndarray:
    is_half = tensor.dtype in (torch.bfloat16, torch.int16)
    return tensor.view(torch.int16).numpy().view(np.uint16) if is_half else tensor.numpy()
