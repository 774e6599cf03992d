"""Compare the Adam update on a CPU: ours, torch's fused kernel and DeepSpeed's CPUAdam.

    python -m toolkits.benchmarks adam_cpu [--quick] [--json FILE]

All contenders update the same tensors of 100 million elements in one process, one after the other, in rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch.optim.adamw import adamw

from patch.config.choices import MOMENT_BLOCK
from patch.optimizer.kernels.build import BuildError
from patch.optimizer.kernels.cpp_adam import CppAdam
from patch.optimizer.kernels.low_bit_moments import RngCoords
from patch.optimizer.kernels.numpy_adam import low_bits, round_to_bf16
from patch.optimizer.kernels.spec import AdamScalars, AdamStates, UpdateItem
from toolkits.benchmarks._measure import CPU, take_turns, time_call
from toolkits.benchmarks._report import Aim, NotRunError, Report, Rounds

_NUMEL = 99_999_936
SCALARS = AdamScalars(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)
# Elements that a peer casts, updates and casts back at a time, so that casts stay in a shared cache.
_CHUNK = 1 << 22
ROUNDS = (31, 9)


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    try:
        found, missing = contenders(Tensors(_NUMEL))
    except BuildError as reason:
        raise NotRunError(reason) from reason
    threads = torch.get_num_threads()
    for contender in found.values():
        contender.update()
    timed = {title: partial(time_call, one.update, CPU) for title, one in found.items()}
    rounds = take_turns(timed, arguments.rounds)
    times = Rounds({title: [one.wall for one in own] for title, own in rounds.items()})

    def over_ours(title: str) -> str:
        case = title.split(":")[0]
        return "" if case == "copy" else f"{times.ratio(title, f'{case}: ours'):.2f}"

    def speed(title: str) -> str:
        return f"{found[title].num_bytes * _NUMEL / median(times.values[title]) / 1e9:.1f}"

    head = f"{_NUMEL / 1e6:.0f} M parameters, {threads} threads, {arguments.rounds} rounds\n"
    text = f"{head}\n{times.table('', 'copy', {'GB/s': speed, '/ ours': over_ours})}{missing}"
    content = {"numel": _NUMEL, "threads": threads, "rounds": times.values, "missing": missing}
    return Report(text, _aims(times), content)


def _aims(times: Rounds) -> list[Aim]:
    peers = [name for name in ("torch fused", "DeepSpeed") if f"fp32: {name}" in times.values]
    rival = times.best(*(f"fp32: {name}" for name in peers))
    aims = [Aim(f"fp32: ours / best peer ({rival})", times.ratio("fp32: ours", rival), 1 / 0.98)]
    for peer in peers:
        rival = times.best(f"bf16: {peer}")
        aims.append(Aim(f"bf16: ours / {rival}", times.ratio("bf16: ours", rival), 1 / 1.4))
    split = times.ratio("bf16: ours, split master", "bf16: ours")
    aims.append(Aim("bf16: ours, split master / ours", split, 1 / 1.1))
    for case, ours in (("fp32", "ours"), ("bf16", "ours, split master")):
        for moments, bound in (("bf16", 0.8), ("8-bit", 0.7)):
            ratio = times.ratio(f"{case}: {ours}, {moments} moments", f"{case}: {ours}")
            aims.append(Aim(f"{case}: {moments} moments / fp32 moments", ratio, bound))
    return aims


class Contender(NamedTuple):
    """An implementation of the update of all parameters."""

    num_bytes: int
    """Bytes that an update must read and write per parameter. Additional traffic is not counted."""
    update: Callable[[], object]


class Tensors:
    """Tensors of shape (numel,) that all contenders share, so that 100 M parameters fit in 4 GB."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        self.master = torch.randn(numel).mul_(0.02)
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self.grad = torch.randn(numel).mul_(1e-3)
        self.grad_bf16 = self.grad.bfloat16()
        bits = [split(self.master.numpy()) for split in (round_to_bf16, low_bits)]
        weight, self.low_bits = (torch.from_numpy(half.view(np.int16)) for half in bits)
        self.weight = weight.view(torch.bfloat16)
        zeros = partial(torch.zeros, numel)
        self.bf16_moments = zeros(dtype=torch.bfloat16), zeros(dtype=torch.bfloat16)
        self.byte_moments = zeros(dtype=torch.uint8), zeros(dtype=torch.uint8)
        self.scales = [torch.zeros(numel // MOMENT_BLOCK) for _ in range(2)]


def contenders(tensors: Tensors) -> tuple[dict[str, Contender], str]:
    """Return "case name" -> contender for all that can run here, and a message if one is missing."""
    found = {"copy": Contender(8, lambda: tensors.grad.copy_(tensors.master)), **_ours(tensors)}
    found |= _peer("torch fused", _torch_fused, tensors)
    try:
        found |= _peer("DeepSpeed", _deepspeed(), tensors)
    except Exception as reason:  # DeepSpeed compiles its extension at first use, which can fail in many ways
        return found, f"missing: DeepSpeed's CPUAdam ({type(reason).__name__}: {reason})"
    return found, ""


def _ours(t: Tensors) -> dict[str, Contender]:
    kernel, draw = CppAdam(), RngCoords("weight", 0, t.grad.numel(), 0)
    fp32 = UpdateItem(t.grad, AdamStates(t.master, t.exp_avg, t.exp_avg_sq), SCALARS)
    bf16 = UpdateItem(t.grad_bf16, AdamStates(t.master, t.exp_avg, t.exp_avg_sq, t.weight), SCALARS)
    split = UpdateItem(t.grad_bf16, AdamStates(t.low_bits, t.exp_avg, t.exp_avg_sq, t.weight), SCALARS)
    items = {"fp32: ours": (28, fp32), "bf16: ours": (28, bf16), "bf16: ours, split master": (26, split)}
    for title in ("fp32: ours", "bf16: ours, split master"):
        num_bytes, item = items[title]
        master, *_, param = item.states[:4]
        halves = AdamStates(master, *t.bf16_moments, param)
        eight = AdamStates(master, *t.byte_moments, param, *t.scales)
        for moments, states, saved in (("bf16", halves, 8), ("8-bit", eight, 12)):
            narrow = item._replace(states=states, draw=draw)
            items[f"{title}, {moments} moments"] = (num_bytes - saved, narrow)
    return {title: Contender(size, partial(kernel.update, [item])) for title, (size, item) in items.items()}


# Arguments: param, grad, exp_avg, exp_avg_sq, all float32, updated in place.
_Update = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]


def _peer(name: str, update: _Update, t: Tensors) -> dict[str, Contender]:
    """Return contenders of an fp32 kernel. In bf16 it casts before and after, at once or in chunks."""
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

    return {
        f"fp32: {name}": Contender(28, lambda: update(t.master, t.grad, t.exp_avg, t.exp_avg_sq)),
        f"bf16: {name}, casts in chunks": Contender(28, chunked),
        f"bf16: {name}, casts of all": Contender(28, flat),
    }


def _torch_fused(*tensors: torch.Tensor) -> None:
    step = torch.tensor(SCALARS.step - 1.0)  # the previous step; adamw increments it
    params, grads, exp_avgs, exp_avg_sqs = ([one] for one in tensors)
    adamw(
        params, grads, exp_avgs, exp_avg_sqs, [], [step], fused=True, amsgrad=False,
        beta1=SCALARS.beta1, beta2=SCALARS.beta2, lr=SCALARS.lr, weight_decay=SCALARS.weight_decay,
        eps=SCALARS.eps, maximize=False,
    )  # fmt: skip


def _deepspeed() -> _Update:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    s = SCALARS
    optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))], adamw_mode=True)
    scalars = (optimizer.opt_id, s.step, s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, True)
    update = partial(optimizer.ds_opt_adam.adam_update, *scalars)
    # The destructor of the optimizer would free the kernel's state.
    update.optimizer = optimizer  # type: ignore[attr-defined]
    return update
