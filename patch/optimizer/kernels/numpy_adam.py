"""The update in NumPy: the reference of the other kernels in tests, and the kernel without a compiler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from patch.optimizer.kernels.spec import (
    AdamScalars,
    AdamStates,
    UpdateItem,
    bf16_param,
    check_item,
    copy_other_params,
)

# Elements that are updated at a time: few enough that temporaries stay in a core's cache.
_TILE = 1 << 16


class NumpyAdam:
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
    """Update some elements of an item."""
    states = _arrays(item.states, part)
    results = states if item.out is None else _arrays(item.out, part)
    is_split = states[0].dtype == np.uint16
    master = join_split(states[3], states[0]) if is_split else states[0]
    grad = item.grad[part].float().numpy()
    new, exp_avg, exp_avg_sq = adam(master, grad, states[1], states[2], item.scalars)
    results[0][:] = low_bits(new) if is_split else new
    results[1][:], results[2][:] = exp_avg, exp_avg_sq
    if len(results) > 3:
        results[3][:] = round_to_bf16(new)


def adam(
    master: np.ndarray,
    grad: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    scalars: AdamScalars,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The reference: new master, exp_avg and exp_avg_sq, written as plainly as possible.

    Args:
        master: (n,) float32, as the arrays below.
        grad: (n,) gradients, before `grad_scale`.
        exp_avg: (n,) first moments.
        exp_avg_sq: (n,) second moments.
        scalars: the scalars of the parameter group.
    """
    scale, beta1, rest1, beta2, rest2, step_size, root_bias2, eps, decay = map(np.float32, scalars.constants)
    is_decoupled = scalars.decoupled_weight_decay
    g = grad * scale if is_decoupled else grad * scale + decay * master
    p = master * decay if is_decoupled else master
    m = exp_avg * beta1 + g * rest1
    v = exp_avg_sq * beta2 + (g * rest2) * g
    return p - step_size * (m / (np.sqrt(v) / root_bias2 + eps)), m, v


def round_to_bf16(master: np.ndarray) -> np.ndarray:
    """The bits of float32 values rounded to bf16: to nearest, ties away from zero; all NaNs become one."""
    high = ((master.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(master), np.uint16(0x7FC0), high)


def low_bits(master: np.ndarray) -> np.ndarray:
    """The bits of a master that `round_to_bf16` drops; zero for NaN."""
    low = (master.view(np.uint32) & np.uint32(0xFFFF)).astype(np.uint16)
    return np.where(np.isnan(master), np.uint16(0), low)


def join_split(param: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The float32 masters with these bf16 bits and low bits: the inverse of the rounding."""
    high = param - (low >> np.uint16(15))
    return ((high.astype(np.uint32) << np.uint32(16)) | low).view(np.float32)


def _arrays(states: AdamStates, part: slice) -> list[np.ndarray]:
    """NumPy views of some elements of the states; bf16 parameters and low bits of masters as uint16."""
    tensors = [states.master[part], states.exp_avg[part], states.exp_avg_sq[part]]
    param = bf16_param(states)
    if param is not None:
        tensors.append(param[part].view(torch.int16))
    arrays = [tensor.numpy() for tensor in tensors]
    return [array.view(np.uint16) if array.dtype == np.int16 else array for array in arrays]
