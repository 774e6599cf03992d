"""The contenders of `adam_cpu`: functions that each update the same flat states once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch.optim.adamw import adamw

from patch.optimizer.kernels import AdamScalars, AdamStates, UpdateItem
from patch.optimizer.kernels.cpp_adam import CppAdam
from patch.optimizer.kernels.numpy_adam import low_bits, round_to_bf16

SCALARS = AdamScalars(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)
# Elements that a peer casts, updates and casts back at a time, so that the casts stay in a shared cache.
_CHUNK = 1 << 22


class Contender(NamedTuple):
    """One way to update all parameters."""

    case: str
    name: str
    num_bytes: int
    """Bytes that one update must read and write per parameter; additional traffic is not counted."""
    update: Callable[[], object]


class Tensors:
    """The tensors that all contenders share, each (numel,), so that 100 M parameters fit in 3 GB."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        self.master = torch.randn(numel).mul_(0.02)
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self.grad = torch.randn(numel).mul_(1e-3)
        self.grad_bf16 = self.grad.bfloat16()
        bits = [split(self.master.numpy()) for split in (round_to_bf16, low_bits)]
        weight, self.low_bits = (torch.from_numpy(half.view(np.int16)) for half in bits)
        self.weight = weight.view(torch.bfloat16)


def contenders(tensors: Tensors) -> tuple[list[Contender], str]:
    """All contenders that can run here, and a message if one is missing."""
    found = [Contender("copy", "copy", 8, lambda: tensors.grad.copy_(tensors.master)), *_ours(tensors)]
    found += _peer("torch fused", _torch_fused, tensors)
    try:
        found += _peer("DeepSpeed", _deepspeed(), tensors)
    except Exception as reason:  # its extension is compiled at first use, which can fail in many ways
        return found, f"missing: DeepSpeed's CPUAdam ({type(reason).__name__}: {reason})"
    return found, ""


def _ours(t: Tensors) -> list[Contender]:
    kernel = CppAdam()
    fp32 = UpdateItem(t.grad, AdamStates(t.master, t.exp_avg, t.exp_avg_sq), SCALARS)
    bf16 = UpdateItem(t.grad_bf16, AdamStates(t.master, t.exp_avg, t.exp_avg_sq, t.weight), SCALARS)
    split = UpdateItem(t.grad_bf16, AdamStates(t.low_bits, t.exp_avg, t.exp_avg_sq, t.weight), SCALARS)
    return [
        Contender("fp32", "ours", 28, lambda: kernel.update([fp32])),
        Contender("bf16", "ours", 28, lambda: kernel.update([bf16])),
        Contender("bf16", "ours, split master", 26, lambda: kernel.update([split])),
    ]


# param, grad, exp_avg, exp_avg_sq: all float32, updated in place.
_Update = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]


def _peer(name: str, update: _Update, t: Tensors) -> list[Contender]:
    """A kernel for one type only: in bf16 it needs casts before and after, of everything or in chunks."""
    states = (t.master, t.exp_avg, t.exp_avg_sq)
    chunks = list(zip(*(x.split(_CHUNK) for x in (*states, t.grad_bf16, t.weight)), strict=True))
    scratch = torch.empty(_CHUNK)

    def chunked() -> None:
        for master, exp_avg, exp_avg_sq, grad, weight in chunks:
            cast = scratch[: grad.numel()].copy_(grad)
            update(master, cast, exp_avg, exp_avg_sq)
            weight.copy_(master)

    def flat() -> None:
        update(t.master, t.grad.copy_(t.grad_bf16), t.exp_avg, t.exp_avg_sq)
        t.weight.copy_(t.master)

    return [
        Contender("fp32", name, 28, lambda: update(t.master, t.grad, t.exp_avg, t.exp_avg_sq)),
        Contender("bf16", f"{name}, casts in chunks", 28, chunked),
        Contender("bf16", f"{name}, casts of all", 28, flat),
    ]


def _torch_fused(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> None:
    step = torch.tensor(SCALARS.step - 1.0)  # of the previous update; adamw increments it
    adamw(
        [param], [grad], [exp_avg], [exp_avg_sq], [], [step], fused=True, amsgrad=False,
        beta1=SCALARS.beta1, beta2=SCALARS.beta2, lr=SCALARS.lr, weight_decay=SCALARS.weight_decay,
        eps=SCALARS.eps, maximize=False,
    )  # fmt: skip


def _deepspeed() -> _Update:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    s = SCALARS
    optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))], adamw_mode=True)
    library, index = optimizer.ds_opt_adam, optimizer.opt_id

    def update(param: torch.Tensor, *others: torch.Tensor) -> None:
        library.adam_update(
            index, s.step, s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, True, param, *others
        )

    # Keeps the optimizer alive, whose destructor frees the kernel's state.
    update.optimizer = optimizer  # type: ignore[attr-defined]
    return update
